"""An engine: one model, one paged cache over one or several ranks, two kinds of step. It knows nothing of kvmsgr."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from .arithmetic import KEY_BLOCK
from .cache import PagedCache, PagePool
from .loader import Checkpoint
from .model import Batch, Shard, only_rank
from .prefix import PrefixCache, check_groups
from .scheduler import Hit, Holding, Job, Piece
from .spec import CacheSpec


class Signal(Protocol):
    """What a forward pass tells of itself: that it starts, and that one more layer is final."""

    def start(self) -> None: ...
    def bump(self) -> None: ...


Pauses = Mapping[int, Callable[[], None]]
"""What to call just before a layer is signalled, by the layer's index."""


class Ranks(Protocol):
    """The ranks of a node in lockstep. All calls come from one thread at a time."""

    def forward(self, batches: Sequence[Batch], signals: Sequence[Signal], pauses: Pauses) -> Tensor:
        """Run one forward pass on all ranks: `Shard.forward`.

        Args:
            batches: What it computes.
            signals: None, one that rank 0 bumps for all, or one a rank.
            pauses: What to call on the way.
        """

    def draft(self, states: Tensor, batches: Sequence[Batch]) -> Tensor:
        """Run the draft layer on all ranks: `Shard.draft`."""

    def poison(self, group: int, pages: Sequence[int]) -> None:
        """Fill pages with NaN on all ranks."""

    def is_poisoned(self, group: int, pages: Sequence[int]) -> bool:
        """Whether these pages are still NaN, to the last byte, on all ranks."""


class OnlyRank:
    """The one rank of a node that is not sharded: it runs in this process."""

    def __init__(self, checkpoint: Checkpoint, spec: CacheSpec, num_pages: Sequence[int]) -> None:
        self.caches = [
            PagedCache(checkpoint.config, spec, group, num) for group, num in zip(spec.groups, num_pages, strict=True)
        ]
        self.shard = Shard(checkpoint, spec, 0, self.caches)

    def forward(self, batches: Sequence[Batch], signals: Sequence[Signal], pauses: Pauses) -> Tensor:
        def after_layer(layer: int) -> None:
            if layer in pauses:
                pauses[layer]()
            for signal in signals:
                signal.bump()

        for signal in signals:
            signal.start()
        return self.shard.forward(batches, only_rank, after_layer)

    def draft(self, states: Tensor, batches: Sequence[Batch]) -> Tensor:
        return self.shard.draft(states, batches, only_rank)

    def poison(self, group: int, pages: Sequence[int]) -> None:
        self.caches[group].poison(pages)

    def is_poisoned(self, group: int, pages: Sequence[int]) -> bool:
        return self.caches[group].is_poisoned(pages)


