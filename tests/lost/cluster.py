"""The processes of a test, and what they have told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvmsgr import inspect
from kvmsgr.fabric import leftovers

Event = dict[str, Any]
PATIENCE_S = 60.0  # what never comes fails a test; how slow a busy machine is does not
LOG_BYTES = 4000


class Child:
    """One process. `events` is everything it has told so far."""

    def __init__(self, name: str, role: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.role, self.log = name, role, log
        self.events: list[Event] = []
        self.descriptor: list[str] = []
        self.pid = process.pid
        self._process = process
        self._told = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.events.append(json.loads(line))
            self._told.set()
        self._told.set()

    # What it does

    def do(self, command: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")

    async def ask(self, command: str, answer: str, **arguments: object) -> Event:
        """Have it do something, and wait until it says that it has."""
        since = len(self.events)
        self.do(command, **arguments)
        return await self.event(answer, since=since)

    def kill(self) -> float:
        return self._signal(signal.SIGKILL)

    def stop(self) -> float:
        return self._signal(signal.SIGSTOP)

    def wake(self) -> float:
        return self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> float:
        """Returns when."""
        now = time.monotonic()
        self._process.send_signal(number)
        return now

    async def ended(self) -> int:
        return await asyncio.wait_for(self._process.wait(), PATIENCE_S)

    async def end(self) -> None:
        """Whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reader

    def legs(self) -> dict[str, inspect.LegView]:
        """What its state file shows now, by request: that can be read whatever the process does."""
        [path] = inspect.state_files(pids=[self.pid])
        return {leg.request_id: leg for leg in inspect.snapshot(path).legs}

    # What it has told

    def told(self, kind: str, **fields: object) -> list[Event]:
        """Events of a kind with these fields."""
        return [event for event in self.events if event["event"] == kind and fields.items() <= event.items()]

    def of(self, kind: str, prefix: str) -> dict[str, Event]:
        """Events of a kind by request, of all requests whose id begins so."""
        return {event["id"]: event for event in self.told(kind) if event["id"].startswith(prefix)}

    def all_released(self, prefix: str, last: str = "released") -> bool:
        """Whether the pages of every such request that began here have come back."""
        begun = self.of("asked" if self.role == "decoder" else "accepted", prefix)
        return begun.keys() == self.of(last, prefix).keys()

    async def idle(self) -> None:
        """Wait until nothing of any request is left here: a prefiller also hears how each ended at its decoder."""
        last = "released" if self.role == "decoder" else "outcome"
        await self.until(lambda: self.all_released("", last), "nothing is left of any request")

    async def event(self, kind: str, since: int = 0, seconds: float = PATIENCE_S, **fields: object) -> Event:
        """Wait for one."""

        def first() -> Event | None:
            found = (e for e in self.events[since:] if e["event"] == kind and fields.items() <= e.items())
            return next(found, None)

        await self.until(lambda: first() is not None, f"{kind} {fields or ''}", seconds)
        event = first()
        assert event is not None
        return event

    async def requests(self, num: int, kind: str, prefix: str) -> dict[str, Event]:
        """Wait for an event of a kind from at least so many requests; returns all there are."""
        await self.until(lambda: len(self.of(kind, prefix)) >= num, f"{num} times {kind} of {prefix}")
        return self.of(kind, prefix)

    async def stream_over(self, name: str, width: int) -> None:
        """Wait until each of the requests side by side in a stream was its last."""
        await self.until(lambda: len(self.told("stream over", name=name)) == width, f"stream {name} is over")

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
        """Wait until what it has told fulfils a condition."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            assert not self._reader.done(), f"{self.name} ended ({self._process.returncode}); waited for: {what}"
            self._told.clear()
            try:
                await asyncio.wait_for(self._told.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise AssertionError(f"not within {seconds:g} s, {self.name}: {what}") from None

    def check(self) -> None:
        problems = [event["what"] for event in self.told("problem")]
        assert not problems, f"{self.name}: " + "\n".join(problems)


class Cluster:
    """Messengers of one test, all with the same settings, each with so many ranks and network interfaces a rank."""

    def __init__(self, folder: Path, ranks: int = 1, interfaces: int = 1, **config: object) -> None:
        self._folder, self._config = folder, config
        self._shape = {"ranks": ranks, "interfaces": interfaces}
        self.children: list[Child] = []

    async def start(self, role: str, name: str) -> Child:
        """A process that is ready to open a messenger."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.lost.role", role),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
            )
        child = Child(name, role, process, log)
        self.children.append(child)
        return child

    async def open(self, child: Child, **config: object) -> Child:
        config = {"name": child.name, "model": "lost", **self._config, **config}
        number = self.children.index(child) + 1
        opened = await child.ask("open", "open", number=number, config=config, **self._shape)
        child.descriptor = opened["descriptor"]
        return child

    async def add(self, role: str, *names: str) -> list[Child]:
        """Processes with open messengers."""
        children = [await self.start(role, name) for name in names]
        return list(await asyncio.gather(*(self.open(child) for child in children)))

    async def close(self, *children: Child) -> None:
        """End those that live in order: nothing of them may be left."""
        closed = await asyncio.gather(*(child.ask("close", "closed") for child in children))
        for child, event in zip(children, closed, strict=True):
            assert await child.ended() == 0
            assert not event["left"], f"{child.name} leaves {event['left']}"
            child.check()

    async def end(self) -> None:
        await asyncio.gather(*(child.end() for child in self.children))
        leftovers.sweep(leftovers.state_folder())  # as the next messenger would
        deadline = time.monotonic() + PATIENCE_S
        while left := self._segments():  # another process of the host may be sweeping what was theirs just now
            assert time.monotonic() < deadline, f"shared memory is left of processes that are gone: {left}"
            await asyncio.sleep(0)

    def _segments(self) -> list[str]:
        return [path.name for child in self.children for path in leftovers.SHARED_MEMORY.glob(f"{child.pid}:*")]

    def show_logs(self) -> None:
        for child in self.children:
            print(f"--- {child.name}: {child.events[-3:]}\n{child.log.read_text()[-LOG_BYTES:]}")


@asynccontextmanager
async def cluster(folder: Path, ranks: int = 1, interfaces: int = 1, **config: object) -> AsyncIterator[Cluster]:
    """Processes that end with the test. Their logs are shown when it fails."""
    made = Cluster(folder, ranks, interfaces, **config)
    try:
        yield made
    except BaseException:
        made.show_logs()
        raise
    finally:
        await made.end()


async def until(t: float) -> None:
    """Wait for an hour on the clock: what is waited for here is that a lease is over, while nothing happens."""
    await asyncio.sleep(max(0.0, t - time.monotonic()))
