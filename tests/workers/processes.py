"""Starts worker processes, and talks to them without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kvmsgr.errors import WorkerLostError
from kvmsgr.workers import WorkerGroup

PATIENCE_S = 20.0
T = TypeVar("T")


class ChildError(Exception):
    """What the child's code raised: `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Child:
    """One process. It is no asyncio subprocess, for that one's exit status would be taken by the event loop."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def say(self, code: str) -> None:
        """Have code run; `answer` gives what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        line = await within(asyncio.to_thread(self._process.stdout.readline))
        assert line, "the child has ended"
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"], answer["text"])
        return answer["value"]

    async def __call__(self, code: str) -> Any:
        self.say(code)
        return await self.answer()

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_status(self) -> int:
        """As its parent is told; negative: the signal that killed it."""
        return self._process.wait(PATIENCE_S)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.kill(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


@asynccontextmanager
async def children(number: int) -> AsyncIterator[list[Child]]:
    started = [Child() for _ in range(number)]
    try:
        for child in started:  # so that no test waits for their imports
            assert await child("1 + 1") == 2
        yield started
    finally:
        for child in started:
            child.end()


@asynccontextmanager
async def joined(
    folder: Path, num_ranks: int, total_heads: int = 4, **options: Any
) -> AsyncIterator[tuple[WorkerGroup, list[Child]]]:
    """A group whose ranks have published; each worker's link is `link`."""
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(children(num_ranks))
        for rank, worker in enumerate(workers):
            worker.say(
                f"allocate(); link = WorkerLink.join({address_in(folder)!r}, {rank}); publish(link, {total_heads})"
            )
        group = await within(WorkerGroup.listen(address_in(folder), num_ranks, **options))
        stack.callback(group.close)
        for worker in workers:
            await worker.answer()
        yield group, workers


def address_in(folder: Path) -> str:
    return f"unix:{folder / 'workers'}"


async def within(awaited: Awaitable[T], seconds: float = PATIENCE_S) -> T:
    return await asyncio.wait_for(awaited, seconds)


async def loss(group: WorkerGroup) -> WorkerLostError:
    """The next rank that is lost."""
    lost: asyncio.Future[WorkerLostError] = asyncio.get_running_loop().create_future()
    group.on_lost(lambda error: None if lost.done() else lost.set_result(error))
    return await within(lost)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that no event tells of."""
    for _ in range(int(PATIENCE_S / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"never: {what}")
