"""Opening a node: an engine and its Messenger, with the ranks in this process or in worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

import kvmsgr
from kvmsgr.workers import SharedCounters, WorkerGroup

from .engine import Engine, OnlyRank
from .models import load
from .node import only_rank, open_messenger
from .spec import NodeOptions
from .workers import WorkerRanks


@dataclass(frozen=True)
class Node:
    """What a role works with. `workers`: the processes of its ranks, where they have their own."""

    engine: Engine
    messenger: kvmsgr.Messenger
    workers: WorkerGroup | None


@asynccontextmanager
async def open_node(options: NodeOptions) -> AsyncIterator[Node]:
    """Open an engine and its messenger; leaving the block closes both."""
    spec, num_pages = options.spec, options.num_pages
    checkpoint = load(options.model, draft=spec.has_draft)
    workers: WorkerGroup | None = None
    counters: SharedCounters | tuple[()] = ()
    async with AsyncExitStack() as stack:
        if spec.num_ranks == 1:
            local = OnlyRank(checkpoint, spec, num_pages)
            hidden = torch.full((options.num_requests, checkpoint.config.hidden), torch.nan)
            memory: Sequence[kvmsgr.Rank] = [
                only_rank(checkpoint.config, spec, local.caches, hidden, options.num_interfaces)
            ]
            engine = Engine(checkpoint, spec, num_pages, local, options.seed, prefix_cache=options.prefix_cache)
        else:
            ranks = await stack.enter_async_context(await WorkerRanks.start(options, checkpoint.config))
            workers, memory, counters = ranks.group, ranks.group.ranks, ranks.group.counters
            engine = Engine(checkpoint, spec, num_pages, ranks, options.seed, prefix_cache=options.prefix_cache)
        messenger = await open_messenger(
            options.name, checkpoint, memory, options.fabric, counters=counters, hold_s=options.hold_s
        )
        await stack.enter_async_context(messenger)
        yield Node(engine, messenger, workers)
