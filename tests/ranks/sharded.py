"""Engines of several ranks whose every byte says where it belongs: any sharding, any order of axes, several groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import kvmsgr
from kvmsgr.layout import head_share

Rows = npt.NDArray[np.uint16]
T = TypeVar("T")
POISON = 0xDEAD
ORDERS = {
    "hnd": "layer page plane head token dim",
    "nhd": "layer page plane token head dim",
}


@dataclass(frozen=True)
class Group:
    """A cache group of a whole model, before it is dealt to ranks. `window`: only so many positions at the end live."""

    name: str = "kv"
    layers: tuple[int, ...] = (0, 1, 2)
    heads: int = 2
    planes: int = 2
    dim: int = 4
    page_tokens: int = 4
    num_pages: int = 12
    order: str = "hnd"
    recurrent: bool = False
    window: int | None = None

    def first(self, num_positions: int) -> int:
        """The first position that is moved."""
        return 0 if self.window is None else max(0, num_positions - self.window)

    def positions(self, num_positions: int) -> range:
        """Those that are moved; a recurrent group has one state."""
        return range(1) if self.recurrent else range(self.first(num_positions), num_positions)

    def num_needed(self, num_positions: int) -> int:
        """Pages of a request, from the one of its first position on."""
        if self.recurrent:
            return 1
        return -(-num_positions // self.page_tokens) - self.first(num_positions) // self.page_tokens


@dataclass(frozen=True)
class Sharding:
    """How a node deals groups to ranks: `tp` shares of the heads (or copies) x `pp` shares of the layers."""

    tp: int = 1
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def layers(self, group: Group, rank: int) -> tuple[int, ...]:
        every, stage = len(group.layers), rank // self.tp
        return group.layers[every * stage // self.pp : every * (stage + 1) // self.pp]

    def heads(self, group: Group, rank: int) -> range:
        return head_share(group.heads, self.tp, rank % self.tp)


def tagged(request: int, group: Group, layer: int, heads: range, positions: range) -> Rows:
    """What belongs there, shape (planes, heads, positions, dim): no two rows of a test are alike, or hardly any."""
    planes = np.arange(group.planes, dtype=np.uint32)[:, None, None, None]
    head = np.array(heads, np.uint32)[None, :, None, None]
    position = np.array(positions, np.uint32)[None, None, :, None]
    dim = np.arange(group.dim, dtype=np.uint32)
    mixed = (((request * 131 + layer) * 2 + planes) * 67 + head) * 40503 + position * 9973 + dim * 257 + len(group.name)
    return ((mixed * np.uint32(2654435761)) >> np.uint32(16)).astype(np.uint16)


class Shard:
    """One group on one rank."""

    def __init__(self, group: Group, layers: tuple[int, ...], heads: range) -> None:
        self.group, self.layers, self.heads = group, layers, heads
        sizes = {
            "layer": len(layers), "page": group.num_pages, "plane": group.planes, "head": len(heads),
            "token": 1 if group.recurrent else group.page_tokens, "dim": group.dim,
        }  # fmt: skip
        axes = ORDERS[group.order].split()
        self.array = np.full([sizes[axis] for axis in axes], POISON, np.uint16)
        wanted = ("layer", "plane", "head", "page", "token", "dim")
        self._rows = self.array.transpose([axes.index(axis) for axis in wanted])

    def describe(self) -> kvmsgr.CacheGroup:
        return kvmsgr.CacheGroup.from_tensors(
            [self.array],
            ORDERS[self.group.order],
            name=self.group.name,
            head_start=self.heads.start,
            total_heads=self.group.heads,
            layers=self.layers,
            recurrent=self.group.recurrent,
        )

    def _at(self, pages: Sequence[int], positions: range, first: int) -> tuple[Any, ...]:
        """Index of the rows of positions in a layer; `pages` begin with the one that holds `first`."""
        tokens = self._rows.shape[4]
        places = np.array(positions) - first // tokens * tokens
        return slice(None), slice(None), np.array(pages)[places // tokens], places % tokens

    def put(self, request: int, layer: int, pages: Sequence[int], positions: range, first: int) -> None:
        """Compute rows. Layers and positions that are not here, or have left the window, are somebody else's."""
        if layer in self.layers and len(positions):
            rows = tagged(request, self.group, layer, self.heads, positions)
            self._rows[self.layers.index(layer)][self._at(pages, positions, first)] = rows

    def check(self, request: int, pages: Sequence[int], num_positions: int, first: int) -> None:
        """All rows are there, and every other page is as it was."""
        positions = range(first, num_positions) if not self.group.recurrent else range(1)
        for layer in self.layers:
            found = self._rows[self.layers.index(layer)][self._at(pages, positions, first)]
            wanted = tagged(request, self.group, layer, self.heads, positions)
            wrong = np.argwhere((found != wanted).any(-1))
            assert not len(wrong), f"{self.group.name} {layer=}: wrong at (plane, head, position) {wrong[0].tolist()}"

    def check_others(self, pages: Sequence[int]) -> None:
        others = [page for page in range(self.group.num_pages) if page not in set(pages)]
        assert (self._rows[:, :, :, others] == POISON).all(), f"{self.group.name}: a page of nobody's was written"


