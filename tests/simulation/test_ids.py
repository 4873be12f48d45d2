"""T10: ids wrap while requests are cancelled and their writes come late."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvmsgr.errors import BusyError, RequestCancelledError
from kvmsgr.fabric.inprocess import Air
from kvmsgr.testing.loop import simulate
from tests.simulation.world import PAGE_TOKENS, PAGES, Engine, go_live, num_pages_of, until, world

NUM_SLOTS = 16  # x 16 generations: the 8 bits of an id that come round


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "num_requests", "fence"),
    [(1, 1000, "endpoint"), (2, 200, "endpoint"), (3, 200, "rotation"), (4, 200, "rotation")],
)
def test_t10_ids_wrap_with_aborts(seed: int, num_requests: int, fence: str) -> None:
    async def scenario(air: Air) -> None:
        rng = Random(seed)
        async with world(air, ("p", "q", "r"), fence=fence) as (decoder, *sources):
            for source in sources:
                await go_live(decoder, source)
            free = decoder.node.slots._free
            while len(free) > NUM_SLOTS:
                free.pop()
            busy = 0

            async def one(number: int) -> str:
                nonlocal busy
                num_tokens = rng.randint(1, 5 * PAGE_TOKENS)
                pages = await decoder.take(num_pages_of(num_tokens))
                while True:
                    try:
                        fetch = decoder.fetch(f"r{number}", number, rng.choice(sources), num_tokens, pages)
                        break
                    except BusyError:
                        busy += 1
                        await asyncio.sleep(0.01)
                if rng.random() < 0.1:
                    asyncio.get_running_loop().call_later(rng.random() * 0.02, fetch.cancel)
                try:
                    await fetch
                    decoder.check(number, num_tokens, pages)
                    outcome = "ready"
                except RequestCancelledError:
                    outcome = "cancelled"
                await fetch.released()
                await decoder.give(pages)
                return outcome

            holding = asyncio.ensure_future(hold_now_and_then(air, decoder, rng))
            outcomes = await asyncio.gather(*(one(number) for number in range(num_requests)))
            holding.cancel()
            assert outcomes.count("ready") > num_requests / 2
            assert outcomes.count("cancelled") > 0
            assert busy > 0, "ids ran out now and then"
            assert decoder.poller.stats()["strays"] == 0
            assert decoder.num_free == PAGES
            await until(lambda: all(source.num_free == PAGES for source in sources), "source pages free")

    simulate(scenario, seed, any_order=True)


async def hold_now_and_then(air: Air, decoder: Engine, rng: Random) -> None:
    """Writes of one peer at a time come late, also those of requests that were cancelled meanwhile."""
    while True:
        await asyncio.sleep(rng.random() * 0.05)
        names = [peer.name for peer in decoder.node.peers if peer.link is not None and peer.name in "pqr"]
        if names:
            where = decoder.address(rng.choice(names))
            air.hold(where, completes=rng.random() < 0.5)
            await asyncio.sleep(rng.random() * 0.1)
            air.release(where)
