"""T02: one write fails to post."""

from __future__ import annotations

import asyncio

import pytest

from kvmsgr.errors import TransferError
from kvmsgr.fabric.inprocess import Air
from kvmsgr.testing.loop import simulate
from tests.simulation.world import LAYERS, PAGE_TOKENS, PAGES, Engine, num_pages_of, until, world

NUM_PAGES = 8
NUM_TOKENS = NUM_PAGES * PAGE_TOKENS + 1
NUM_WRITES = NUM_PAGES * LAYERS
FIRST, MIDDLE, LAST = 1, NUM_WRITES // 2, NUM_WRITES


async def fetch_well(decoder: Engine, source: Engine, request_id: str, number: int) -> None:
    pages = await decoder.take(num_pages_of(NUM_TOKENS))
    fetch = decoder.fetch(request_id, number, source, NUM_TOKENS, pages)
    await fetch
    decoder.check(number, NUM_TOKENS, pages)
    await fetch.released()
    await decoder.give(pages)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["fail", "error"], ids=["a post fails", "a completion fails"])
@pytest.mark.parametrize("nth", [FIRST, MIDDLE, LAST, 0], ids=["first", "middle", "last", "all"])
def test_t02_one_write_fails(seed: int, kind: str, nth: int) -> None:
    async def scenario(air: Air) -> None:
        loop = asyncio.get_running_loop()
        async with world(air, ("p", "q")) as (decoder, broken, healthy):
            broken.scattered = True
            await fetch_well(decoder, broken, "before", 1)
            started = asyncio.ensure_future(fetch_well(decoder, healthy, "beside", 2))
            if nth:
                broken.poller.inject(kind, nth)
            else:
                broken.poller.disturb(seed, fail=1.0)
            pages = await decoder.take(NUM_PAGES)
            began = loop.time()
            fetch = decoder.fetch("broken", 3, broken, NUM_TOKENS, pages)
            ready = True
            try:
                await fetch
            except TransferError as error:
                ready = False
                text = str(error)
                assert "inprocess" in text
                assert "Input/output error" in text
                assert "p" in text
            assert not ready or kind == "error", "a count that is short is never ready"
            assert loop.time() - began < 1, "not by the deadline"
            if ready:
                decoder.check(3, NUM_TOKENS, pages)
            await fetch.released()
            assert loop.time() - began < 3
            await decoder.give(pages)
            await started

            broken.poller.disturb(0)
            await fetch_well(decoder, broken, "after", 4)
            await until(lambda: broken.num_free == PAGES, "source pages free")

    simulate(scenario, seed)
