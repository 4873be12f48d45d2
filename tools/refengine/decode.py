"""The decode role: fetches prompts' KV over kvmsgr and generates from them, all that have arrived in one batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kvmsgr
from kvmsgr.workers import WorkerGroup

from .collective import RankLost
from .engine import Engine
from .generation import Generation, Generator
from .grammar import Mask
from .node import RankWatch, model_thread
from .reference import Answer
from .scheduler import Holding, Job, Piece

PREEMPT_AFTER = 2  # tokens


@dataclass(frozen=True)
class Delivery:
    """An answer, and what was moved to get it.

    Attributes:
        answer: What was generated.
        num_pages: Pages that were filled.
        rows: Rows that landed.
        arrived_s: From the call of `answer` until the KV was there.
        cached_tokens: Positions that were there already.
        num_restarts: How often the prefiller took its pages back, and began again.
        preempted: Whether its pages were taken away after a few tokens, and computed again here.
    """

    answer: Answer
    num_pages: int
    rows: int
    arrived_s: float
    cached_tokens: int
    num_restarts: int
    preempted: bool


class WrongDelivery(Exception):
    """A messenger delivered something else than it was asked for."""


@dataclass(frozen=True)
class Turn:
    """A generation's time in the batch: until it has so many tokens, or ends."""

    num_tokens: int
    over: asyncio.Future[None]


