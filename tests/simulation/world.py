"""Engines around messengers of one process: they own pages, compute layers, and check every byte that arrives."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import numpy as np

import kvmsgr
from kvmsgr.fabric.inprocess import Air, InProcessPoller
from kvmsgr.runtime.node import Node

LAYERS, PAGES, HEADS, PAGE_TOKENS, DIM = 3, 64, 2, 4, 4
ROWS_A_POSITION = LAYERS * HEADS * 2
POISON = -1.0
LAYER_S = 0.002


def tagged(number: int, layer: int, position: int) -> np.ndarray:
    """Both planes and all heads of a token: no two positions, layers and requests are alike."""
    base = ((number % 512) * LAYERS + layer) * 256 + position
    return base + np.arange(2 * HEADS * DIM, dtype=np.float32).reshape(2, HEADS, DIM) / 16


def num_pages_of(num_tokens: int) -> int:
    return -(-(num_tokens - 1) // PAGE_TOKENS)


class Engine:
    """One messenger, its cache and its free pages. `chunk` is the length of a chunk of prefill;
    what is `scattered` lies in pages that cannot be merged."""

    def __init__(self, messenger: kvmsgr.Messenger, cache: np.ndarray, rng: Random) -> None:
        self.messenger = messenger
        self.cache = cache
        self.rng = rng
        self.chunk = 1 << 30
        self.layer_s = LAYER_S
        self.scattered = False
        self.on_step: Callable[[kvmsgr.PrefillRequest], None] = lambda request: None
        self._free = list(range(PAGES))
        self._changed = asyncio.Condition()
        self._forward = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def node(self) -> Node:
        return self.messenger._node

    @property
    def poller(self) -> InProcessPoller:
        assert isinstance(self.node.fabric.poller, InProcessPoller)
        return self.node.fabric.poller

    @property
    def num_free(self) -> int:
        return len(self._free)

    def address(self, peer_name: str) -> bytes:
        """Where that peer writes to here."""
        links = [link for link, peer in self.node._links.items() if peer.name == peer_name]
        return self.poller.link_address(links[-1])

    # Pages

    async def take(self, num: int) -> list[int]:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free) >= num)
            taken, self._free = self._free[:num], self._free[num:]
        self.cache[:, taken] = POISON
        return taken

    async def give(self, pages: Sequence[int]) -> None:
        """They are somebody else's from now on."""
        assert not set(pages) & set(self._free), "pages came back twice"
        self.cache[:, list(pages)] = POISON
        async with self._changed:
            self._free += pages
            self._changed.notify_all()

    # Prefill

    def start_serving(self) -> None:
        self._spawn(self._serve())

    async def _serve(self) -> None:
        async for request in self.messenger.requests():
            self._spawn(self._prefill(request))

    async def _prefill(self, request: kvmsgr.PrefillRequest) -> None:
        pages = await self.take(num_pages_of(request.num_tokens))
        self.rng.shuffle(pages)
        if self.scattered:
            pages.sort(reverse=True)
        request.accept()
        spans = [kvmsgr.Span(0, 0, pages)]
        number = int(request.payload)
        start = 0
        while start < request.num_positions and not request.ended:
            stop = min(start + self.chunk, request.num_positions)
            async with self._forward:
                await self._compute(request, number, start, stop, spans, pages)
            self.on_step(request)
            start, spans = stop, []
        await request.released()
        await self.give(pages)

    async def _compute(
        self,
        request: kvmsgr.PrefillRequest,
        number: int,
        start: int,
        stop: int,
        spans: list[kvmsgr.Span],
        pages: Sequence[int],
    ) -> None:
        step = self.messenger.begin_step([kvmsgr.Chunk(request, start, stop, spans)])
        step.signal.start()
        for layer in range(LAYERS):
            for position in range(start, stop):
                page, token = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                self.cache[layer, page, :, :, token] = tagged(number, layer, position)
            step.signal.bump()
            await asyncio.sleep(self.layer_s * self.rng.random())

    # Decode

    def fetch(
        self, request_id: str, number: int, source: Engine, num_tokens: int, pages: Sequence[int], **more: float
    ) -> kvmsgr.Fetch:
        return self.messenger.fetch(
            request_id,
            [source.messenger.descriptor],
            range(num_tokens),
            [kvmsgr.Span(0, 0, pages)],
            payload=str(number).encode(),
            **more,
        )

    def check(self, number: int, num_tokens: int, pages: Sequence[int]) -> None:
        """Every byte that was asked for is there, and no other page is touched."""
        for layer, position in itertools.product(range(LAYERS), range(num_tokens - 1)):
            found = self.cache[layer, pages[position // PAGE_TOKENS], :, :, position % PAGE_TOKENS]
            assert (found == tagged(number, layer, position)).all(), f"{number=} {layer=} {position=}: {found}"

    def check_free_pages(self) -> None:
        """Nothing was written into pages that are nobody's."""
        assert (self.cache[:, self._free] == POISON).all()

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]  # a coroutine
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await self.messenger.close()
        for task in list(self._tasks):
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        wrong = [error for error in ended if isinstance(error, Exception)]
        assert not wrong, wrong


@asynccontextmanager
async def world(air: Air, prefillers: Sequence[str] = ("p",), **more: object) -> AsyncIterator[list[Engine]]:
    """A decoder and some prefillers, which serve; the decoder comes first. `more` are settings of all."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines: list[Engine] = []
        for name in ("d", *prefillers):
            cache = np.full((LAYERS, PAGES, 2, HEADS, PAGE_TOKENS, DIM), POISON, np.float32)
            groups = [kvmsgr.CacheGroup.from_tensors([cache], "layer page plane head token dim")]
            config = kvmsgr.Config(
                name=name, model="test", fabric="inprocess", listen=f"unix:{folder / name}", **more  # type: ignore[arg-type]
            )  # fmt: skip
            messenger = await kvmsgr.Messenger.open(config, kvmsgr.Cache(groups))
            engines.append(Engine(messenger, cache, Random(f"{air.seed}/{name}")))
            stack.push_async_callback(engines[-1].close)
        for engine in engines[1:]:
            engine.start_serving()
        yield engines
        for engine in engines:
            engine.check_free_pages()
    assert len(air) == 0, "endpoints were left open"


async def go_live(decoder: Engine, source: Engine) -> None:
    """One request that goes well, so that the peers know each other."""
    pages = await decoder.take(1)
    fetch = decoder.fetch("first", 1, source, 3, pages)
    await fetch
    decoder.check(1, 3, pages)
    await fetch.released()
    await decoder.give(pages)


async def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Let time pass until it holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.0005)
