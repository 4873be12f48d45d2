"""Which tokens a step computes. Pure: no tensors, no messenger, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
        held: What it holds in this engine's cache, a group each.
        num_computed: Positions whose KV is in the cache.
        keys: Of the full pages of the prompt, in a prefix cache; empty without one.
        wants_hidden: The last prefilled token must be computed even if its page is cached: its hidden state is wanted.
    """

    request_id: str
    prompt: list[int]
    held: list[Holding] = field(default_factory=list)
    num_computed: int = 0
    keys: list[bytes] = field(default_factory=list)
    wants_hidden: bool = True

    @property
    def num_prefill(self) -> int:
        return len(self.prompt) - 1


@dataclass(frozen=True)
class Hit:
    """Positions [start, stop) of a prompt, in pages that the step of that number computes, or did, for another job."""

    start: int
    stop: int
    step: int


@dataclass(frozen=True)
class Piece:
    """What one step does for a prompt.

    Attributes:
        job: Whose prompt.
        start, stop: Positions that it computes; none where all that is wanted is in the prefix cache.
        hits: Positions before these, not spoken of until now, that earlier steps have computed.
        first: From here to `start` are positions that the step computes as well, for other jobs in pages that are
            shared; None: there are none.
    """

    job: Job
    start: int
    stop: int
    hits: tuple[Hit, ...] = ()
    first: int | None = None

    @property
    def begin(self) -> int:
        """First position that this step makes final."""
        return self.start if self.first is None else self.first

    @property
    def num_cached(self) -> int:
        """Positions that are new to the job and need not be computed for it."""
        return self.start - (self.hits[0].start if self.hits else self.begin)

    @property
    def is_last(self) -> bool:
        return self.stop == self.job.num_prefill


def share_nothing(job: Job) -> list[Hit]:
    """For engines without a prefix cache."""
    return []


def keep_nothing(job: Job, start: int, stop: int, step: int) -> None:
    """For engines without a prefix cache."""


class PrefillScheduler:
    """Chunked prefill of several prompts at once, first come first served.

    Every step has a budget of tokens. It is shared evenly by the running prompts; what one cannot use goes to the
    next. A prompt starts to run when there are pages for all of it. What a prefix cache has of it by then, or gets
    while it runs, is not computed again: two prompts that begin alike and run together compute that in turns.

    Args:
        step_tokens: Budget of a step.
        max_running: Most prompts that share a step.
        allocate: Gives a job its pages in all groups, or None when there are not enough at the moment.
        share: Gives a job what is cached of its next pages: `Engine.share`.
        keep: Caches what a step computes: `Engine.keep`.
    """

    def __init__(
        self,
        step_tokens: int,
        max_running: int,
        allocate: Callable[[Job], list[Holding] | None],
        share: Callable[[Job], list[Hit]] = share_nothing,
        keep: Callable[[Job, int, int, int], None] = keep_nothing,
    ) -> None:
        if step_tokens < 1:
            raise ValueError(f"a step of {step_tokens} tokens computes nothing")
        self._step_tokens, self._max_running = step_tokens, max_running
        self._allocate, self._share, self._keep = allocate, share, keep
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._step = 0

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

    @property
    def running(self) -> Sequence[Job]:
        """Jobs that have pages and are not computed to their end, in the order in which they came."""
        return self._running

    def next_step(self) -> list[Piece]:
        """The pieces of the next step; empty when nothing can run. They count as computed from now on."""
        self._admit()
        self._step += 1
        pieces: list[Piece] = []
        budget = self._step_tokens
        for index, job in enumerate(self._running):
            share = -(-budget // (len(self._running) - index))
            if share:  # the budget may be smaller than the number of prompts
                pieces.append(self._piece(job, share))
                budget -= pieces[-1].stop - pieces[-1].start
        self._running = [job for job in self._running if job.num_computed < job.num_prefill]
        return pieces

    def _piece(self, job: Job, num_tokens: int) -> Piece:
        """The next piece of a job, of at most so many tokens."""
        hits = self._share(job)
        reached = hits[-1].stop if hits else job.num_computed
        start = min(reached, job.num_prefill - job.wants_hidden)
        stop = min(start + num_tokens, job.num_prefill)
        first = next((hit.start for hit in hits if hit.step == self._step), None)
        end = start if first is None else first
        before = tuple(Hit(hit.start, min(hit.stop, end), hit.step) for hit in hits if hit.start < end)
        self._keep(job, start, stop, self._step)
        job.num_computed = stop
        return Piece(job, start, stop, before, first)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            held = self._allocate(self._waiting[0])
            if held is None:
                return
            job = self._waiting.popleft()
            job.held = held
            self._running.append(job)