class DecodeNode:
    """Continuous batching of decode over a Messenger.

    Args:
        engine: Model and cache.
        messenger: Opened over the engine's cache, with the context buffer "hidden".
        new_tokens: Most tokens to generate for a prompt.
        workers: The processes of the engine's ranks, where they have their own.
        extra_page: Give every request one page more than its prompt needs, and check that nobody writes to it.
        preempt_every: Preempt every Nth request that has arrived, once, after `PREEMPT_AFTER` tokens; 0: none.
        step_tokens: Tokens a step computes at most when it computes the KV of a preempted request again.
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
        extra_page: bool = False,
        preempt_every: int = 0,
        step_tokens: int = 64,
        num_drafts: int = 0,
        mask: Mask | None = None,
        zero_hidden: bool = False,
    ) -> None:
        self._engine, self._messenger, self._new_tokens = engine, messenger, new_tokens
        self._extra_page, self._preempt_every, self._step_tokens = extra_page, preempt_every, step_tokens
        self._room = max([new_tokens] + [group.page_tokens for group in engine.spec.groups if extra_page])
        self._generator = Generator(engine, new_tokens, num_drafts, mask)
        self._zero_hidden = zero_hidden
        self._num_arrived = 0
        self._thread = model_thread()
        self._running: dict[Generation, Turn] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._watch = RankWatch(messenger, workers)

    async def answer(self, source: kvmsgr.Descriptor, request_id: str, prompt: list[int]) -> Delivery:
        """Have a prompt prefilled elsewhere, then generate from it here.

        Raises:
            kvmsgr.errors.KvmsgrError: The KV was not asked for, or did not arrive.
            MemoryError: Not enough free pages.
            WrongDelivery: What arrived is not what was asked for.
        """
        started = time.monotonic()
        job = Job(request_id, prompt, keys=self._engine.keys(prompt))
        await self._allocate(job, len(prompt) + self._room, job.num_prefill)
        cached_tokens, spans = job.num_computed, self._spans(job)
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
            await self._accept(job, arrival)
            generation = self._generator.begin(job, torch.zeros_like(hidden) if self._zero_hidden else hidden)
            preempted = await self._preempt(generation, fetch) if self._is_chosen() else False
            await self._generate(generation, self._new_tokens)
        finally:
            if generation:
                self._running.pop(generation, None)
            fetch.cancel()  # if this task was
            release = asyncio.create_task(self._release(fetch, job))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        answer = Answer(generation.tokens, torch.stack(generation.logits), hidden, generation.drafts)
        num_pages = sum(len(span.pages) - self._extra_page for span in spans)
        return Delivery(answer, num_pages, arrival.rows, arrived_s, cached_tokens, fetch.num_restarts, preempted)

    async def _allocate(self, job: Job, num_tokens: int, num_computed: int = 0) -> None:
        """Give a job its pages; what of them is cached counts as computed. Raises MemoryError."""

        def allocate() -> None:
            held = self._engine.allocate(num_tokens, num_computed, job.keys)
            if held is None:
                raise MemoryError(f"not enough free pages for request {job.request_id!r}")
            job.held = held
            job.num_computed = max((hit.stop for hit in self._engine.share(job)), default=0)

        await self._between(allocate)  # it poisons what it evicts

    def _spans(self, job: Job) -> list[kvmsgr.Span]:
        """Where the KV of the prompt goes, if it is not there yet; of a window what the last prefilled token sees."""
        spans = []
        for index, (group, held) in enumerate(zip(self._engine.spec.groups, job.held, strict=True)):
            first = max(job.num_computed, group.first_needed(job.num_prefill))
            pages = held.between(first, job.num_prefill) + self._extra(held, job)
            spans.append(kvmsgr.Span(index, first, pages))
        return spans

    def _extra(self, held: Holding, job: Job) -> list[int]:
        """The page after those of the prompt, if the messenger is to be told of it."""
        after = -(-job.num_prefill // held.page_tokens) * held.page_tokens
        return held.between(after, after + 1) if self._extra_page else []

    async def _accept(self, job: Job, arrival: kvmsgr.Arrival) -> None:
        """Check what arrived, and cache it."""
        if arrival.num_tokens != job.num_prefill:
            wrong = f"{arrival.num_tokens} positions are said to be there"
            raise WrongDelivery(f"request {job.request_id!r}: {wrong}; they should be {job.num_prefill}")
        if job.keys or self._extra_page:
            await self._between(lambda: self._take_note(job))

    def _take_note(self, job: Job) -> None:
        for index, held in enumerate(job.held):
            extra = self._extra(held, job)
            if not self._engine.ranks.is_poisoned(index, extra):
                raise WrongDelivery(f"request {job.request_id!r}: page {extra}, after its last, was written to")
        self._engine.keep(job, job.num_computed, job.num_prefill)

    async def _generate(self, generation: Generation, num_tokens: int) -> None:
        """Take part in decode steps until there are so many tokens, or it ends."""
        if not self._generator.is_finished(generation, num_tokens):
            turn = self._running[generation] = Turn(num_tokens, asyncio.get_running_loop().create_future())
            self._work.set()
            await turn.over

    def _is_chosen(self) -> bool:
        """Whether the request that has just arrived is to be preempted."""
        self._num_arrived += 1
        return bool(self._preempt_every) and self._num_arrived % self._preempt_every == 0

    async def _preempt(self, generation: Generation, fetch: kvmsgr.Fetch) -> bool:
        """After a few tokens take all pages away, then compute what they held from the prompt and these tokens: what
        was delivered once is never fetched again. Returns False where the answer was over before."""
        await self._generate(generation, PREEMPT_AFTER)
        if self._generator.is_finished(generation, self._new_tokens):
            return False
        job = generation.job
        await fetch.released()
        await self._take_back(job)
        again = Job(job.request_id, job.prompt + generation.tokens, keys=job.keys)
        await self._allocate(again, len(job.prompt) + self._room)
        job.held = again.held
        while again.num_computed < again.num_prefill:
            stop = min(again.num_computed + self._step_tokens, again.num_prefill)
            await self._between(partial(self._run_prefill, Piece(again, again.num_computed, stop)))
            again.num_computed = stop
        return True

    async def quiet(self) -> None:
        """Wait until the pages of all requests that are over are back."""
        await asyncio.gather(*self._releases)

    async def _release(self, fetch: kvmsgr.Fetch, job: Job) -> None:
        """Take the pages back, but only when no write can land in them any more and no step computes with them."""
        await fetch.released()
        await self._take_back(job)

    async def _between(self, function: Callable[[], None]) -> None:
        """Call what needs all ranks, in the model's thread, between two steps. Raises RankLost."""
        async with self._between_steps:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, function)
            except RankLost as lost:
                self._watch.rank_lost(lost)
                raise

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
        with self._thread as thread, self._watch.noticing():
            while True:
                self._work.clear()
                async with self._between_steps:
                    batch = list(self._running)
                    if batch:
                        await loop.run_in_executor(thread, self._run_step, batch)
                for generation in batch:
                    turn = self._running.get(generation)
                    if turn and not turn.over.done() and self._generator.is_finished(generation, turn.num_tokens):
                        del self._running[generation]
                        turn.over.set_result(None)
                if not batch:
                    await self._work.wait()

    def _run_step(self, batch: Sequence[Generation]) -> None:
        # No prompt is computed here, but the model signals its layers all the same, as a captured graph would.
        self._generator.step(batch, self._messenger.begin_step([]).signals)

    def _run_prefill(self, piece: Piece) -> None:
        self._engine.prefill([piece], self._messenger.begin_step([]).signals)

    def _take_context(self, arrival: kvmsgr.Arrival) -> Tensor:
        """The hidden state that came with the KV; zeros when nothing was prefilled."""
        hidden = torch.zeros(self._engine.config.hidden)
        if "hidden" in arrival.context and arrival.num_tokens:
            hidden = torch.frombuffer(arrival.context["hidden"], dtype=torch.float32).clone()
        arrival.release()
        return hidden
