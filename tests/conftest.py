"""What every test gets: a guard against native leaks, and both event loops where it matters."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

LOOPBACK_TESTS = Path(__file__).parent / "loopback"

settings.register_profile("any machine", deadline=None)  # a busy one now and then stands still for a second
settings.load_profile("any machine")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Run the tests that touch real I/O on both loops, the others on asyncio's alone; both in debug mode."""
    if LOOPBACK_TESTS in item.path.parents:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


def live_native_objects() -> dict[str, int]:
    """Count the native objects that are still alive, by kind; empty when the native layer was never imported."""
    native = sys.modules.get("kvmsgr._ext.native")
    return {kind: num for kind, num in native.debug_counters().items() if num} if native else {}


@pytest.fixture(autouse=True)
def no_native_leaks() -> Iterator[None]:
    """Fail a test that leaves native objects behind, and name their kinds."""
    yield
    if live_native_objects():
        gc.collect()  # objects in a cycle are late, not leaked
        leaked = live_native_objects()
        assert not leaked, f"the test left native objects alive: {leaked}; close what it opened"
