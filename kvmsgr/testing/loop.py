"""An event loop whose time passes only when nothing is left to do: seconds of a scenario take milliseconds, and the
same seed takes the same way."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvmsgr.fabric.inprocess import Air, use_air

T = TypeVar("T")
START_S = 1000.0


class _Selector(selectors.DefaultSelector):
    """Instead of waiting it lets time pass."""

    now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            return super().select(None)  # nobody waits for a time
        self.now_s += timeout
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Sockets are real and must answer at once, as those of one process do; control connections should be `unix:`.
    What is given to an executor is done on the spot, for no time passes in other threads."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now_s

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # no threads
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # raised where it is awaited
            future.set_exception(error)
        return future


def simulate(scenario: Callable[[Air], Coroutine[Any, Any, T]], seed: int, *, any_order: bool = False) -> T:
    """Run a scenario in an air and a time of its own. Messengers in it are opened with `Config(fabric="inprocess")`."""
    with use_air(Air(seed, any_order=any_order)) as air, asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(scenario(air))
