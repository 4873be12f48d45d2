"""The prefill role: serves what decoders ask for, and lets kvmsgr push every layer while the next one computes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import kvmsgr
from kvmsgr.workers import WorkerGroup

from .engine import Engine
from .node import RankWatch, model_thread
from .scheduler import Job, Piece, PrefillScheduler


@dataclass(frozen=True)
class Announced:
    """A step that the messenger knows of.

    Attributes:
        pieces: What it does.
        computed: Those of them that it computes.
        step: What its forward signals; None: there is none.
    """

    pieces: Sequence[Piece]
    computed: Sequence[Piece]
    step: kvmsgr.Step | None

    def has(self, job: Job) -> bool:
        return any(piece.job is job for piece in self.pieces)

    def abandon(self) -> None:
        """It will not run."""
        if self.step is not None:
            self.step.abandon()


def ignore(_: object) -> None:
    """A hook for those who need none."""


class PrefillNode:
    """Continuous batching of prefill over a Messenger.

    Args:
        engine: Model and cache.
        messenger: Opened over the engine's cache, with the context buffer "hidden".
        workers: The processes of the engine's ranks, where they have their own.
        step_tokens: Tokens a step computes at most.
        max_running: Most prompts that share a step.
        post_at_end: Announce a request's pages only when all of it is computed, to show what pushing early is worth.
        before_last_signal: Called in the model's thread with a request's id, just before the last layer of its last
            chunk is signalled.
        half_way: Called in the model's thread in the middle of every step.
        preempt_every: After so many steps the request that came last of those that run gives its pages back, once each;
            0: never.
        announce_ahead: Announce the next step while one computes, as engines do whose scheduler does not wait for the
            device. Without a prefix cache: what that keeps counts as computed from its step's planning on.
    """

    def __init__(
        self,
        engine: Engine,
        messenger: kvmsgr.Messenger,
        workers: WorkerGroup | None = None,
        *,
        step_tokens: int,
        max_running: int = 2,
        post_at_end: bool = False,
        before_last_signal: Callable[[str], None] = ignore,
        half_way: Callable[[], None] | None = None,
        preempt_every: int = 0,
        announce_ahead: bool = False,
    ) -> None:
        self._engine, self._messenger = engine, messenger
        self._post_at_end = post_at_end
        self._before_last_signal, self._half_way = before_last_signal, half_way
        self._preempt_every, self._num_steps = preempt_every, 0
        self._preempted: set[str] = set()
        self._announce_ahead = announce_ahead
        self._ahead: Announced | None = None  # what comes after the step under way
        self.num_abandoned = 0  # of those
        self._scheduler = PrefillScheduler(
            step_tokens,
            max_running,
            allocate=lambda job: engine.allocate(job.num_prefill, keys=job.keys),
            share=engine.share,
            keep=engine.keep,
        )
        self._requests: dict[Job, kvmsgr.PrefillRequest] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._between_steps = asyncio.Condition()
        self._watch = RankWatch(messenger, workers)
        self.outcomes: dict[str, kvmsgr.Outcome] = {}
        self.cached_tokens: Counter[str] = Counter()
        """Of each request, positions found in the prefix cache. The last may have been computed again all the same."""

    @property
    def num_alive(self) -> int:
        """Requests whose pages are held."""
        return len(self._requests)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            RankLost: A rank was lost, and every request has been failed.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_steps())
            group.create_task(self._watch.end(self.drained))
            async for request in self._messenger.requests():
                prompt = request.tokens.tolist()
                job = Job(
                    request.request_id, prompt, keys=self._engine.keys(prompt), wants_hidden=request.wants_context
                )
                self._requests[job] = request
                self.cached_tokens[job.request_id] = 0  # it may have been here before, and preempted
                request.accept()
                if job.num_prefill:
                    self._scheduler.add(job)
                    self._work.set()
                follower = group.create_task(self._follow(job, request))
                self._followers.add(follower)
                follower.add_done_callback(self._followers.discard)

    async def drained(self) -> None:
        """Wait until the decoders have said what became of every request served so far; see `outcomes`."""
        await asyncio.gather(*self._followers)

    async def _follow(self, job: Job, request: kvmsgr.PrefillRequest) -> None:
        """Take the pages back when nothing reads them any more, whether the request went well or failed half-way."""
        await request.released()
        async with self._between_steps:  # the step under way may still compute into the pages of a failed request
            self._scheduler.drop(job)
            await self._between_steps.wait_for(lambda: self._ahead is None or not self._ahead.has(job))
            with self._watch.noticing():
                await asyncio.to_thread(self._engine.release, job)
            del self._requests[job]
        self._work.set()
        self.outcomes[job.request_id] = await request.outcome()

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        with model_thread() as thread, self._watch.noticing():
            async with self._between_steps:
                await loop.run_in_executor(thread, self._warm_up)
            while True:
                self._work.clear()
                async with self._between_steps:
                    announced = await loop.run_in_executor(thread, self._next_step)
                    if announced.pieces:
                        await loop.run_in_executor(thread, self._run_step, announced)
                        await self._preempt()
                    self._between_steps.notify_all()
                if not announced.pieces:
                    await self._work.wait()

    async def _preempt(self) -> None:
        """Take back the pages of a request, as if others needed them more. It comes back as a new request."""
        self._num_steps += 1
        running = [job for job in self._scheduler.running if job.request_id not in self._preempted]
        if self._preempt_every and running and self._num_steps % self._preempt_every == 0:
            victim = running[-1]
            self._preempted.add(victim.request_id)
            self._scheduler.drop(victim)
            await self._requests[victim].preempt()  # `_follow` frees the pages

    # In the model's thread --------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        self._engine.warm_up(self._messenger.begin_step([]).signals)

    def _next_step(self) -> Announced:
        """The step that was announced ahead, unless all of its requests are over; else what is to be computed now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if not all(self._requests[piece.job].ended for piece in ahead.pieces):
                return ahead
            ahead.abandon()
            self.num_abandoned += 1
        return self._announce(self._scheduler.next_step())  # it may poison pages

    def _announce(self, pieces: Sequence[Piece]) -> Announced:
        for piece in pieces:
            self.cached_tokens[piece.job.request_id] += piece.num_cached
        chunks = [self._chunk(own.job, own.begin, own.stop) for own in pieces if own.begin < own.stop]
        if not self._post_at_end:
            self._announce_hits(pieces)
        computed = [piece for piece in pieces if piece.start < piece.stop]
        step = self._messenger.begin_step([] if self._post_at_end else chunks) if computed else None
        return Announced(pieces, computed, step)

    def _run_step(self, announced: Announced) -> None:
        pieces = announced.pieces
        if announced.step is not None:
            self._compute(announced.computed, announced.step)
        ending = [piece.job for piece in pieces if piece.is_last]
        if self._post_at_end and ending:
            self._messenger.begin_step([self._chunk(job, 0, job.num_prefill, ready=True) for job in ending])

    def _announce_hits(self, pieces: Sequence[Piece]) -> None:
        """Pages that earlier steps have computed go at once. All those steps are over: one runs at a time."""
        for piece in pieces:
            for hit in piece.hits:
                self._messenger.begin_step([self._chunk(piece.job, hit.start, hit.stop, ready=True)])

    def _compute(self, pieces: Sequence[Piece], step: kvmsgr.Step) -> None:
        ending = [piece for piece in pieces if piece.is_last]

        def last_layer() -> None:
            for piece in ending:
                self._before_last_signal(piece.job.request_id)

        following = self._scheduler.next_step() if self._announce_ahead else []  # it may poison pages

        def half_way() -> None:
            if following:
                self._ahead = self._announce(following)
            if self._half_way:
                self._half_way()

        num_layers = self._engine.spec.num_layers
        pauses = {num_layers - 1: last_layer} if ending else {}
        if following or self._half_way:
            pauses[num_layers // 2] = half_way
        hidden = self._engine.prefill(pieces, step.signals, pauses)
        for piece, state in zip(pieces, hidden, strict=True):
            request = self._requests[piece.job]
            if piece.is_last and request.context_slot >= 0 and "hidden" in request.context:
                torch.frombuffer(request.context["hidden"], dtype=torch.float32).copy_(state)
        if step.signals_context:
            for signal in step.signals:
                signal.bump()

    def _chunk(self, job: Job, first: int, stop: int, *, ready: bool = False) -> kvmsgr.Chunk:
        """Positions [first, stop) and the pages that hold them; of a window only what the decoder will need."""
        spans = []
        for index, (group, held) in enumerate(zip(self._engine.spec.groups, job.held, strict=True)):
            start = max(first, group.first_needed(job.num_prefill))
            if start < stop:
                spans.append(kvmsgr.Span(index, start, held.between(start, stop)))
        return kvmsgr.Chunk(self._requests[job], first, stop, spans, ready=ready)
