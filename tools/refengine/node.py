"""What both roles share: an engine's memory as kvmsgr sees it, opening a Messenger, and the thread of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

import kvmsgr
from kvmsgr.workers import SharedCounters, WorkerGroup

from .cache import PagedCache
from .collective import RankLost
from .loader import Checkpoint, ModelConfig
from .spec import CacheSpec

STALL_S = 0.5  # without a row landing, once all is posted: on one machine this is long
LEASE_S = 10.0  # many processes may share few cores here; a process that dies is noticed by its connection
STEP_TIMEOUT_S = 60.0
TIME_ALLOWED_S = 240.0  # a prompt may wait for all others to be prefilled first


def describe(config: ModelConfig, spec: CacheSpec, caches: Sequence[PagedCache]) -> list[kvmsgr.CacheGroup]:
    """A rank's caches as kvmsgr knows them: which layers and heads they hold, and how they lie in memory."""
    return [
        kvmsgr.CacheGroup.from_tensors(
            [cache.tensor],
            cache.dims,
            name=cache.group.name,
            head_start=0 if spec.latent else cache.heads.start,
            total_heads=None if spec.latent else config.num_kv_heads,
            layers=cache.group.layers,
        )
        for cache in caches
    ]


def only_rank(
    config: ModelConfig, spec: CacheSpec, caches: Sequence[PagedCache], hidden: Tensor, num_interfaces: int = 1
) -> kvmsgr.Rank:
    """The rank whose memory is in this process.

    Args:
        config, spec, caches: The engine's.
        hidden: Shape [num_slots, hidden]: context slots for the state of the last prefilled token.
        num_interfaces: How many network interfaces it has; they all stand for the same one.
    """
    return kvmsgr.Rank(
        cache=kvmsgr.Cache(describe(config, spec, caches)),
        context=[kvmsgr.ContextBuffer("hidden", hidden)],
        interfaces=(None,) * num_interfaces,
    )


async def open_messenger(
    name: str,
    checkpoint: Checkpoint,
    ranks: Sequence[kvmsgr.Rank],
    fabric: str = "auto",
    *,
    counters: SharedCounters | tuple[()] = (),
    hold_s: float = 0.0,
) -> kvmsgr.Messenger:
    """Open a Messenger that moves the pages of an engine's ranks and, a request, one hidden state.

    Args:
        name: Name in logs.
        checkpoint: The fingerprint of its weights is announced to peers.
        ranks: In order.
        fabric: As in `kvmsgr.Config`.
        counters: Layer counters that worker processes bump, one for all ranks or one a rank; empty: this process bumps.
        hold_s: A step may stand still that long; no time runs out meanwhile.
    """
    config = kvmsgr.Config(
        name=name,
        fabric=fabric,
        model=f"{checkpoint.name}@{checkpoint.fingerprint}",
        layer_counters="rank" if len(counters) > 1 else "lead",
        stall_s=STALL_S,
        lease_s=LEASE_S,
        time_allowed_s=TIME_ALLOWED_S + hold_s,
        step_timeout_s=STEP_TIMEOUT_S + hold_s,
    )
    return await kvmsgr.Messenger.open(config, ranks=ranks, counters=counters)


class RankWatch:
    """What a node does about a rank that is lost: nothing computes any more, so everything fails, on both sides."""

    def __init__(self, messenger: kvmsgr.Messenger, workers: WorkerGroup | None) -> None:
        self._messenger = messenger
        self._lost: asyncio.Future[RankLost] = asyncio.get_running_loop().create_future()
        if workers:
            workers.on_lost(lambda lost: self.rank_lost(RankLost(lost.rank, f"process {lost.pid} {lost.how}")))

    def rank_lost(self, lost: RankLost) -> None:
        """Fail all requests. May be called again, for whoever notices."""
        if not self._lost.done():
            self._messenger.rank_lost(lost.rank, lost.why)
            self._lost.set_result(lost)

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Around whatever needs all ranks. It ends when one is lost; the node by `end`."""
        try:
            yield
        except RankLost as lost:
            self.rank_lost(lost)

    async def end(self, quiet: Callable[[], Awaitable[None]]) -> None:
        """Wait for a rank to be lost, then for the node to be quiet, and raise the RankLost."""
        lost = await self._lost
        await quiet()
        raise lost


def model_thread() -> ThreadPoolExecutor:
    """One thread that runs the forward passes one after the other, beside the event loop."""
    return ThreadPoolExecutor(1, "model", initializer=torch.set_num_threads, initargs=(1,))
