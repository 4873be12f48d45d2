from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmsgr._ext import native
from tests.native.loopback import Pair


@pytest.fixture(params=["net", "shm", pytest.param("tcp;ofi_rxm", marks=pytest.mark.slow)])
def provider(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in native.providers():
        pytest.skip(f"libfabric offers no {name} here")
    return name


@pytest.fixture
def pair(provider: str) -> Iterator[Pair]:
    with Pair(provider) as pair:
        yield pair