@dataclass
class Node:
    """The ranks of one engine: one messenger for all of them, or one each."""

    groups: Sequence[Group]
    sharding: Sharding
    shards: list[list[Shard]]
    hidden: list[npt.NDArray[np.uint16]]
    messengers: list[kvmsgr.Messenger]
    rng: Random
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def lead(self) -> kvmsgr.Messenger:
        return self.messengers[0]

    @property
    def descriptors(self) -> list[kvmsgr.Descriptor]:
        return [messenger.descriptor for messenger in self.messengers]

    @property
    def layers(self) -> list[int]:
        return sorted({layer for group in self.groups for layer in group.layers})

    def draw_pages(self, num_positions: int) -> list[list[int]]:
        """Pages for a request, of each group, in any order."""
        return [self.rng.sample(range(group.num_pages), group.num_needed(num_positions)) for group in self.groups]

    def spans(self, pages: Sequence[Sequence[int]], num_positions: int) -> list[kvmsgr.Span]:
        return [
            kvmsgr.Span(index, group.first(num_positions), own)
            for index, (group, own) in enumerate(zip(self.groups, pages, strict=True))
        ]

    # Prefill

    async def prefill(self, request: int, chunk: int = 1 << 30, accept: Sequence[int] | None = None) -> None:
        """Serve one request: each layer is computed just before it is signalled."""
        asked = [await anext(aiter(messenger.requests())) for messenger in self.messengers]
        num_positions = asked[0].num_positions
        pages = self.draw_pages(num_positions)
        spans = self.spans(pages, num_positions)
        for part in asked:
            part.accept(accept)
        for start in range(0, num_positions, chunk):
            stop = min(start + chunk, num_positions)
            steps = [
                messenger.begin_step([kvmsgr.Chunk(part, start, stop, spans)])
                for messenger, part in zip(self.messengers, asked, strict=True)
            ]
            for step in steps:
                for signal in step.signals:
                    signal.start()
            for layer in self.layers:
                self._compute(request, layer, pages, start, stop, num_positions)
                self._bump(steps, layer)
                await asyncio.sleep(0)
            self._compute_context(request, asked, steps)
        for part in asked:
            await part.released()

    def _compute(
        self, request: int, layer: int, pages: Sequence[Sequence[int]], start: int, stop: int, num_positions: int
    ) -> None:
        for shards in self.shards:
            for shard, own in zip(shards, pages, strict=True):
                first = shard.group.first(num_positions)
                if shard.group.recurrent:
                    number = request if stop == num_positions else request + 77  # a state that later tokens replace
                    shard.put(number, layer, own, range(1), 0)
                else:
                    shard.put(request, layer, own, range(max(first, start), stop), first)

    def _bump(self, steps: Sequence[kvmsgr.Step], layer: int) -> None:
        """One counter for all ranks, or one a rank, which then has its own layers alone."""
        signals = [signal for step in steps for signal in step.signals]
        if len(signals) == 1:
            signals[0].bump()
            return
        for shards, signal in zip(self.shards, signals, strict=True):
            if any(layer in shard.layers for shard in shards):
                signal.bump()

    def _compute_context(
        self, request: int, asked: Sequence[kvmsgr.PrefillRequest], steps: Sequence[kvmsgr.Step]
    ) -> None:
        for part, step in zip(asked, steps, strict=True):
            if step.signals_context:
                for views in part.contexts.values():
                    if "hidden" in views:
                        views["hidden"][:] = request % 251
                for signal in step.signals:
                    signal.bump()

    # Decode

    def check(self, request: int, pages: Sequence[Sequence[int]], num_positions: int, ranks: Sequence[int]) -> None:
        """Every byte that was asked for is there; nothing else is touched."""
        for rank, shards in enumerate(self.shards):
            for shard, own in zip(shards, pages, strict=True):
                if rank in ranks:
                    shard.check(request, own, num_positions, shard.group.first(num_positions))
                shard.check_others(own if rank in ranks else [])