class Engine:
    """Pages, and the steps that compute with them.

    Args:
        checkpoint: The model.
        spec: How the cache is kept.
        num_pages: Pages of each group.
        ranks: What computes.
        seed: Shuffles the order in which pages are handed out.
        prefix_cache: Keep pages that nobody holds, for prompts that begin alike.

    Raises:
        ValueError: Pages of these groups cannot be cached.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: CacheSpec,
        num_pages: Sequence[int],
        ranks: Ranks,
        seed: int,
        *,
        prefix_cache: bool = False,
    ) -> None:
        self.checkpoint, self.spec, self.ranks = checkpoint, spec, ranks
        self.config = checkpoint.config
        self.pools = [PagePool(num, seed + index) for index, num in enumerate(num_pages)]
        self._prefix = PrefixCache(spec.groups[0].page_tokens, max(group.num_ahead for group in spec.groups))
        self._caches_prefixes = prefix_cache
        if prefix_cache:
            check_groups(spec.groups)

    @property
    def num_free(self) -> list[int]:
        """Pages of each group that can be had."""
        return [pool.num_free + self._prefix.num_idle for pool in self.pools]

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """What the full pages of a prompt are found by; nothing without a prefix cache."""
        return self._prefix.keys(prompt) if self._caches_prefixes else []

    def allocate(self, num_tokens: int, num_computed: int = 0, keys: Sequence[bytes] = ()) -> list[Holding] | None:
        """Pages in every group for the positions below `num_tokens` that are needed once `num_computed` are.

        Args:
            num_tokens, num_computed: Positions.
            keys: Of the prompt's pages: the first of them that are cached are shared, others are the job's own.

        Returns:
            None when there are not enough free ones.
        """
        shared = self._prefix.find(keys)
        for cached in shared:
            self._prefix.hold(cached)
        wanted = [group.num_pages(num_computed, num_tokens) - len(shared) for group in self.spec.groups]
        if any(num > free for num, free in zip(wanted, self.num_free, strict=True)):
            for cached in reversed(shared):
                self._prefix.leave(cached.pages)
            return None
        missing = max(num - pool.num_free for num, pool in zip(wanted, self.pools, strict=True))
        evicted = [self._prefix.evict() for _ in range(missing)]
        for index, pages in enumerate(zip(*evicted, strict=True)):
            self._free(index, pages)
        return [
            Holding(
                group.page_tokens,
                group.first_needed(num_computed) // group.page_tokens,
                [cached.pages[index] for cached in shared] + pool.allocate(num),
            )
            for index, (group, pool, num) in enumerate(zip(self.spec.groups, self.pools, wanted, strict=True))
        ]

    def share(self, job: Job) -> list[Hit]:
        """Let the job hold what is cached of its next pages, instead of its own, which are still empty.

        Returns:
            The positions that it need not compute: they follow on those that it has.
        """
        page_tokens, hits = self._prefix.page_tokens, list[Hit]()
        first, inside = divmod(job.num_computed, page_tokens)
        for index, cached in enumerate(self._prefix.find([] if inside else job.keys[first:]), first):
            own = tuple(held.pages[index] for held in job.held)
            if own != cached.pages:
                self._prefix.hold(cached)
                for group, held in enumerate(job.held):
                    held.pages[index] = cached.pages[group]
                    self._free(group, [own[group]])
            start, stop = index * page_tokens, (index + 1) * page_tokens
            if hits and hits[-1].step == cached.step:
                start = hits.pop().start
            hits.append(Hit(start, stop, cached.step))
        return hits

    def keep(self, job: Job, start: int, stop: int, step: int = 0) -> None:
        """Cache the full pages that end in the positions [start, stop) of a job, which the step of this number
        computes."""
        page_tokens = self._prefix.page_tokens
        for index in range(start // page_tokens, min(stop // page_tokens, len(job.keys))):
            self._prefix.keep(job.keys[index], tuple(held.pages[index] for held in job.held), step)

    def slide(self, job: Job, num_computed: int) -> None:
        """Give back the pages that no window reaches any more."""
        for index, (group, held) in enumerate(zip(self.spec.groups, job.held, strict=True)):
            self._free(index, held.take_before(group.first_needed(num_computed)))

    def release(self, job: Job) -> None:
        """Give back all pages of a job. Those that are not cached are poisoned; the others when they are evicted."""
        first_group = job.held[0].pages if job.held else []
        for index in reversed(range(min(len(job.keys), len(first_group)))):
            if self._prefix.leave(tuple(held.pages[index] for held in job.held)):
                for held in job.held:
                    del held.pages[index]
        for index, held in enumerate(job.held):
            self._free(index, held.pages)
        job.held = []

    def _free(self, group: int, pages: Sequence[int]) -> None:
        if pages:
            self.ranks.poison(group, pages)
            self.pools[group].release(pages)

    def prefill(self, pieces: Sequence[Piece], signals: Sequence[Signal] = (), pauses: Pauses | None = None) -> Tensor:
        """Compute pieces of several prompts. Returns the hidden state [pieces, hidden] of each one's last token."""
        batches = []
        for piece in pieces:
            batch = self._batch([piece.job], [piece.job.prompt[piece.start : piece.stop]], [piece.start])
            if self.spec.has_draft:
                batch = replace(batch, following=torch.tensor([piece.job.prompt[piece.start + 1 : piece.stop + 1]]))
            batches.append(batch)
        hidden = self.ranks.forward(batches, signals, pauses or {})
        for piece in pieces:
            self.slide(piece.job, piece.stop)
        lengths = torch.tensor([piece.stop - piece.start for piece in pieces])
        return hidden[lengths.cumsum(0) - 1]

    def extend(
        self,
        jobs: Sequence[Job],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        signals: Sequence[Signal] = (),
    ) -> list[Tensor]:
        """Compute some tokens of each job, from position `starts[job]` on. Returns their hidden states, a job each:
        [tokens, hidden]."""
        order, batches = self.batches(jobs, tokens, starts)
        return in_order(self.ranks.forward(batches, signals, {}), order, tokens)

    def draft(
        self,
        jobs: Sequence[Job],
        states: Sequence[Tensor],
        following: Sequence[Sequence[int]],
        starts: Sequence[int],
    ) -> list[Tensor]:
        """Run the draft layer on states [tokens, hidden] of each job, from position `starts[job]` on.

        Args:
            jobs: Whose.
            states: After the final norm.
            following: The token after each of these positions.
            starts: Position of the first, a job each.

        Returns:
            The states expected at the positions of the following tokens, a job each: [tokens, hidden].
        """
        order, batches = self.batches(jobs, following, starts)
        return in_order(self.ranks.draft(torch.cat([states[index] for index in order]), batches), order, following)

    def batches(
        self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> tuple[list[int], list[Batch]]:
        """A batch for each number of tokens, and the order in which they have the jobs."""
        by_length: dict[int, list[int]] = {}
        for index, own in enumerate(tokens):
            by_length.setdefault(len(own), []).append(index)
        batches = [
            self._batch([jobs[at] for at in some], [tokens[at] for at in some], [starts[at] for at in some])
            for some in by_length.values()
        ]
        return [index for some in by_length.values() for index in some], batches

    def _batch(self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> Batch:
        """Tokens of several jobs, the same number each, from position `starts[job]` on."""
        num_tokens = len(tokens[0])
        positions = torch.tensor(starts)[:, None] + torch.arange(num_tokens)
        key_starts, tables = [], []
        for index, group in enumerate(self.spec.groups):
            first = 0 if group.window is None else max(0, min(starts) - group.window + 1)
            key_starts.append(first // KEY_BLOCK * KEY_BLOCK)
            tables.append(page_table([job.held[index] for job in jobs], key_starts[-1], max(starts) + num_tokens))
        return Batch(torch.tensor(tokens), positions, tuple(tables), tuple(key_starts))

    def warm_up(self, signals: Sequence[Signal] = ()) -> None:
        """One forward pass on a page of its own, so that the first request does not pay for touching the weights."""
        held = self.allocate(1)
        if held is None:
            raise MemoryError("there is no free page to warm up with")
        job = Job("warm-up", [0, 0], held)
        self.prefill([Piece(job, 0, 1)], signals)
        self.release(job)


def page_table(held: Sequence[Holding], key_start: int, num_tokens: int) -> Tensor:
    """Pages [sequences, pages] of the positions from `key_start` to `num_tokens`, rounded up to whole blocks of keys.

    Where a sequence holds no page the table says 0; attention masks those positions.
    """
    page_tokens = held[0].page_tokens
    stop = -(-num_tokens // KEY_BLOCK) * KEY_BLOCK
    table = torch.zeros(len(held), (stop - key_start) // page_tokens, dtype=torch.int64)
    for row, own in zip(table, held, strict=True):
        first = max(key_start // page_tokens, own.first_page)
        pages = own.between(first * page_tokens, stop)
        begin = first - key_start // page_tokens
        row[begin : begin + len(pages)] = torch.tensor(pages, dtype=torch.int64)
    return table


def in_order(rows: Tensor, order: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
    """Divide the rows of batches, which have the jobs in this order, among the jobs."""
    parts = torch.split(rows, [len(tokens[index]) for index in order])
    return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]


def local_engine(
    checkpoint: Checkpoint, spec: CacheSpec, num_pages: Sequence[int], seed: int, *, prefix_cache: bool = False
) -> Engine:
    """An engine whose only rank runs in this process."""
    ranks = OnlyRank(checkpoint, spec, num_pages)
    return Engine(checkpoint, spec, num_pages, ranks, seed, prefix_cache=prefix_cache)
