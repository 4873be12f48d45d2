"""An engine with several streams that announces steps ahead of those that run, and knows what may have moved.

Until a position is computed its place at the source holds DRAFT, so that bytes which leave too early are seen at the
destination. They are stored right before the signal of their layer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest

import kvmsgr
from kvmsgr.device.counters import LayerCounter
from kvmsgr.errors import KvmsgrError, LocalProtocolError, StepFaultError
from kvmsgr.runtime.node import Node
from kvmsgr_protocol import Reason

from .nodes import until, within

LAYERS, PAGES, HEADS, PAGE_TOKENS, DIM = 3, 64, 2, 4, 4
ROWS_A_LAYER = 2 * HEADS  # and position
NUM_CONTEXT_SLOTS = 16
POISON, DRAFT = -1.0, -2.0

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


@dataclass(eq=False, repr=False)
class Job:
    """One request, on both sides.

    Attributes:
        values: Its bytes as they will be, shape (layer, page, plane, head, token, dim).
        final: What steps have signalled of pages that are full, or the request's last, shape (layer, page, token).
        num_announced: Positions that steps were announced for and not abandoned.
        forwards: These steps.
        faults: What was said wrongly of its steps, as it must be told. The request may be over before that is seen.
        crashed: A forward of it was never computed to its end, and the messenger knows.
        cancelled: One side gave it up. It may have come to its end before.
    """

    number: int
    num_positions: int
    fetch: kvmsgr.Fetch
    request: kvmsgr.PrefillRequest
    source_pages: list[int]
    pages: list[int]
    result: asyncio.Task[kvmsgr.Arrival | KvmsgrError]
    num_announced: int = 0
    context_final: bool = False
    forwards: list[Forward] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    crashed: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        shape = LAYERS, len(self.pages), 2, HEADS, PAGE_TOKENS, DIM
        self.values: Floats = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 4096 * (1 + self.number % 64)
        self.hidden = np.full(DIM, self.number, np.float32)
        self.final: Flags = np.zeros((LAYERS, len(self.pages), PAGE_TOKENS), bool)
        pages, tokens = places(self.num_positions, len(self.pages) * PAGE_TOKENS)
        self.final[:, pages, tokens] = True  # nobody waits for what comes after the last position

    def __repr__(self) -> str:
        return f"<job {self.number}, {self.num_announced} of {self.num_positions} announced>"

    @property
    def left(self) -> int:
        """Positions to announce."""
        return self.num_positions - self.num_announced

    @property
    def signalled(self) -> bool:
        """Whether all signals that it waits for have been given."""
        return bool(self.final.all()) and (self.context_final or not self.request.wants_context)

    def released(self, start: int, stop: int) -> tuple[int, int]:
        """Positions that a chunk lets go: a page goes when it is full, or the request's last."""
        first, last = (at if at == self.num_positions else at - at % PAGE_TOKENS for at in (start, stop))
        return first, last


def places(start: int, stop: int) -> tuple[Indices, Indices]:
    """Page of a request, and token in it, of each position."""
    pages, tokens = np.divmod(np.arange(start, stop), PAGE_TOKENS)
    return pages, tokens


@dataclass(eq=False, repr=False)
class Forward:
    """An announced forward pass: parts [start, stop) of some requests, and where each one's context goes."""

    stream: int
    step: kvmsgr.Step
    parts: list[tuple[Job, int, int]]
    contexts: list[Mapping[str, npt.NDArray[np.uint8]]]
    num_done: int = 0
    cut: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}, {self.num_done} of {self.num_signals} done>"

    @property
    def num_signals(self) -> int:
        return LAYERS + self.step.signals_context

    @property
    def name(self) -> str:
        return f"step {self.step.ticket} of layer counter {self.stream}"


