"""Peers that fall silent: their requests fail within the lease, their pages come back by the fence, others go on."""

from __future__ import annotations

import asyncio

import pytest

from kvmsgr.errors import TransferError
from kvmsgr.fabric.inprocess import Air
from kvmsgr.testing.loop import simulate
from tests.simulation.world import PAGE_TOKENS, PAGES, Engine, go_live, num_pages_of, until, world

pytestmark = pytest.mark.slow
NUM_TOKENS = 10 * PAGE_TOKENS
LEASE_S = 2.0


async def fetch_all_the_time(decoder: Engine, source: Engine, stop: asyncio.Event) -> int:
    """Requests one after the other; none of them may fail. Returns their number."""
    number = 0
    while not stop.is_set():
        pages = await decoder.take(num_pages_of(NUM_TOKENS))
        fetch = decoder.fetch(f"beside {number}", number, source, NUM_TOKENS, pages)
        await fetch
        decoder.check(number, NUM_TOKENS, pages)
        await fetch.released()
        await decoder.give(pages)
        number += 1
        await asyncio.sleep(0.05)
    return number


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fence", ["endpoint", "rotation"])
def test_a_silent_prefiller_is_fenced_while_another_serves(seed: int, fence: str) -> None:
    async def scenario(air: Air) -> None:
        loop = asyncio.get_running_loop()
        async with world(air, ("p", "q"), fence=fence) as (decoder, silent, other):
            await go_live(decoder, silent)
            stop = asyncio.Event()
            beside = asyncio.ensure_future(fetch_all_the_time(decoder, other, stop))
            pages = await decoder.take(num_pages_of(NUM_TOKENS))
            silent.layer_s = 0.05
            fetch = decoder.fetch("lost", 7, silent, NUM_TOKENS, pages)
            await until(lambda: fetch.rows_landed > 0, "some rows of it")
            silent.poller.vanish()
            silenced = loop.time()
            with pytest.raises(TransferError, match="heartbeat"):
                await fetch
            assert loop.time() - silenced < LEASE_S + 0.5
            await fetch.released()
            assert loop.time() - silenced < LEASE_S + 1
            await decoder.give(pages)
            stop.set()
            assert await beside > 10
            assert decoder.num_free == PAGES

    simulate(scenario, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fence", ["endpoint", "rotation"])
def test_a_silent_decoder_gives_the_source_pages_back(seed: int, fence: str) -> None:
    async def scenario(air: Air) -> None:
        loop = asyncio.get_running_loop()
        async with world(air, fence=fence) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            pages = await decoder.take(num_pages_of(NUM_TOKENS))
            air.hold(decoder.address("p"), completes=False)
            fetch = decoder.fetch("lost", 7, prefiller, NUM_TOKENS, pages)
            await until(lambda: bool(air.flights()), "writes in the air")
            decoder.poller.vanish()
            silenced = loop.time()
            await until(lambda: prefiller.num_free == PAGES, "source pages free")
            assert LEASE_S - 0.6 < loop.time() - silenced < LEASE_S + 1, "not before the lease, and not long after"
            with pytest.raises(TransferError):
                await fetch

    simulate(scenario, seed)
