"""Engines of several ranks whose every byte says where it belongs: any sharding, any order of axes, several groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import kvmsgr
from kvmsgr.layout import head_share

Rows = npt.NDArray[np.uint16]
T = TypeVar("T")
POISON = 0xDEAD
ITEM_BYTES = 2
CONTEXT_BYTES = 32
ORDERS = {
    "hnd": "layer page plane head token dim",
    "nhd": "layer page plane token head dim",
}


@dataclass(frozen=True)
class Group:
    """A cache group of a whole model, before it is dealt to ranks. `window`: only so many positions at the end live.
    `num_sharing`: so many layers at the end use the buffer of the one before them, and each layer has a tensor."""

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
    num_sharing: int = 0

    @property
    def row_bytes(self) -> int:
        """Of all planes of a head of a token of a layer."""
        return self.planes * self.dim * ITEM_BYTES

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


@lru_cache(maxsize=256)  # ranks that hold copies ask for the same
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
            "page": group.num_pages, "plane": group.planes, "head": len(heads),
            "token": 1 if group.recurrent else group.page_tokens, "dim": group.dim,
        }  # fmt: skip
        _, *axes = ORDERS[group.order].split()
        shape, num_buffers = [sizes[axis] for axis in axes], len(layers) - group.num_sharing
        self._buffers = [min(index, num_buffers - 1) for index in range(len(layers))]
        if group.num_sharing:
            tensors = [np.full(shape, POISON, np.uint16) for _ in range(num_buffers)]
            self._parts, self._dims = [[tensors[buffer] for buffer in self._buffers]], " ".join(axes)
        else:
            whole = np.full([num_buffers, *shape], POISON, np.uint16)
            tensors, self._parts, self._dims = list(whole), [[whole]], ORDERS[group.order]
        wanted = [axes.index(axis) for axis in ("plane", "head", "page", "token", "dim")]
        self._rows = [tensor.transpose(wanted) for tensor in tensors]

    def describe(self) -> kvmsgr.CacheGroup:
        return kvmsgr.CacheGroup.from_tensors(
            self._parts,
            self._dims,
            name=self.group.name,
            head_start=self.heads.start,
            total_heads=self.group.heads,
            layers=self.layers,
            recurrent=self.group.recurrent,
        )

    def _rows_of(self, layer: int) -> Rows:
        return self._rows[self._buffers[self.layers.index(layer)]]

    def _at(self, pages: Sequence[int], positions: range, first: int) -> tuple[Any, ...]:
        """Index of the rows of positions in a layer; `pages` begin with the one that holds `first`."""
        tokens = self._rows[0].shape[3]
        places = np.array(positions) - first // tokens * tokens
        return slice(None), slice(None), np.array(pages)[places // tokens], places % tokens

    def put(self, request: int, layer: int, pages: Sequence[int], positions: range, first: int) -> None:
        """Compute rows. Layers and positions that are not here, or have left the window, are somebody else's."""
        if layer in self.layers and len(positions):
            rows = tagged(request, self.group, layer, self.heads, positions)
            self._rows_of(layer)[self._at(pages, positions, first)] = rows

    def check(self, request: int, pages: Sequence[int], num_positions: int, first: int) -> None:
        """All rows are there, as the last of the layers that share a buffer computes them; what lies in the first page
        before them is as it was."""
        positions = range(first, num_positions) if not self.group.recurrent else range(1)
        for index, layer in enumerate(self.layers):
            if self._buffers[index] in self._buffers[index + 1 :]:
                continue
            rows = self._rows_of(layer)
            wrong = np.argwhere(
                (rows[self._at(pages, positions, first)] != tagged(request, self.group, layer, self.heads, positions))
                .any(-1)
            )  # fmt: skip
            assert not len(wrong), f"{self.group.name} {layer=}: wrong at (plane, head, position) {wrong[0].tolist()}"
            if len(positions):
                before = rows[:, :, pages[0], : first % rows.shape[3]]
                assert (before == POISON).all(), f"{self.group.name} {layer=}: what lies before {first=} was written"

    def check_others(self, pages: Sequence[int]) -> None:
        others = [page for page in range(self.group.num_pages) if page not in set(pages)]
        for rows in self._rows:
            assert (rows[:, :, others] == POISON).all(), f"{self.group.name}: a page of nobody's was written"

    def found(self, layer: int, pages: Sequence[int], num_positions: int) -> Rows:
        """The rows of a layer, shape (planes, heads, positions, dim)."""
        return self._rows_of(layer)[self._at(pages, range(num_positions), 0)]

    def fill(self, value: int) -> None:
        """The same everywhere."""
        for rows in self._rows:
            rows[:] = value

    def poison(self, pages: Sequence[int]) -> None:
        """As if nothing had been written."""
        for rows in self._rows:
            rows[:, :, pages] = POISON


@dataclass
class Node:
    """The ranks of one engine: one messenger for all of them, or one each."""

    groups: Sequence[Group]
    sharding: Sharding
    shards: list[list[Shard]]
    hidden: list[npt.NDArray[np.uint16]]
    messengers: list[kvmsgr.Messenger]
    rng: Random
    planning_s: list[float] = field(default_factory=list)  # of each call of begin_step

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
                self._announce(messenger, kvmsgr.Chunk(part, start, stop, spans))
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

    def _announce(self, messenger: kvmsgr.Messenger, chunk: kvmsgr.Chunk) -> kvmsgr.Step:
        begun_s = time.perf_counter()
        step = messenger.begin_step([chunk])
        self.planning_s.append(time.perf_counter() - begun_s)
        return step

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

    async def receive(
        self,
        sources: Sequence[kvmsgr.Descriptor],
        request: int,
        num_tokens: int,
        ranks: Sequence[int] | None = None,
    ) -> list[kvmsgr.Arrival]:
        """Fetch one request and check it byte by byte; then its pages are poisoned again."""
        num_positions = num_tokens - 1
        pages = self.draw_pages(num_positions)
        fetches = [
            messenger.fetch(
                f"request {request}",
                sources=sources,
                tokens=range(num_tokens),
                spans=self.spans(pages, num_positions),
                ranks=ranks,
            )
            for messenger in self.messengers
        ]
        arrivals = [await fetch for fetch in fetches]
        for fetch in fetches:
            await within(fetch.released())
        self.check(request, pages, num_positions, range(len(self.shards)) if ranks is None else ranks)
        for shards in self.shards:
            for shard, own in zip(shards, pages, strict=True):
                shard.poison(own)
        return arrivals

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
    hidden = [np.zeros((4, CONTEXT_BYTES // ITEM_BYTES), np.uint16) for _ in shards]
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
    """One request from start to end, checked byte by byte."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        receiving = tasks.create_task(target.receive(source.descriptors, request, num_tokens, ranks))
        tasks.create_task(_serve(source, len(target.messengers), request, chunk, accept))
    return receiving.result()


async def _serve(source: Node, num: int, request: int, chunk: int, accept: Sequence[int] | None) -> None:
    for _ in range(num):
        await source.prefill(request, chunk, accept)
