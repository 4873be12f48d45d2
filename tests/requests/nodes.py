"""A prefiller and a decoder, over any fabric; every row in their caches tells its request and position."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import kvmsgr
from kvmsgr.fabric.libfabric import providers
from kvmsgr.runtime.node import Node
from kvmsgr.testing.loop import simulate

LAYERS, HEADS, DIM = 3, 2, 4
ROWS_A_POSITION = LAYERS * HEADS * 2
POISON = -1.0
NET = next(name for name in ("tcp", "net") if name in providers())
FABRICS = ["inprocess", NET, "shm"]
AXES = {
    "hnd": "layer page plane head token dim",
    "nhd": "layer page plane token head dim",
    "nhd, tokens outside": "layer page token plane head dim",
}
T = TypeVar("T")


def tagged(tag: int, layers: Sequence[int], positions: np.ndarray) -> np.ndarray:
    """Rows, shape (layer, position, plane, head, dim): no two of a test are alike."""
    base = np.asarray(layers)[:, None] + tag * LAYERS
    base = base * 256 + np.asarray(positions)[None]
    rows = base[:, :, None] * 2 + np.arange(2)
    rows = rows[..., None] * HEADS + np.arange(HEADS)
    return (rows[..., None] + np.arange(DIM) / 8).astype(np.float32)


class Kv:
    """A cache by what it means, whatever its order in memory, and a picture of what it should hold."""

    def __init__(self, num_pages: int, page_tokens: int, axes: str) -> None:
        sizes = {"layer": LAYERS, "page": num_pages, "plane": 2, "head": HEADS, "token": page_tokens, "dim": DIM}
        self.dims, order = AXES[axes], AXES[axes].split()
        self.memory = np.full([sizes[axis] for axis in order], POISON, np.float32)
        wanted = [order.index(axis) for axis in ("layer", "page", "token", "plane", "head", "dim")]
        self.rows = self.memory.transpose(wanted)
        self.wanted = self.rows.copy()
        self.page_tokens = page_tokens

    def reset(self) -> None:
        self.rows[:] = self.wanted[:] = POISON

    def put(self, tag: int, pages: Sequence[int], start: int, stop: int, layers: Sequence[int] = range(LAYERS)) -> None:
        """Compute positions of a request whose `pages` begin at position 0."""
        self._write(self.rows, tag, pages, start, stop, layers)

    def want(self, tag: int, pages: Sequence[int], start: int, stop: int) -> None:
        """These positions should be here."""
        self._write(self.wanted, tag, pages, start, stop, range(LAYERS))

    def check(self) -> None:
        """Every byte is as it should be."""
        wrong = np.argwhere((self.rows != self.wanted).any((3, 4, 5)))
        assert not len(wrong), f"{len(wrong)} wrong places (layer, page, token), first {wrong[0].tolist()}"

    def _write(
        self, rows: np.ndarray, tag: int, pages: Sequence[int], start: int, stop: int, layers: Sequence[int]
    ) -> None:
        positions = np.arange(start, stop)
        where = np.asarray(pages, np.int64)[positions // self.page_tokens], positions % self.page_tokens
        for layer, values in zip(layers, tagged(tag, layers, positions), strict=True):
            rows[layer][where] = values


@dataclass
class Side:
    """One messenger and its memory."""

    messenger: kvmsgr.Messenger
    kv: Kv
    hidden: np.ndarray

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
        self, name: str, num_tokens: int, pages: Sequence[int], first_token: int = 0, **more: object
    ) -> kvmsgr.Fetch:
        return self.decoder.messenger.fetch(
            name,
            [self.prefiller.messenger.descriptor],
            list(range(num_tokens)),
            [kvmsgr.Span(0, first_token, pages)],
            **more,  # type: ignore[arg-type]  # context, payload, time_allowed_s
        )

    async def connected(self) -> None:
        """Each side has heard the other: its poller may be held from now on, and what is posted to it is on its way."""
        sides = self.prefiller.messenger, self.decoder.messenger
        await until(lambda: all(side.stats()["beats_heard"] for side in sides), "a heartbeat of each")

    async def asked(self) -> kvmsgr.PrefillRequest:
        return await within(anext(self._asked))

    async def accepted(self) -> kvmsgr.PrefillRequest:
        request = await self.asked()
        request.accept()
        return request

    def begin(self, *chunks: kvmsgr.Chunk) -> kvmsgr.Step:
        return self.prefiller.messenger.begin_step(chunks)

    def forward(self, step: kvmsgr.Step, tag: int, pages: Sequence[int], layers: Sequence[int] = range(LAYERS)) -> None:
        """Run layers of a step of one request: each is computed just before it is signalled."""
        if layers and layers[0] == 0:
            step.signal.start()
        for layer in layers:
            for chunk in step.chunks:
                self.prefiller.kv.put(tag, pages, chunk.start, chunk.stop, [layer])
            step.signal.bump()


async def within(awaitable: Awaitable[T], seconds: float = 20) -> T:
    """Await with a deadline, so that a lost wake-up fails a test and does not hang it."""

    async def whole() -> T:
        return await awaitable

    return await asyncio.wait_for(whole(), seconds)


async def until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Let time pass until it holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.0005)


@asynccontextmanager
async def pair(
    fabric: str,
    *,
    num_pages: int = 24,
    page_tokens: tuple[int, int] = (4, 4),
    axes: tuple[str, str] = ("hnd", "hnd"),
    num_context_slots: int = 0,
    **more: object,
) -> AsyncIterator[Pair]:
    """Two messengers; of pairs the prefiller's comes first. `more` are settings of both."""
    sides: list[Side] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, tokens, order in zip(("p", "d"), page_tokens, axes, strict=True):
                kv = Kv(num_pages, tokens, order)
                hidden = np.full((max(num_context_slots, 1), DIM), POISON, np.float32)
                group = kvmsgr.CacheGroup.from_tensors([kv.memory], kv.dims)
                buffers = [kvmsgr.ContextBuffer("hidden", hidden)] if num_context_slots else []
                config = kvmsgr.Config(
                    name=name, model="test", fabric=fabric, listen=f"unix:{Path(folder) / name}", **more,  # type: ignore[arg-type]
                )  # fmt: skip
                sides.append(Side(await kvmsgr.Messenger.open(config, kvmsgr.Cache([group]), buffers), kv, hidden))
            yield Pair(*sides)
        finally:
            for side in sides:
                await within(side.messenger.close())


def run(
    fabric: str, scenario: Callable[[], Coroutine[Any, Any, None]], seed: int = 0, *, any_order: bool = False
) -> None:
    """A scenario over a fabric; in process in a time of its own, where writes may land in `any_order`."""
    if fabric == "inprocess":
        simulate(lambda air: scenario(), seed, any_order=any_order)
    else:
        asyncio.run(scenario())
