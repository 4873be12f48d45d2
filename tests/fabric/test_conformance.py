"""The conformance suite over every fabric of this machine."""

from __future__ import annotations

import pytest

from kvmsgr.fabric.libfabric import providers
from kvmsgr.testing.conformance import Conformance
from kvmsgr.testing.fabrics import FabricUnderTest, InProcess, Libfabric


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