class AheadEngine:
    """A prefiller and a decoder, and the engines of both."""

    def __init__(self, prefiller: kvmsgr.Messenger, decoder: kvmsgr.Messenger, source: Floats, cache: Floats) -> None:
        self.prefiller, self.decoder = prefiller, decoder
        self.source, self.cache = source, cache
        self.streams = range(prefiller._node.config.num_streams)
        self.announced: list[deque[Forward]] = [deque() for _ in self.streams]
        self.running: list[Forward | None] = [None for _ in self.streams]
        self.latest: list[Forward | None] = [None for _ in self.streams]  # that was started
        self.jobs: list[Job] = []
        self.num_rows_final = 0
        self._requests = prefiller.requests()
        self._free_source, self._free = list(range(PAGES)), list(range(PAGES))
        self._num_jobs = 0

    @property
    def node(self) -> Node:
        return self.prefiller._node

    # Requests

    async def fetch(self, num_positions: int) -> Job:
        """A decoder asks, and its request is accepted."""
        number, num_pages = self._num_jobs, -(-num_positions // PAGE_TOKENS)
        self._num_jobs += 1
        source_pages, self._free_source = self._free_source[:num_pages], self._free_source[num_pages:]
        self._free, pages = self._free[:-num_pages], self._free[-num_pages:]
        self.source[:, source_pages] = DRAFT
        spans = [kvmsgr.Span(0, 0, pages)]
        fetch = self.decoder.fetch(f"job-{number}", [self.prefiller.descriptor], range(num_positions + 1), spans)
        request = await within(anext(self._requests))
        request.accept()
        job = Job(number, num_positions, fetch, request, source_pages, pages, asyncio.ensure_future(_result(fetch)))
        self.jobs.append(job)
        return job

    def cancel(self, job: Job, *, by_prefiller: bool) -> None:
        job.cancelled = True
        if by_prefiller:
            job.request.fail("its tenant has gone")
        else:
            job.fetch.cancel()

    def idle(self, job: Job) -> bool:
        """Whether no step will compute it any more."""
        waiting = [forward for stream in self.announced for forward in stream]
        return not any(forward in waiting or forward in self.running for forward in job.forwards)

    async def reap(self, job: Job) -> None:
        """Check what became of a request, and give its pages to others."""
        result = await within(job.result)
        if isinstance(result, kvmsgr.Arrival):
            self._check_arrived(job, result)
            result.release()
        elif not job.cancelled:
            assert isinstance(result, StepFaultError), repr(result)
            assert any(fault in str(result) for fault in job.faults), f"{result}\nis none of {job.faults}"
        await within(job.fetch.released())
        await within(job.request.released())
        outcome = await within(job.request.outcome())
        arrived = isinstance(result, kvmsgr.Arrival)
        if not job.cancelled:
            assert outcome.ok == arrived or (job.faults and arrived), f"{outcome} where the decoder has {result!r}"
            assert outcome.ok or outcome.reason is Reason.step_fault
        self.jobs.remove(job)
        self._free_source += job.source_pages
        self._free = job.pages + self._free
        self.cache[:, job.pages] = POISON

    # Steps

    def announce(self, stream: int, parts: Sequence[tuple[Job, int]]) -> Forward:
        """Announce the next so many positions of some requests; of none: a decode-only step.

        Raises:
            StepLimitError: Nothing has happened.
        """
        ranges = [(job, job.num_announced, job.num_announced + length) for job, length in parts]
        chunks = [
            kvmsgr.Chunk(job.request, start, stop, [kvmsgr.Span(0, 0, job.source_pages)]) for job, start, stop in ranges
        ]
        step = self.prefiller.begin_step(chunks, counter=stream)
        # A request that is over has no context slot, or not for long: what it had may be another's when it is computed.
        contexts = [job.request.context if job.request.context_slot >= 0 else {} for job, _ in parts]
        forward = Forward(stream, step, ranges, contexts)
        for job, _, stop in ranges:
            job.num_announced = stop
            job.forwards.append(forward)
        self.announced[stream].append(forward)
        return forward

    def may_abandon(self, forward: Forward) -> bool:
        """No later step of one of its requests is announced."""
        return all(job.forwards[-1] is forward for job, _, _ in forward.parts)

    def abandon(self, forward: Forward) -> None:
        """Take back one that has not started."""
        forward.step.abandon()
        self.announced[forward.stream].remove(forward)
        for job, start, _ in forward.parts:
            job.num_announced = start
            job.forwards.remove(forward)

    def may_start(self, stream: int) -> bool:
        """A chunk needs what earlier ones of its request compute."""
        if self.running[stream] is not None or not self.announced[stream]:
            return False
        waiting = [forward for forwards in self.announced for forward in forwards]
        forward = self.announced[stream][0]
        earlier = [other for job, _, _ in forward.parts for other in job.forwards[: job.forwards.index(forward)]]
        return not any(other in waiting or other in self.running for other in earlier)

    def start(self, stream: int) -> None:
        """Launch the next announced one."""
        forward = self.announced[stream].popleft()
        forward.step.signal.start()
        self.running[stream] = self.latest[stream] = forward

    def latest_of(self, stream: int) -> Forward:
        """The forward that was started last."""
        forward = self.latest[stream]
        assert forward is not None
        return forward

    def bump(self, stream: int) -> None:
        """Compute one more layer, or the context, and signal it."""
        forward = self.running[stream]
        assert forward is not None
        layer = forward.num_done
        for (job, start, stop), context in zip(forward.parts, forward.contexts, strict=True):
            if layer < LAYERS:
                self._compute(job, layer, start, stop)
                first, last = job.released(start, stop)
                pages, tokens = places(first, last)
                job.final[layer, pages, tokens] = True
                self.num_rows_final += ROWS_A_LAYER * (last - first)
            elif context and stop == job.num_positions:
                context["hidden"][:] = job.hidden.view(np.uint8)
                job.context_final = True
                self.num_rows_final += 1
        forward.num_done += 1
        forward.step.signal.bump()
        if forward.num_done == forward.num_signals:
            self.running[stream] = None

    def _compute(self, job: Job, layer: int, start: int, stop: int) -> None:
        pages, tokens = places(start, stop)
        at = np.array(job.source_pages)[pages]
        self.source[layer, at, :, :, tokens] = job.values[layer, pages, :, :, tokens]

    def _cut(self, stream: int, how: str) -> Forward:
        forward = self.running[stream]
        assert forward is not None
        self.running[stream], forward.cut = None, True
        if forward.step.moves:
            seen = f"{forward.num_done} of {forward.num_signals} layer signals"
            for job, _, _ in forward.parts:
                job.faults.append(f"{forward.name} was {how} after {seen}")
        return forward

    def crash(self, stream: int) -> None:
        """The running forward stops where it is, and the engine says so."""
        forward = self._cut(stream, "abandoned")
        forward.step.abandon()
        for job, _, _ in forward.parts:
            job.crashed = True

    def die(self, stream: int) -> None:
        """The running forward stops where it is, and nobody says so. That shows when the next one starts."""
        self._cut(stream, "over")

    def forget_signals(self, stream: int) -> None:
        """The running forward is computed to its end, without the signals that are due. That shows when the next one
        starts."""
        forward = self._cut(stream, "over")
        for job, start, stop in forward.parts:
            for layer in range(forward.num_done, LAYERS):
                self._compute(job, layer, start, stop)

    async def surplus(self, stream: int) -> None:
        """A signal too many, after all of the latest forward."""
        forward = self.latest_of(stream)
        with pytest.raises(LocalProtocolError, match=f"has shown {forward.num_signals + 1} layer signals"):
            forward.step.signal.bump()
        forward.num_done += 1
        for job, _, _ in forward.parts:
            job.faults.append(
                f"{forward.name} showed {forward.num_done} layer signals, {forward.num_signals} were announced"
            )
        for job in [job for job, _, _ in forward.parts if not job.signalled]:
            await until(lambda job=job: job.request.ended, f"{job} fails")  # type: ignore[misc]  # a condition

    # Checks

    def check(self) -> None:
        """Nothing was posted before its signal, and nothing has arrived that was not final."""
        posted = self.prefiller.stats()["posted_rows"]
        assert posted <= self.num_rows_final, f"{posted} rows posted, {self.num_rows_final} signalled"
        for job in self.jobs:
            arrived, untouched = self._look(job)
            assert (arrived | untouched).all(), f"{job}: bytes that are neither final nor untouched"
            early = arrived & ~job.final[:, :, None, None, :]
            assert not early.any(), f"{job}: rows before their signal at {np.argwhere(early).tolist()}"
        assert (self.cache[:, self._free] == POISON).all(), "pages that are nobody's were written"

    def _look(self, job: Job) -> tuple[Flags, Flags]:
        """Which rows hold what was computed, and which nothing: shape (layer, page, plane, head, token). Both are said
        of those after the last position."""
        found = self.cache[:, job.pages]
        arrived, untouched = (found == job.values).all(-1), (found == POISON).all(-1)
        pages, tokens = places(job.num_positions, len(job.pages) * PAGE_TOKENS)
        arrived[:, pages, :, :, tokens] = untouched[:, pages, :, :, tokens] = True
        return arrived, untouched

    def _check_arrived(self, job: Job, arrival: kvmsgr.Arrival) -> None:
        assert job.signalled, f"{job} arrived, and not all of it was signalled"
        assert not job.crashed, f"{job} arrived; it must be told {job.faults}"
        arrived, _ = self._look(job)
        assert arrived.all(), f"{job}: missing {np.argwhere(~arrived).tolist()}"
        if job.request.wants_context:
            assert (arrival.context["hidden"].view(np.float32) == job.hidden).all()

    # The end

    async def run_all(self) -> None:
        """Run what is announced; the one that was announced first can always go on."""
        while any(self.announced) or any(self.running):
            for stream in self.streams:
                if self.may_start(stream):
                    self.start(stream)
                if self.running[stream] is not None:
                    self.bump(stream)
            await asyncio.sleep(0)
            self.check()

    async def polled(self) -> None:
        """Let the poller go round, so that it has seen everything that was done before."""
        before = self.node.fabric.poller.stats()["rounds"]
        await until(lambda: self.node.fabric.poller.stats()["rounds"] >= before + 2, "the poller goes round twice")

    async def finish(self) -> None:
        """Every request that can arrives, what was said wrongly is found, and nothing is held any more."""
        await self.run_all()
        await self.polled()  # it sees what was abandoned
        for stream in self.streams:
            await self.fetch(PAGE_TOKENS)
            for job in [job for job in self.jobs if job.left]:
                self.announce(stream, [(job, job.left)])
                await self.run_all()
                await self.polled()
        for job in list(self.jobs):
            await self.reap(job)
        await until(lambda: len(self.node.steps) <= len(self.streams), "steps that are over are forgotten")
        assert not self.node.context_slots.num_held
        assert sorted(self._free) == sorted(self._free_source) == list(range(PAGES))


async def _result(fetch: kvmsgr.Fetch) -> kvmsgr.Arrival | KvmsgrError:
    try:
        return await fetch
    except KvmsgrError as error:
        return error


@asynccontextmanager
async def ahead(
    fabric: str, *, num_streams: int = 1, num_slots: int = 64, context: bool = True, **more: object
) -> AsyncIterator[AheadEngine]:
    """A pair and its engine. `num_slots`: of each layer counter's ring; `more` are settings of both messengers."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        caches = [np.full((LAYERS, PAGES, 2, HEADS, PAGE_TOKENS, DIM), POISON, np.float32) for _ in range(2)]
        messengers: list[kvmsgr.Messenger] = []
        for name, cache in zip(("prefiller", "decoder"), caches, strict=True):
            config = kvmsgr.Config(
                name=name, model="test", fabric=fabric, listen=f"unix:{folder / name}", num_streams=num_streams, **more  # type: ignore[arg-type]
            )  # fmt: skip
            groups = [kvmsgr.CacheGroup.from_tensors([cache], "layer page plane head token dim")]
            hidden = np.zeros((NUM_CONTEXT_SLOTS, DIM), np.float32)
            messenger = await kvmsgr.Messenger.open(
                config,
                kvmsgr.Cache(groups),
                [kvmsgr.ContextBuffer("hidden", hidden)] if context else [],
                counters=[LayerCounter(num_slots) for _ in range(num_streams)],
            )
            messengers.append(await stack.enter_async_context(messenger))
        yield AheadEngine(messengers[0], messengers[1], caches[0], caches[1])
