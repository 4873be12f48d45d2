"""The other process: where pages land. Driven by questions over a pipe."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import secrets
import select
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmsgr._ext import native

from .bare import Bare, Name
from .machine import pin

POOL_BYTES = 128 << 20
WINDOW = 128  # operations in flight, of the poller and of the bare loop
ANSWER_S = 40.0
SLOT, NUM_GENERATIONS, BEAT_SLOT = 3, 16, 4
HEARTBEAT_NS, LEASE_NS = 10_000_000_000, 60_000_000_000  # both processes are starved and stopped at times

Pool = npt.NDArray[np.uint8]
Link = tuple[bytes, list[tuple[int, int, int]], tuple[int, int, int]]  # address, regions, heartbeats
Record = tuple[int, int, int, int, int]


class TargetError(Exception):
    """The other process failed, died, or did not answer."""


def immediate(run: int) -> int:
    """What the writes of a run carry; a late one does not count for the next run."""
    return SLOT << 18 | run % NUM_GENERATIONS << 14


class Node:
    """A poller and one registered pool, in either process."""

    def __init__(self, provider: str, pool: Pool, core: int, *, spin: bool) -> None:
        self.state = native.StateFile(None, incarnation=secrets.randbits(64))
        self.poller = native.Poller(
            provider, self.state, core=core, spin=spin, heartbeat_ns=HEARTBEAT_NS, lease_ns=LEASE_NS
        )
        self.poller.register(pool.ctypes.data, pool.nbytes)
        self._seen: list[Record] = []

    def wait(self, kind: int) -> Record:
        """The next record of this kind. A failed link ends the benchmark."""
        deadline_s = time.monotonic() + ANSWER_S / 2
        while True:
            for record in self._seen:
                if record[0] in (native.LINK_FAILED, native.OVERFLOW, native.STRAY, native.STEP_FAULT):
                    raise TargetError(f"unexpected record {record}; stats {self.poller.stats()}")
                if record[0] == kind:
                    self._seen.remove(record)
                    return record
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TargetError(f"no record of kind {kind}; stats {self.poller.stats()}")
            select.select([self.poller.fd], [], [], left_s)
            self._seen += self.poller.take()

    def open_link(self) -> tuple[int, Link]:
        link = self.poller.open_link([secrets.randbits(63), secrets.randbits(63)])
        self.wait(native.LINK_OPENED)
        self.state.link_beat(BEAT_SLOT, 0, link)
        base, _, key = self.poller.link_cell(link)
        return link, (self.poller.link_address(link), self.poller.link_regions(link), (base, key, BEAT_SLOT << 18))

    def connect(self, link: int, peer: Link) -> None:
        address, regions, beat = peer
        self.poller.connect_link(link, [address], [(*region, 0) for region in regions], WINDOW, [(0, *beat)])

    def rest(self) -> None:
        """Wait until the poller sleeps: a young connection keeps it spinning, which would disturb the bare loop."""
        before = self.poller.stats()["sleeps"]
        while self.poller.stats()["sleeps"] == before:
            time.sleep(0.01)

    def close(self) -> None:
        self.poller.close()
        self.state.close()


def map_pool(file: int) -> Pool:
    """The pool in a file that both processes have. Closes the file."""
    with open(file, "r+b") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), POOL_BYTES), dtype=np.uint8)


class Answers:
    """The target's side: a method a question."""

    def __init__(self, provider: str, pool: Pool, core: int, spin: bool) -> None:
        self.node = Node(provider, pool, core, spin=spin)
        self.bare = Bare(provider, pool, is_target=True)
        self.generation: int | None = None

    def connect(self, theirs: Link, their_bare: Name) -> tuple[Link, Name]:
        link, ours = self.node.open_link()
        self.node.connect(link, theirs)
        self.bare.connect(their_bare)
        return ours, self.bare.name

    def rest(self) -> None:
        self.node.rest()

    def expect(self, run: int, num_rows: int) -> None:
        if self.generation is not None:
            self.node.state.unlink_slot(SLOT, self.generation)
        self.generation = run % NUM_GENERATIONS
        self.node.state.open_attempt(run, num_rows, f"run-{run}")
        self.node.state.link_slot(SLOT, self.generation, run)

    def reached(self) -> int:
        return self.node.wait(native.REACHED)[3]

    def count(self, num_writes: int) -> int:
        return self.bare.count(num_writes)

    def close(self) -> None:
        self.node.close()
        self.bare.close()


def serve(pipe: Connection, provider: str, core: int, spin: bool) -> None:
    """What runs in the other process, until its pipe is closed."""
    pin(core)
    answers = Answers(provider, map_pool(recv_handle(pipe)), core, spin)
    try:
        while question := next_question(pipe):
            name, *arguments = question
            pipe.send((True, getattr(answers, name)(*arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        raise
    finally:
        answers.close()


def next_question(pipe: Connection) -> tuple[Any, ...] | None:
    """None when the other side has closed the pipe."""
    try:
        question: tuple[Any, ...] = pipe.recv()
    except EOFError:
        return None
    return question


class Target:
    """Our side of it. `pool` is its memory, shared with us so that what landed can be compared."""

    def __init__(self, provider: str, core: int, *, spin: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, provider, core, spin), daemon=True)
        self._process.start()
        theirs.close()
        file = os.memfd_create("pool")
        os.ftruncate(file, POOL_BYTES)
        send_handle(self._pipe, file, self._process.pid)
        self.pool = map_pool(file)

    def tell(self, question: str, *arguments: Any) -> None:
        self._pipe.send((question, *arguments))

    def answer(self) -> Any:
        try:
            if not self._pipe.poll(ANSWER_S):
                raise TargetError(f"no answer from the target in {ANSWER_S:g} s")
            fine, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(1)
            raise TargetError(f"the target died (exit code {self._process.exitcode})") from None
        if not fine:
            raise TargetError(f"the target failed:\n{value}")
        return value

    def ask(self, question: str, *arguments: Any) -> Any:
        self.tell(question, *arguments)
        return self.answer()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()
