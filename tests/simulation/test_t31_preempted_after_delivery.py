"""T31: the decoder's engine preempts, or keeps waiting, a request that has arrived: it is not moved a second time."""

from __future__ import annotations

import asyncio

import pytest

from kvmsgr.errors import LayoutError
from kvmsgr.fabric.inprocess import Air
from kvmsgr.testing.loop import simulate

from .world import PAGE_TOKENS, PAGES, go_live, num_pages_of, until, world

WAIT_S = 10.0
LENGTHS = [1, 2, PAGE_TOKENS, PAGE_TOKENS + 1, 10 * PAGE_TOKENS + 1]


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("fence", ["endpoint", "rotation"])
def test_t31_a_delivered_request_waits_for_room_and_is_admitted_again(num_tokens: int, fence: str) -> None:
    async def scenario(air: Air) -> None:
        async with world(air, fence=fence) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            await until(lambda: prefiller.num_free == PAGES, "the first one is over")
            loop, pages = asyncio.get_running_loop(), await decoder.take(num_pages_of(num_tokens))
            fetch = decoder.fetch("r", 7, prefiller, num_tokens, pages, time_allowed_s=WAIT_S / 2)
            arrival = await fetch
            posted = prefiller.poller.stats()["posted_rows"]
            for _ in range(3):  # admitted, preempted by its engine, waiting, admitted again
                await asyncio.sleep(WAIT_S)
                before_s = loop.time()
                assert await fetch is arrival
                assert loop.time() == before_s, "it was waited for a second time"
                decoder.check(7, num_tokens, pages)
            assert prefiller.poller.stats()["posted_rows"] == posted
            assert (fetch.num_restarts, fetch.quarantine) == (0, None)
            await fetch.released()
            assert not set(pages) & set(decoder._free), "the messenger gave its engine's pages to somebody"

            fetch.cancel()  # it is dropped in this state
            fetch.cancel()
            assert await fetch is arrival
            await fetch.released()
            await decoder.give(pages)
            assert decoder.num_free == PAGES
            assert decoder.node.slots.num_held == 1, "the heartbeats have one"
            assert decoder.node.outbox._numbers._held == set()
            await until(lambda: prefiller.num_free == PAGES, "source pages free")

    simulate(scenario, 0)


def test_t31_a_one_token_prompt_holds_nothing_while_it_waits() -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            fetch = decoder.fetch("r", 7, prefiller, 1, [])
            arrival = await fetch
            assert (arrival.num_tokens, arrival.rows) == (0, 0)
            await fetch.released()
            await asyncio.sleep(WAIT_S)
            assert await fetch is arrival
            assert not decoder.node.outbox.attempts
            assert not prefiller.node.inbox.by_tag

    simulate(scenario, 0)


def test_t31_its_pages_are_the_engines_the_moment_it_arrives() -> None:
    """Not a moment before: until then nobody else may have them."""

    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            pages = await decoder.take(2)
            first = decoder.fetch("r", 7, prefiller, 2 * PAGE_TOKENS + 1, pages)
            with pytest.raises(LayoutError, match="may still be written to"):
                decoder.fetch("s", 8, prefiller, 2 * PAGE_TOKENS + 1, pages)
            await first
            second = decoder.fetch("s", 8, prefiller, 2 * PAGE_TOKENS + 1, pages)
            await second
            decoder.check(8, 2 * PAGE_TOKENS + 1, pages)

    simulate(scenario, 0)
