"""A pair of messengers over real libfabric, with caches whose every byte says where it belongs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

import kvmsgr
from kvmsgr.runtime.node import Node

LAYERS, PAGES, HEADS, PAGE_TOKENS, DIM = 3, 12, 2, 4, 8
POISON = -1.0
Rows = npt.NDArray[np.float32]
T = TypeVar("T")


def tagged(request: int, layer: int, plane: int, head: int, position: int) -> Rows:
    """The row of a token: no two rows of a test are alike."""
    base = (((request * LAYERS + layer) * 2 + plane) * HEADS + head) * 1000 + position
    return base + np.arange(DIM, dtype=np.float32) / 16


@dataclass
class Shape:
    """How a test cache lies in memory."""

    name: str
    dims: str
    separate_planes: bool = False
    separate_layers: bool = False


SHAPES = [
    Shape("hnd", "layer page plane head token dim"),
    Shape("nhd", "layer page plane token head dim"),
    Shape("hnd, a tensor a layer", "page plane head token dim", separate_layers=True),
    Shape("nhd, K and V apart", "layer page token head dim", separate_planes=True),
    Shape("hnd, K and V apart, a tensor a layer", "page head token dim", separate_planes=True, separate_layers=True),
]
_SIZES = {"layer": LAYERS, "page": PAGES, "plane": 2, "head": HEADS, "token": PAGE_TOKENS, "dim": DIM}


class TestCache:
    """A cache filled with poison."""

    __test__ = False

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._axes = shape.dims.split()
        size = [_SIZES[axis] for axis in self._axes]
        num_parts, num_arrays = 1 + shape.separate_planes, LAYERS if shape.separate_layers else 1
        self.parts = [[np.full(size, POISON, np.float32) for _ in range(num_arrays)] for _ in range(num_parts)]

    def describe(self) -> kvmsgr.Cache:
        parts = [part if self._shape.separate_layers else part[0] for part in self.parts]
        return kvmsgr.Cache([kvmsgr.CacheGroup.from_tensors(parts, self._shape.dims)])

    def row(self, layer: int, page: int, plane: int, head: int, token: int) -> Rows:
        array = self.parts[plane if self._shape.separate_planes else 0][layer if self._shape.separate_layers else 0]
        index = {"layer": layer, "page": page, "plane": plane, "head": head, "token": token, "dim": slice(None)}
        return array[tuple(index[axis] for axis in self._axes)]

    def put(self, request: int, layers: Sequence[int], pages: Sequence[int], start: int, stop: int) -> None:
        """Compute positions [start, stop): `pages` hold the request from position 0 on."""
        for layer, plane, head, position in itertools.product(layers, range(2), range(HEADS), range(start, stop)):
            page, token = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            self.row(layer, page, plane, head, token)[:] = tagged(request, layer, plane, head, position)

    def check(self, request: int, layers: Sequence[int], pages: Sequence[int], start: int, stop: int) -> None:
        """Positions [start, stop) hold exactly what was computed."""
        for layer, plane, head, position in itertools.product(layers, range(2), range(HEADS), range(start, stop)):
            found = self.row(layer, pages[position // PAGE_TOKENS], plane, head, position % PAGE_TOKENS)
            wanted = tagged(request, layer, plane, head, position)
            assert (found == wanted).all(), f"{layer=} {plane=} {head=} {position=}: {found} where {wanted} belongs"

    def check_untouched(self, layers: Sequence[int], pages: Sequence[int]) -> None:
        for layer, page, plane, head, token in itertools.product(
            layers, pages, range(2), range(HEADS), range(PAGE_TOKENS)
        ):
            found = self.row(layer, page, plane, head, token)
            assert (found == POISON).all(), f"{layer=} {page=} {plane=} {head=} {token=} was written: {found}"


@dataclass
class Side:
    """One messenger and its memory."""

    messenger: kvmsgr.Messenger
    cache: TestCache
    hidden: Rows

    @property
    def node(self) -> Node:
        return self.messenger._node


@dataclass
class Pair:
    """A prefiller and a decoder."""

    prefiller: Side
    decoder: Side
    _asked: AsyncIterator[kvmsgr.PrefillRequest] = field(init=False)

    def __post_init__(self) -> None:
        self._asked = self.prefiller.messenger.requests()

    def fetch(
        self, request_id: str, num_tokens: int, pages: Sequence[int], first_token: int = 0, **more: object
    ) -> kvmsgr.Fetch:
        return self.decoder.messenger.fetch(
            request_id,
            [self.prefiller.messenger.descriptor],
            list(range(num_tokens)),
            [kvmsgr.Span(0, first_token, pages)],
            **more,  # type: ignore[arg-type]  # payload, time_allowed_s
        )

    async def asked(self) -> kvmsgr.PrefillRequest:
        return await within(anext(self._asked))

    def run(self, step: kvmsgr.Step, request_number: int, pages: Sequence[int], num_bumps: int | None = None) -> None:
        """Run a forward pass of one request: each layer is computed just before it is signalled."""
        step.signal.start()
        chunk = step.chunks[0]
        for layer in range(LAYERS if num_bumps is None else min(num_bumps, LAYERS)):
            self.prefiller.cache.put(request_number, [layer], pages, chunk.start, chunk.stop)
            step.signal.bump()
        if num_bumps is None and step.signals_context:
            hidden = np.full(DIM, request_number, np.float32)
            chunk.request.context["hidden"][:] = hidden.view(np.uint8)
            step.signal.bump()
        for _ in range(LAYERS, num_bumps or 0):
            step.signal.bump()


async def within(awaitable: Awaitable[T], seconds: float = 20) -> T:
    """Await with a deadline, so that a lost wake-up fails a test and does not hang it."""
    return await asyncio.wait_for(_whole(awaitable), seconds)


async def _whole(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Let the loop go on until `condition` holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0)


async def settle(side: Side, rounds: int = 200) -> None:
    """Give the poller of `side` many rounds in which it could do what it must not."""
    poller = side.node.fabric.poller
    end = poller.stats()["rounds"] + rounds
    await until(lambda: poller.stats()["rounds"] >= end, f"{rounds} rounds of the poller")


@asynccontextmanager
async def pair(
    fabric: str, source: Shape = SHAPES[0], destination: Shape | None = None, *, context: bool = True, **more: object
) -> AsyncIterator[Pair]:
    """Two messengers; `more` are settings of both."""
    sides: list[Side] = []
    try:
        for name, shape in (("prefiller", source), ("decoder", destination or source)):
            cache, hidden = TestCache(shape), np.zeros((4, DIM), np.float32)
            config = kvmsgr.Config(name=name, model="test", fabric=fabric, **more)  # type: ignore[arg-type]
            buffers = [kvmsgr.ContextBuffer("hidden", hidden)] if context else []
            sides.append(Side(await kvmsgr.Messenger.open(config, cache.describe(), buffers), cache, hidden))
        yield Pair(*sides)
    finally:
        for side in sides:
            await within(side.messenger.close())
