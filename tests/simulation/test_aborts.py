"""T01 and T29: pages and counts of requests that ended while their writes were in the air."""

from __future__ import annotations

import asyncio

import pytest

from kvmsgr.errors import EngineFailedError, LayoutError, RefusedError, RequestCancelledError
from kvmsgr.fabric.inprocess import Air
from kvmsgr.testing.loop import simulate
from tests.simulation.world import PAGE_TOKENS, PAGES, go_live, num_pages_of, until, world

SEEDS = range(8)
CANARY = 7.5
TOKENS_A, TOKENS_B = 32 * PAGE_TOKENS + 1, 40 * PAGE_TOKENS + 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("completes", [True, False], ids=["complete early", "complete late"])
def test_t01_abort_while_writes_are_in_the_air(seed: int, completes: bool) -> None:
    async def scenario(air: Air) -> None:
        loop = asyncio.get_running_loop()
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            where = decoder.address("p")
            air.hold(where, completes=completes)
            prefiller.layer_s = 0.15 if seed % 2 else 0.002  # it is cancelled in the middle, or when all is posted
            began = loop.time()
            loop.call_later(0.5, air.release, where)
            pages_a = await decoder.take(32)
            a = decoder.fetch("a", 2, prefiller, TOKENS_A, pages_a)
            await asyncio.sleep(0.1)
            assert air.flights(where), "writes of A are held"
            a.cancel()
            with pytest.raises(RequestCancelledError):
                await a
            with pytest.raises(LayoutError, match="may still be written to"):
                decoder.fetch("b", 3, prefiller, TOKENS_B, range(PAGES - 40, PAGES))

            admitted = asyncio.ensure_future(decoder.take(40))
            await asyncio.sleep(0.3)
            assert not admitted.done(), "only 32 pages are free"
            assert a.quarantine
            await a.released()
            assert loop.time() - began >= 0.5, "no proof before the writes were let go"
            assert not air.flights(where)
            await decoder.give(pages_a)
            pages_b = await admitted
            decoder.cache[:, pages_b] = CANARY
            await asyncio.sleep(1)
            assert (decoder.cache[:, pages_b] == CANARY).all()
            b = decoder.fetch("b", 3, prefiller, TOKENS_B, pages_b)
            await b
            decoder.check(3, TOKENS_B, pages_b)
            await b.released()
            await decoder.give(pages_b)
            assert decoder.num_free == PAGES
            assert decoder.poller.stats()["strays"] == 0
            await until(lambda: prefiller.num_free == PAGES, "source pages free")

    simulate(scenario, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fence", ["endpoint", "rotation"])
def test_t01_writes_that_are_never_let_go_are_fenced(seed: int, fence: str) -> None:
    async def scenario(air: Air) -> None:
        async with world(air, fence=fence) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            where = decoder.address("p")
            air.hold(where)
            pages = await decoder.take(32)
            a = decoder.fetch("a", 2, prefiller, TOKENS_A, pages)
            await until(lambda: bool(air.flights(where)), "writes of A are held")
            began = asyncio.get_running_loop().time()
            a.cancel()
            await a.released()
            assert asyncio.get_running_loop().time() - began < 2.5, "the lease, and no more"
            await decoder.give(pages)
            assert not air.flights()
            again = await decoder.take(40)
            b = decoder.fetch("b", 3, prefiller, TOKENS_B, again)
            await b
            decoder.check(3, TOKENS_B, again)
            await b.released()
            await decoder.give(again)
            await until(lambda: prefiller.num_free == PAGES, "source pages free")

    simulate(scenario, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_t29_a_retry_elsewhere_counts_only_its_own(seed: int) -> None:
    """The writes of the first attempt are held, and come while the second is under way."""

    async def scenario(air: Air) -> None:
        num_tokens = 10 * PAGE_TOKENS
        async with world(air, ("p", "q")) as (decoder, first, second):
            await go_live(decoder, first)
            first.chunk, second.layer_s = 8, 0.05
            first.on_step = lambda request: request.fail("out of memory")
            where = decoder.address("p")
            air.hold(where)
            pages = await decoder.take(num_pages_of(num_tokens))
            one = decoder.fetch("x", 2, first, num_tokens, pages)
            with pytest.raises(EngineFailedError, match="out of memory"):
                await one
            assert air.flights(where)

            with pytest.raises(LayoutError, match="may still be written to"):
                decoder.fetch("x", 3, second, num_tokens, pages)
            others = await decoder.take(num_pages_of(num_tokens))
            two = decoder.fetch("x", 3, second, num_tokens, others)
            with pytest.raises(RefusedError, match="being fetched already"):
                decoder.fetch("x", 4, first, 3, [PAGES - 1])
            await until(lambda: two.rows_landed > 0, "rows of the second attempt")
            air.release(where)
            arrival = await two
            assert arrival.rows == (num_tokens - 1) * 12
            decoder.check(3, num_tokens, others)
            for fetch, taken in ((one, pages), (two, others)):
                await fetch.released()
                await decoder.give(taken)
            assert decoder.num_free == PAGES
            assert decoder.poller.stats()["strays"] == 0

    simulate(scenario, seed, any_order=True)
