"""The prefill role: serves what decoders ask for, and lets kvmsgr push every layer while the next one computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

import kvmsgr

from .engine import Engine
from .node import model_thread
from .scheduler import Job, Piece, PrefillScheduler


def ignore(_: object) -> None:
    """A hook for those who need none."""


class PrefillNode:
    """Continuous batching of prefill over a Messenger.

    Args:
        engine: Model and cache.
        messenger: Opened over the engine's cache, with the context buffer "hidden".
        step_tokens: Tokens a step computes at most.
        max_running: Most prompts that share a step.
        post_at_end: Announce a request's pages only when all of it is computed, to show what pushing early is worth.
        before_last_signal: Called in the model's thread with a request's id, just before the last layer of its last
            chunk is signalled.
        after_signal: Called in the model's thread after each layer signal of a step, with their number so far.
    """

    def __init__(
        self,
        engine: Engine,
        messenger: kvmsgr.Messenger,
        *,
        step_tokens: int,
        max_running: int = 2,
        post_at_end: bool = False,
        before_last_signal: Callable[[str], None] = ignore,
        after_signal: Callable[[int], None] = ignore,
    ) -> None:
        self._engine, self._messenger = engine, messenger
        self._post_at_end = post_at_end
        self._before_last_signal, self._after_signal = before_last_signal, after_signal
        self._scheduler = PrefillScheduler(step_tokens, max_running, lambda job: engine.allocate(job.num_prefill))
        self._requests: dict[Job, kvmsgr.PrefillRequest] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self.outcomes: dict[str, kvmsgr.Outcome] = {}

    @property
    def num_alive(self) -> int:
        """Requests whose pages are held."""
        return len(self._requests)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_steps())
            async for request in self._messenger.requests():
                job = Job(request.request_id, request.tokens.tolist())
                self._requests[job] = request
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
            self._engine.cache.release(job.pages)
            del self._requests[job]
        self._work.set()
        self.outcomes[job.request_id] = await request.outcome()

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        with model_thread() as thread:
            await loop.run_in_executor(thread, self._warm_up)
            while True:
                self._work.clear()
                async with self._between_steps:
                    pieces = self._scheduler.next_step()
                    if pieces:
                        await loop.run_in_executor(thread, self._run_step, pieces)
                if not pieces:
                    await self._work.wait()

    # In the model's thread --------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        signal = self._messenger.begin_step([]).signal
        signal.start()
        self._engine.warm_up(signal.bump)

    def _run_step(self, pieces: Sequence[Piece]) -> None:
        step = self._messenger.begin_step([] if self._post_at_end else [self._chunk(piece) for piece in pieces])
        ending = [piece for piece in pieces if piece.is_last]
        num_layers = 0

        def after_layer() -> None:
            nonlocal num_layers
            num_layers += 1
            if num_layers == self._engine.config.num_layers:
                for piece in ending:
                    self._before_last_signal(piece.job.request_id)
            step.signal.bump()
            self._after_signal(num_layers)

        step.signal.start()
        hidden = self._engine.prefill(pieces, after_layer)
        for piece, state in zip(pieces, hidden, strict=True):
            context = self._requests[piece.job].context
            if piece.is_last and "hidden" in context:
                torch.frombuffer(context["hidden"], dtype=torch.float32).copy_(state)
        if step.signals_context:
            step.signal.bump()
        if self._post_at_end and ending:
            self._messenger.begin_step([self._chunk(Piece(piece.job, 0, piece.stop), ready=True) for piece in ending])

    def _chunk(self, piece: Piece, *, ready: bool = False) -> kvmsgr.Chunk:
        first_page = piece.start // self._engine.cache.page_tokens
        pages = piece.job.pages[first_page : self._engine.cache.pages_for(piece.stop)]
        return kvmsgr.Chunk(
            self._requests[piece.job], piece.start, piece.stop, [kvmsgr.Span(0, piece.start, pages)], ready=ready
        )
