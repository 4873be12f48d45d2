"""Which tokens a step computes. Pure: no tensors, no messenger, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Holding:
    """The pages that a job owns in one group, in order of position.

    Attributes:
        page_tokens: Tokens a page.
        first_page: Index in the prompt of the first page that is held: it starts at `first_page * page_tokens`.
        pages: Page indices in the cache.
    """

    page_tokens: int
    first_page: int
    pages: list[int]

    def between(self, start: int, stop: int) -> list[int]:
        """The pages of the positions [start, stop), as far as they are held."""
        first, end = start // self.page_tokens, -(-stop // self.page_tokens)
        return self.pages[max(0, first - self.first_page) : max(0, end - self.first_page)]

    def take_before(self, position: int) -> list[int]:
        """Give up the pages whose positions all lie before this one."""
        num_pages = max(0, position // self.page_tokens - self.first_page)
        taken, self.pages = self.pages[:num_pages], self.pages[num_pages:]
        self.first_page += len(taken)
        return taken


@dataclass(eq=False)
class Job:
    """One request inside one engine.

    The last token of the prompt is never prefilled: it is the first token the decoder runs.

    Attributes:
        request_id: Same on both sides.
        prompt: Token ids.
        held: What it owns in this engine's cache, a group each.
        num_computed: Positions whose KV is in the cache.
    """

    request_id: str
    prompt: list[int]
    held: list[Holding] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_prefill(self) -> int:
        return len(self.prompt) - 1


@dataclass(frozen=True)
class Piece:
    """Positions [start, stop) of a prompt, computed in one step."""

    job: Job
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.job.num_prefill


class PrefillScheduler:
    """Chunked prefill of several prompts at once, first come first served.

    Every step has a budget of tokens. It is shared evenly by the running prompts; what one cannot use goes to the
    next. A prompt starts to run when there are pages for all of it.

    Args:
        step_tokens: Budget of a step; at least `max_running`.
        max_running: Most prompts that share a step.
        allocate: Gives a job its pages in all groups, or None when there are not enough at the moment.
    """

    def __init__(self, step_tokens: int, max_running: int, allocate: Callable[[Job], list[Holding] | None]) -> None:
        if step_tokens < max_running:
            raise ValueError(f"a step of {step_tokens} tokens cannot be shared by {max_running} prompts")
        self._step_tokens, self._max_running, self._allocate = step_tokens, max_running, allocate
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    def add(self, job: Job) -> None:
        """Queue a job. A prompt of one token has nothing to prefill and must not come here."""
        if job.num_prefill < 1:
            raise ValueError(f"request {job.request_id!r} has nothing to prefill")
        self._waiting.append(job)

    def drop(self, job: Job) -> None:
        """Forget a job that will not be finished. Its pages stay with the caller."""
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._running:
            self._running.remove(job)

    def next_step(self) -> list[Piece]:
        """The pieces of the next step; empty when nothing can run. They count as computed from now on."""
        self._admit()
        pieces: list[Piece] = []
        budget = self._step_tokens
        for index, job in enumerate(self._running):
            share = budget // (len(self._running) - index)
            stop = min(job.num_computed + share, job.num_prefill)
            pieces.append(Piece(job, job.num_computed, stop))
            budget -= stop - job.num_computed
            job.num_computed = stop
        self._running = [job for job in self._running if job.num_computed < job.num_prefill]
        return pieces

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            held = self._allocate(self._waiting[0])
            if held is None:
                return
            job = self._waiting.popleft()
            job.held = held
            self._running.append(job)