async def within(awaitable: Awaitable[T], seconds: float = 20) -> T:
    async def whole() -> T:
        return await awaitable

    return await asyncio.wait_for(whole(), seconds)


@asynccontextmanager
async def node(
    name: str,
    groups: Sequence[Group],
    sharding: Sharding,
    *,
    fabric: str,
    one_each: bool = False,
    interfaces: int = 1,
    context: bool = False,
    seed: int = 0,
    **more: object,
) -> AsyncIterator[Node]:
    """Open the messengers of a node; `one_each`: one a rank instead of one for all. `more` are settings."""
    shards = [
        [Shard(group, sharding.layers(group, rank), sharding.heads(group, rank)) for group in groups]
        for rank in range(sharding.num_ranks)
    ]
    hidden = [np.zeros((4, 16), np.uint16) for _ in shards]
    ranks = [
        kvmsgr.Rank(
            kvmsgr.Cache([shard.describe() for shard in own]),
            [kvmsgr.ContextBuffer("hidden", hidden[rank])] if context else [],
            [None] * interfaces,
        )
        for rank, own in enumerate(shards)
    ]
    settings: dict[str, Any] = {"model": "test", "fabric": fabric, **more}
    messengers: list[kvmsgr.Messenger] = []
    try:
        for index, own in enumerate([[rank] for rank in ranks] if one_each else [ranks]):
            config = kvmsgr.Config(name=f"{name}{index if one_each else ''}", **settings)
            messengers.append(await kvmsgr.Messenger.open(config, ranks=own))
        yield Node(groups, sharding, shards, hidden, messengers, Random(seed))
    finally:
        for messenger in messengers:
            await within(messenger.close())


async def move(
    source: Node,
    target: Node,
    request: int,
    num_tokens: int,
    *,
    chunk: int = 1 << 30,
    ranks: Sequence[int] | None = None,
    accept: Sequence[int] | None = None,
) -> list[kvmsgr.Arrival]:
    """One request from start to end, checked byte by byte; then the destination pages are poisoned again."""
    num_positions = num_tokens - 1
    pages = target.draw_pages(num_positions)
    fetches = [
        messenger.fetch(
            f"request {request}",
            sources=source.descriptors,
            tokens=range(num_tokens),
            spans=target.spans(pages, num_positions),
            ranks=ranks,
        )
        for messenger in target.messengers
    ]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(_arrival(fetch)) for fetch in fetches]
        tasks.create_task(_serve(source, len(fetches), request, chunk, accept))
    arrivals = [task.result() for task in waiting]
    for fetch in fetches:
        await within(fetch.released())
    target.check(request, pages, num_positions, range(len(target.shards)) if ranks is None else ranks)
    for shards in target.shards:
        for shard in shards:
            shard.array[:] = POISON
    return arrivals


async def _arrival(fetch: kvmsgr.Fetch) -> kvmsgr.Arrival:
    return await fetch


async def _serve(source: Node, num: int, request: int, chunk: int, accept: Sequence[int] | None) -> None:
    for _ in range(num):
        await source.prefill(request, chunk, accept)


def all_shards(nodes: Sequence[Node]) -> Iterator[Shard]:
    for one in nodes:
        for shards in one.shards:
            yield from shards
