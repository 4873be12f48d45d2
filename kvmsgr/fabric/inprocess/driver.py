"""Lets an in-process poller go round on an event loop, by the clock of that loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .poller import InProcessPoller

LOOK_S, MOST_LOOK_S = 0.0001, 0.002
"""Between two rounds while something is under way that tells nobody: a layer counter, a write that is held. The longer
nothing happens the longer."""
IDLE_S = 0.25
LEAST_S = 1e-6
"""Longer than what is lost between a float in seconds and nanoseconds."""


class Handle(Protocol):
    def cancel(self) -> object: ...


class Loop(Protocol):
    """What is needed of an event loop; asyncio's and uvloop's fit."""

    def time(self) -> float: ...
    def call_soon_threadsafe(self, callback: Callable[[], object], /) -> object: ...
    def call_later(self, delay: float, callback: Callable[[], object], /) -> Handle: ...


class Driver:
    """Pumps until the poller is closed."""

    def __init__(self, poller: InProcessPoller, loop: Loop) -> None:
        self._poller = poller
        self._loop = loop
        self._later: Handle | None = None
        self._woken = False
        self._look_s = LOOK_S
        poller.drive(self._now_ns, self._wake)
        self._wake()

    def _now_ns(self) -> int:
        return int(self._loop.time() * 1e9)

    def _wake(self) -> None:
        """From any thread, under the lock of the air."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._woken = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._poller.closed:
            return
        if self._poller.pump():
            self._look_s = LOOK_S
            self._wake()
            return
        self._look_s = min(2 * self._look_s, MOST_LOOK_S)
        delay_s = self._look_s if self._poller.busy else IDLE_S
        if (next_ns := self._poller.next_ns) is not None:
            delay_s = min(delay_s, max(next_ns / 1e9 - self._loop.time(), LEAST_S))
        self._later = self._loop.call_later(delay_s, self._run)
