"""One process of these tests: a messenger with a toy engine around it.

`python -m tests.lost.role prefiller` (or `decoder`) obeys lines of JSON, {"do": ..., ...}, and tells what happens in
lines of JSON: {"event": ..., "t": seconds by CLOCK_MONOTONIC, which all processes of a host share, ...}.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar

import structlog

import kvmsgr
from kvmsgr._ext import native

from .cache import TaggedCache


def tell(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, "t": time.monotonic(), **fields}), flush=True)


class Role:
    """What both roles have. A command "x" is the method `do_x`, its arguments are the rest of the line."""

    next_owner: ClassVar[int]
    foreign_owner: ClassVar[int]
    messenger: kvmsgr.Messenger

    def __init__(self) -> None:
        self.closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def problem(self, what: str) -> None:
        tell("problem", what=what)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.problem("".join(traceback.format_exception(task.exception())))

    async def do_open(self, number: int, config: dict[str, Any], ranks: int, interfaces: int) -> None:
        self.number = number
        self.cache = TaggedCache(self.next_owner, number, ranks)
        described = self.cache.describe(interfaces)
        self.messenger = await kvmsgr.Messenger.open(kvmsgr.Config(**config), ranks=described)
        self.opened()
        descriptor = self.messenger.descriptor
        tell("open", descriptor=[descriptor.address, descriptor.incarnation, descriptor.name])

    def opened(self) -> None:
        """Start what goes on by itself."""

    async def do_block(self, seconds: float) -> None:
        """An engine that keeps the interpreter busy: no callback of the loop runs."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        tell("unblocked")

    async def do_audit(self, give_kept: bool = False) -> None:
        """Look at every byte, and at what the process holds."""
        for flaw in self.cache.flaws(self.foreign_owner):
            self.problem(flaw)
        gc.collect()
        node, stats = self.messenger._node, self.messenger.stats()
        tell(
            "audit",
            kept=len(self.cache.kept),
            held=sum(pages.held for pages in node.fabric.state.pages()),
            legs=[[leg.role, leg.request_id, leg.state] for leg in node.fabric.state.legs()],
            peers=len(node.peers),
            unhealthy=self.messenger.unhealthy,
            strays=stats["strays"],
            resident_bytes=resident_bytes(),
            abandoned=stats["abandoned"],
            files=len(os.listdir("/proc/self/fd")),
        )
        if give_kept:
            self.cache.give_kept()

    async def do_close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.messenger.close()
        self.closed = True


def resident_bytes() -> int:
    """Memory of this process alone. Shared files are not in it: the state file fills as its slots are used in turn."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


async def obey(kind: str) -> None:
    from .decoder_role import Decoder
    from .prefiller_role import Prefiller

    roles: dict[str, type[Role]] = {"decoder": Decoder, "prefiller": Prefiller}
    role = roles[kind]()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while not role.closed:
        line = await lines.readline()
        if not line:
            os._exit(1)  # the test is gone
        command = json.loads(line)
        await getattr(role, f"do_{command.pop('do')}")(**command)


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(obey(sys.argv[1]))
    gc.collect()
    tell("closed", left={kind: num for kind, num in native.debug_counters().items() if num})


if __name__ == "__main__":
    main()
