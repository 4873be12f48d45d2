"""Several ranks in threads of this process: the collective as it is, without workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tests.refengine import tiny
from tools.refengine.cache import PagedCache
from tools.refengine.collective import Collective, connect
from tools.refengine.engine import Engine, Pauses, Signal
from tools.refengine.model import Batch, Shard
from tools.refengine.spec import CacheSpec

MAX_ROWS = 64


class ThreadRanks:
    """`engine.Ranks` whose ranks are threads."""

    def __init__(self, spec: CacheSpec, num_pages: Sequence[int], timeout_s: float = 10.0) -> None:
        checkpoint, config = tiny.checkpoint(draft=spec.has_draft), tiny.CONFIG
        memory = torch.zeros(2, config.num_kv_heads, MAX_ROWS * config.hidden)
        self.sockets = connect(spec.num_ranks)
        self._collectives = [Collective(rank, peers, memory, timeout_s) for rank, peers in enumerate(self.sockets)]
        self.caches = [
            [PagedCache(config, spec, group, num, rank) for group, num in zip(spec.groups, num_pages, strict=True)]
            for rank in range(spec.num_ranks)
        ]
        self._shards = [Shard(checkpoint, spec, rank, caches) for rank, caches in enumerate(self.caches)]

    def forward(self, batches: Sequence[Batch], signals: Sequence[Signal], pauses: Pauses) -> Tensor:
        def run(rank: int) -> Tensor:
            bumped = signals if rank == 0 else []  # rank 0 speaks for all
            return self._shards[rank].forward(
                batches, self._collectives[rank].exchange, lambda layer: [own.bump() for own in bumped] and None
            )

        return self._on_all(run)

    def draft(self, states: Tensor, batches: Sequence[Batch]) -> Tensor:
        return self._on_all(lambda rank: self._shards[rank].draft(states, batches, self._collectives[rank].exchange))

    def _on_all(self, run: Callable[[int], Tensor]) -> Tensor:
        with ThreadPoolExecutor(len(self._shards), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = list(pool.map(run, range(len(self._shards))))
        assert all(torch.equal(found[0], other) for other in found)
        return found[0]

    def poison(self, group: int, pages: Sequence[int]) -> None:
        for caches in self.caches:
            caches[group].poison(pages)

    def is_poisoned(self, group: int, pages: Sequence[int]) -> bool:
        return all(caches[group].is_poisoned(pages) for caches in self.caches)

    def close(self) -> None:
        for peers in self.sockets:
            for peer in peers.values():
                peer.close()


def engine(spec: CacheSpec, num_pages: int = 128, seed: int = 0) -> tuple[Engine, ThreadRanks]:
    """An engine over such ranks."""
    counts = [num_pages] * len(spec.groups)
    ranks = ThreadRanks(spec, counts)
    return Engine(tiny.checkpoint(draft=spec.has_draft), spec, counts, ranks, seed), ranks
