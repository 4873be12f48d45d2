"""T48: what is computed travels while the rest is computed. In simulated time; `tools/bench overlap` measures it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import kvmsgr
from kvmsgr.fabric.inprocess import Air, InProcessPoller
from kvmsgr.fabric.inprocess.driver import MOST_LOOK_S
from kvmsgr.testing.loop import simulate

LAYERS, LAYER_S, NUM_CHUNKS = 30, 0.005, 2
COMPUTE_S = NUM_CHUNKS * LAYERS * LAYER_S
TRANSFER_S = 0.6 * COMPUTE_S
PAGES, PAGE_TOKENS, HEADS, DIM = 16, 16, 2, 32
CHUNK = PAGES // NUM_CHUNKS * PAGE_TOKENS
NUM_POSITIONS = NUM_CHUNKS * CHUNK
PAGES_IN_ORDER = [(page * 5) % PAGES for page in range(PAGES)]  # no two neighbours: a write each


@dataclass
class Pair:
    prefiller: kvmsgr.Messenger
    decoder: kvmsgr.Messenger
    source: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    cache: np.ndarray[tuple[int, ...], np.dtype[np.float32]]

    @property
    def poller(self) -> InProcessPoller:
        poller = self.prefiller._node.fabric.poller
        assert isinstance(poller, InProcessPoller)
        return poller

    async def asked(self) -> tuple[kvmsgr.Fetch, kvmsgr.PrefillRequest]:
        spans = [kvmsgr.Span(0, 0, range(PAGES))]
        fetch = self.decoder.fetch("r", [self.prefiller.descriptor], range(NUM_POSITIONS + 1), spans)
        request = await anext(self.prefiller.requests())
        request.accept()
        return fetch, request

    def chunk(self, request: kvmsgr.PrefillRequest, number: int, *, ready: bool = False) -> kvmsgr.Chunk:
        spans = [kvmsgr.Span(0, 0, PAGES_IN_ORDER)]
        return kvmsgr.Chunk(request, number * CHUNK, (number + 1) * CHUNK, spans, ready)

    def compute(self, number: int, layer: int) -> None:
        """The bytes of a layer of a chunk, stored when it is computed."""
        pages = PAGES_IN_ORDER[number * PAGES // NUM_CHUNKS :][: PAGES // NUM_CHUNKS]
        self.source[layer, pages] = np.arange(LAYERS * PAGES).reshape(LAYERS, PAGES)[layer, pages][
            :, None, None, None, None
        ]


@asynccontextmanager
async def pair(air: Air) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        messengers = []
        caches = [np.full((LAYERS, PAGES, 2, HEADS, PAGE_TOKENS, DIM), -1, np.float32) for _ in range(2)]
        for name, cache in zip(("prefiller", "decoder"), caches, strict=True):
            config = kvmsgr.Config(name=name, model="test", fabric="inprocess", listen=f"unix:{folder / name}")
            group = kvmsgr.CacheGroup.from_tensors([cache], "layer page plane head token dim")
            messenger = await kvmsgr.Messenger.open(config, kvmsgr.Cache([group]))
            messengers.append(await stack.enter_async_context(messenger))
        air.bytes_per_s = caches[0].nbytes / TRANSFER_S
        yield Pair(*messengers, *caches)


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["announced when it starts", "announced ahead"])
def test_t48_chunks_travel_while_they_are_computed(num_ahead: int) -> None:
    async def scenario(air: Air) -> None:
        loop = asyncio.get_running_loop()
        async with pair(air) as both:
            both.poller.trace(2 * NUM_CHUNKS * LAYERS)
            fetch, request = await both.asked()
            announced: list[kvmsgr.Step] = []
            signalled_s: list[float] = []
            for number in range(NUM_CHUNKS):
                while len(announced) <= min(number + num_ahead, NUM_CHUNKS - 1):
                    announced.append(both.prefiller.begin_step([both.chunk(request, len(announced))]))
                announced[number].signal.start()
                for layer in range(LAYERS):
                    await asyncio.sleep(LAYER_S)
                    both.compute(number, layer)
                    posted_bytes, landed_rows = both.prefiller.stats()["posted_bytes"], fetch.rows_landed
                    signalled_s.append(loop.time())
                    announced[number].signal.bump()
            arrival = await fetch
            assert loop.time() - signalled_s[-1] < 2 * LAYER_S
            assert posted_bytes >= 0.9 * both.source.nbytes
            assert landed_rows >= 0.9 * arrival.rows  # what is posted may still wait for the wire
            np.testing.assert_array_equal(both.cache, both.source[:, PAGES_IN_ORDER])
            marks = both.poller.take_trace()
            assert [layer for _, layer, _, _ in marks] == list(range(LAYERS)) * NUM_CHUNKS
            waited_s = [posted_ns / 1e9 - at_s for (*_, posted_ns), at_s in zip(marks, signalled_s, strict=True)]
            assert min(waited_s) >= -1e-6
            assert max(waited_s) <= MOST_LOOK_S + 1e-6, "a layer waited for more than its own signal"

    simulate(scenario, 0)


def test_t48_what_is_sent_at_the_end_takes_all_its_time_then() -> None:
    """The wire is as slow as the test above says."""

    async def scenario(air: Air) -> None:
        loop = asyncio.get_running_loop()
        async with pair(air) as both:
            fetch, request = await both.asked()
            for number in range(NUM_CHUNKS):
                both.prefiller.begin_step([both.chunk(request, number, ready=True)])
            began = loop.time()
            await fetch
            assert 0.99 * TRANSFER_S < loop.time() - began < 1.1 * TRANSFER_S

    simulate(scenario, 0)
