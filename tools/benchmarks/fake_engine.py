"""The prefiller of `tools/bench overlap`, in a process of its own. Its forward passes only take time."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

import numpy as np
import numpy.typing as npt
import structlog

import kvmsgr

PLANES, HEADS, PAGE_TOKENS, DIM = 2, 8, 16, 128
PAGE_BYTES = PLANES * HEADS * PAGE_TOKENS * DIM * 2
ANSWER_S = 60.0

How = Literal["overlapped", "at the end"]
Kv = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Shape:
    """What is computed: chunks of a prompt, a layer at a time. `num_pages` are a layer's, all chunks together."""

    num_layers: int
    layer_s: float
    num_chunks: int
    num_pages: int

    @property
    def compute_s(self) -> float:
        return self.num_chunks * self.num_layers * self.layer_s

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_pages * PAGE_BYTES

    @property
    def num_positions(self) -> int:
        return self.num_pages * PAGE_TOKENS

    def chunk(self, number: int) -> tuple[int, int]:
        """Its positions [start, stop)."""
        edges = [self.num_pages * at // self.num_chunks * PAGE_TOKENS for at in (number, number + 1)]
        return edges[0], edges[1]


@dataclass(frozen=True)
class Forward:
    """What was seen of a request: the time of its last layer signal, and the bytes that had been posted by then."""

    last_signal_ns: int
    posted_bytes: int


def new_cache(shape: Shape) -> tuple[Kv, kvmsgr.Cache]:
    kv = np.zeros((shape.num_layers, shape.num_pages, PLANES, HEADS, PAGE_TOKENS, DIM), np.uint16)
    return kv, kvmsgr.Cache([kvmsgr.CacheGroup.from_tensors([kv], "layer page plane head token dim")])


def config(name: str, fabric: str) -> kvmsgr.Config:
    """Leases are long: this machine may be busy with something else."""
    return kvmsgr.Config(name=name, model="overlap", fabric=fabric, heartbeat_s=5.0, lease_s=30.0)


def marked(shape: Shape) -> npt.NDArray[np.uint64]:
    """What each page holds in all of its words, shape (layer, page)."""
    return np.arange(1, shape.num_layers * shape.num_pages + 1, dtype=np.uint64).reshape(shape.num_layers, -1)


def shuffled(shape: Shape, seed: int) -> list[int]:
    """Pages in an order in which no two can be merged, but by chance."""
    pages: list[int] = np.random.default_rng(seed).permutation(shape.num_pages).tolist()
    return pages


class FakeEngine:
    """Computes one request at a time, blocking its event loop meanwhile."""

    def __init__(self, messenger: kvmsgr.Messenger, shape: Shape) -> None:
        self._messenger = messenger
        self._shape = shape
        self._requests = messenger.requests()
        self._pages = shuffled(shape, 1)

    async def prefill(self, how: How) -> Forward:
        """Compute the next request. "overlapped": its layers go as they are signalled; else all of it at the end."""
        request = await anext(self._requests)
        request.accept()
        before = self._messenger.stats()["posted_bytes"]
        chunks = range(self._shape.num_chunks)
        if how == "overlapped":
            steps = [self._messenger.begin_step([self._chunk(request, number)]) for number in chunks]
        else:
            steps = [self._messenger.begin_step([]) for _ in chunks]
        forward = self._compute(steps, before)
        if how == "at the end":
            for number in chunks:
                self._messenger.begin_step([self._chunk(request, number, ready=True)])
        await request.released()
        return forward

    def _chunk(self, request: kvmsgr.PrefillRequest, number: int, *, ready: bool = False) -> kvmsgr.Chunk:
        return kvmsgr.Chunk(request, *self._shape.chunk(number), [kvmsgr.Span(0, 0, self._pages)], ready)

    def _compute(self, steps: Sequence[kvmsgr.Step], posted_before: int) -> Forward:
        num_left = len(steps) * self._shape.num_layers
        due_s = time.monotonic()
        for step in steps:
            step.signal.start()
            for _ in range(self._shape.num_layers):
                due_s += self._shape.layer_s
                time.sleep(max(due_s - time.monotonic(), 0))
                num_left -= 1
                if not num_left:
                    posted_bytes = self._messenger.stats()["posted_bytes"] - posted_before
                    last_signal_ns = time.monotonic_ns()
                step.signal.bump()
        return Forward(last_signal_ns, posted_bytes)


async def _serve(pipe: Connection, fabric: str, shape: Shape) -> None:
    kv, cache = new_cache(shape)
    kv.view(np.uint64)[:] = marked(shape)[:, :, None, None, None, None]
    async with await kvmsgr.Messenger.open(config("prefiller", fabric), cache) as messenger:
        engine = FakeEngine(messenger, shape)
        pipe.send(messenger.descriptor)
        while how := await asyncio.to_thread(_next, pipe):
            pipe.send(await engine.prefill(how))


def _next(pipe: Connection) -> How | None:
    """None when the other side has closed the pipe."""
    try:
        how: How = pipe.recv()
    except EOFError:
        return None
    return how


def _run(pipe: Connection, fabric: str, shape: Shape) -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    asyncio.run(_serve(pipe, fabric, shape))


class EngineProcess:
    """Our end of that process.

    Attributes:
        descriptor: Of its messenger.
    """

    def __init__(self, fabric: str, shape: Shape) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_run, args=(theirs, fabric, shape), daemon=True)
        self._process.start()
        theirs.close()
        descriptor = self._receive()
        assert isinstance(descriptor, kvmsgr.Descriptor)
        self.descriptor = descriptor

    async def prefill(self, how: How) -> Forward:
        self._pipe.send(how)
        forward = await asyncio.to_thread(self._receive)
        assert isinstance(forward, Forward)
        return forward

    def _receive(self) -> object:
        try:
            if self._pipe.poll(ANSWER_S):
                return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(1)
            raise ChildProcessError(f"the engine's process died (exit code {self._process.exitcode})") from None
        raise TimeoutError(f"no answer from the engine's process in {ANSWER_S:g} s")

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()
