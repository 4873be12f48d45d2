"""The conformance suite over every fabric of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmsgr.errors import FabricUnavailableError
from kvmsgr.fabric.libfabric import FabricSettings, open_fabric, providers
from kvmsgr.testing.conformance import Conformance
from kvmsgr.testing.counting import Counting
from kvmsgr.testing.fabrics import FabricUnderTest, InProcess, Libfabric, LibfabricGroup
from kvmsgr.testing.fences import Fences
from kvmsgr.testing.flow import Flow
from kvmsgr.testing.holding import Holding
from kvmsgr.testing.joining import Joining
from kvmsgr.testing.spoiling import Spoiling

NET = next(name for name in ("tcp", "net") if name in providers())


class TestInProcess(Conformance):
    @pytest.fixture(params=[1, 2, 3])
    def fabric(self, request: pytest.FixtureRequest) -> FabricUnderTest:
        return InProcess(request.param)


class TestUnordered(Conformance):
    @pytest.fixture
    def fabric(self) -> FabricUnderTest:
        return InProcess(4, any_order=True)


class TestLibfabric(Conformance):
    @pytest.fixture(params=["shm", "net", "tcp", "tcp;ofi_rxm"])
    def fabric(self, request: pytest.FixtureRequest) -> FabricUnderTest:
        if request.param not in providers():
            pytest.skip(f"libfabric offers no {request.param} here")
        return Libfabric(request.param)


class TestPollerPerInterface(Conformance):
    @pytest.fixture
    def fabric(self) -> FabricUnderTest:
        return LibfabricGroup(NET)


class TestIdlePoller(Counting, Flow, Joining, Holding, Fences, Spoiling):
    """A second poller watches each step, and has nothing to send."""

    @pytest.fixture
    def fabric(self) -> FabricUnderTest:
        return LibfabricGroup(NET, num_idle=1)


@pytest.mark.parametrize("refused", ["sockets", "udp;ofi_rxd", "no-such-provider"])
def test_a_provider_that_will_not_do_is_refused_by_name(refused: str, tmp_path: Path) -> None:
    settings = FabricSettings(
        refused, True, ["127.0.0.1"], "ab" * 16, 64, 0.5, 2.0, 5.0, "auto", [(1, None)], None, str(tmp_path)
    )
    assert refused not in providers()
    with pytest.raises(FabricUnavailableError, match=refused):
        open_fabric(settings, [])
