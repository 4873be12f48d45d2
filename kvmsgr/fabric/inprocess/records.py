"""Records and counts: how the in-process poller speaks."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable

from kvmsgr.fabric.interface import Record

STATS = (
    "posted_writes", "posted_bytes", "posted_rows", "completed_writes", "landed_writes", "landed_rows", "strays",
    "again", "errors", "lost_records", "rounds", "naps", "sleeps", "beats_sent", "beats_heard", "abandoned",
)  # fmt: skip


class Records:
    """What was recorded and not yet taken; `fd` is readable while there is something."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        self.clock = clock
        self.stats = dict.fromkeys(STATS, 0)
        self._waiting: deque[Record] = deque()

    def report(self, kind: int, ident: int, value: int, extra: int = 0) -> None:
        if not self._waiting:
            os.eventfd_write(self.fd, 1)
        self._waiting.append((kind, ident, value, self.clock(), extra))

    def count(self, stat: str, change: int = 1) -> None:
        self.stats[stat] += change

    def take(self, max_records: int) -> list[Record]:
        if not 1 <= max_records <= 1024:
            raise ValueError("a batch has 1 to 1024 records")
        taken = [self._waiting.popleft() for _ in range(min(max_records, len(self._waiting)))]
        if taken and not self._waiting:
            os.eventfd_read(self.fd)
        return taken
