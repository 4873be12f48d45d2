"""The decode role: fetches prompts' KV over kvmsgr and generates from them, all that have arrived in one batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kvmsgr
from kvmsgr.workers import WorkerGroup

from .engine import Engine
from .generation import Generation, Generator
from .grammar import Mask
from .node import RankWatch, model_thread
from .reference import Answer
from .scheduler import Job


@dataclass(frozen=True)
class Delivery:
    """An answer, and what was moved to get it. `arrived_s` counts from the call of `answer` until the KV was there."""

    answer: Answer
    num_pages: int
    rows: int
    arrived_s: float


class DecodeNode:
    """Continuous batching of decode over a Messenger.

    Args:
        engine: Model and cache.
        messenger: Opened over the engine's cache, with the context buffer "hidden".
        new_tokens: Most tokens to generate for a prompt.
        workers: The processes of the engine's ranks, where they have their own.
        num_drafts, mask: As in `Generator`.
        zero_hidden: Draft from zeros instead of the hidden state that arrived, to show what it is worth.
    """

    def __init__(
        self,
        engine: Engine,
        messenger: kvmsgr.Messenger,
        new_tokens: int,
        workers: WorkerGroup | None = None,
        *,
        num_drafts: int = 0,
        mask: Mask | None = None,
        zero_hidden: bool = False,
    ) -> None:
        self._engine, self._messenger, self._new_tokens = engine, messenger, new_tokens
        self._generator = Generator(engine, new_tokens, num_drafts, mask)
        self._zero_hidden = zero_hidden
        self._running: dict[Generation, asyncio.Future[None]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._watch = RankWatch(messenger, workers)

    async def answer(self, source: kvmsgr.Descriptor, request_id: str, prompt: list[int]) -> Delivery:
        """Have a prompt prefilled elsewhere, then generate from it here.

        Raises:
            kvmsgr.errors.KvmsgrError: The KV was not asked for, or did not arrive.
            MemoryError: Not enough free pages.
        """
        started = time.monotonic()
        job = Job(request_id, prompt)
        held = self._engine.allocate(len(prompt) + self._new_tokens, job.num_prefill)
        if held is None:
            raise MemoryError(f"not enough free pages for request {request_id!r}")
        job.held = held
        spans = self._spans(job)
        try:
            fetch = self._messenger.fetch(request_id, sources=[source], tokens=prompt, spans=spans)
        except kvmsgr.errors.KvmsgrError:
            await self._take_back(job)  # nothing was asked for
            raise
        generation: Generation | None = None
        try:
            arrival = await fetch
            arrived_s = time.monotonic() - started
            hidden = self._take_context(arrival)
            generation = self._generator.begin(job, torch.zeros_like(hidden) if self._zero_hidden else hidden)
            self._running[generation] = asyncio.get_running_loop().create_future()
            self._work.set()
            await self._running[generation]
        finally:
            if generation:
                self._running.pop(generation, None)
            release = asyncio.create_task(self._release(fetch, job))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        answer = Answer(generation.tokens, torch.stack(generation.logits), hidden, generation.drafts)
        return Delivery(answer, sum(len(span.pages) for span in spans), arrival.rows, arrived_s)

    def _spans(self, job: Job) -> list[kvmsgr.Span]:
        """Where the KV of the prompt goes; of a window only what the last prefilled token's reaches."""
        groups = zip(self._engine.spec.groups, job.held, strict=True)
        return [
            kvmsgr.Span(index, first, held.between(first, job.num_prefill))
            for index, (group, held) in enumerate(groups)
            for first in [group.first_needed(job.num_prefill)]
        ]

    async def quiet(self) -> None:
        """Wait until the pages of all requests that are over are back."""
        await asyncio.gather(*self._releases)

    async def _release(self, fetch: kvmsgr.Fetch, job: Job) -> None:
        """Take the pages back, but only when no write can land in them any more and no step computes with them."""
        await fetch.released()
        await self._take_back(job)

    async def _take_back(self, job: Job) -> None:
        async with self._between_steps:
            with self._watch.noticing():
                await asyncio.to_thread(self._engine.release, job)

    async def run(self) -> None:
        """Run decode steps until cancelled.

        Raises:
            RankLost: A rank was lost, and every request has been failed.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_steps())
            group.create_task(self._watch.end(self.quiet))

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        with model_thread() as thread, self._watch.noticing():
            while True:
                self._work.clear()
                async with self._between_steps:
                    batch = list(self._running)
                    if batch:
                        await loop.run_in_executor(thread, self._run_step, batch)
                for generation in batch:
                    done = self._running.get(generation)
                    if done and not done.done() and self._generator.is_finished(generation):
                        del self._running[generation]
                        done.set_result(None)
                if not batch:
                    await self._work.wait()

    def _run_step(self, batch: Sequence[Generation]) -> None:
        # No prompt is computed here, but the model signals its layers all the same, as a captured graph would.
        self._generator.step(batch, self._messenger.begin_step([]).signals)

    def _take_context(self, arrival: kvmsgr.Arrival) -> Tensor:
        """The hidden state that came with the KV; zeros when nothing was prefilled."""
        hidden = torch.zeros(self._engine.config.hidden)
        if "hidden" in arrival.context and arrival.num_tokens:
            hidden = torch.frombuffer(arrival.context["hidden"], dtype=torch.float32).clone()
        arrival.release()
        return hidden
