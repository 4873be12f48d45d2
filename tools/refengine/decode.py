"""The decode role: fetches prompts' KV over kvmsgr and generates from them, all that have arrived in one batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kvmsgr

from .engine import Engine, Generation
from .node import model_thread
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
    """

    def __init__(self, engine: Engine, messenger: kvmsgr.Messenger, new_tokens: int) -> None:
        self._engine, self._messenger, self._new_tokens = engine, messenger, new_tokens
        self._running: dict[Generation, asyncio.Future[None]] = {}
        self._work = asyncio.Event()
        self._cleanups: set[asyncio.Task[None]] = set()

    async def answer(self, source: kvmsgr.Descriptor, request_id: str, prompt: list[int]) -> Delivery:
        """Have a prompt prefilled elsewhere, then generate from it here.

        Raises:
            kvmsgr.errors.TransferError: The KV did not arrive. The pages are taken back once nothing can land there.
            MemoryError: Not enough free pages.
        """
        started = time.monotonic()
        cache = self._engine.cache
        job = Job(request_id, prompt, cache.allocate(cache.pages_for(len(prompt) + self._new_tokens)))
        destination = job.pages[: cache.pages_for(job.num_prefill)]
        fetch = self._messenger.fetch(
            request_id, sources=[source], tokens=prompt, spans=[kvmsgr.Span(0, 0, destination)]
        )
        try:
            arrival = await fetch
        except BaseException:
            cleanup = asyncio.create_task(self._release_when_quiet(fetch, job))
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            raise
        arrived_s = time.monotonic() - started
        hidden = self._take_context(arrival)
        generation = Generation(job)
        done = self._running[generation] = asyncio.get_running_loop().create_future()
        self._work.set()
        await done
        await self._release_when_quiet(fetch, job)
        answer = Answer(generation.tokens, torch.stack(generation.logits), hidden)
        return Delivery(answer, len(destination), arrival.rows, arrived_s)

    async def quiet(self) -> None:
        """Wait until the pages of all failed requests are back."""
        await asyncio.gather(*self._cleanups)

    async def run(self) -> None:
        """Run decode steps until cancelled."""
        loop = asyncio.get_running_loop()
        with model_thread() as thread:
            while True:
                batch = list(self._running)
                if not batch:
                    self._work.clear()
                    await self._work.wait()
                    continue
                await loop.run_in_executor(thread, self._run_step, batch)
                for generation in batch:
                    if self._engine.is_finished(generation, self._new_tokens):
                        self._running.pop(generation).set_result(None)

    def _run_step(self, batch: Sequence[Generation]) -> None:
        # No prompt is computed here, but the model signals its layers all the same, as a captured graph would.
        signal = self._messenger.begin_step([]).signal
        signal.start()
        self._engine.decode(batch, signal.bump)

    def _take_context(self, arrival: kvmsgr.Arrival) -> Tensor:
        """The hidden state that came with the KV; zeros when nothing was prefilled."""
        hidden = torch.zeros(self._engine.config.hidden)
        if "hidden" in arrival.context and arrival.num_tokens:
            hidden = torch.frombuffer(arrival.context["hidden"], dtype=torch.float32).clone()
        arrival.release()
        return hidden

    async def _release_when_quiet(self, fetch: kvmsgr.Fetch, job: Job) -> None:
        """Take the pages back, but only when no write can land in them any more."""
        await fetch.released()
        self._engine.cache.release(job.pages)
