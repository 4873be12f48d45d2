"""T03: the decoder holds the first k pages of a prompt of 10, the prefiller the first j, for every k and j."""

from __future__ import annotations

import asyncio
import itertools
from random import Random

import pytest

import kvmsgr
from kvmsgr import Chunk, Span
from kvmsgr.errors import LayoutError

from .nodes import DIM, FABRICS, LAYERS, ROWS_A_POSITION, Pair, pair, run, within

PAGES, PAGE_TOKENS = 10, 4
NUM_POSITIONS = PAGES * PAGE_TOKENS
TAG, HELD = 1, 2  # of the prompt, and of what the decoder computed itself: the same values, told apart


def decoder_holds(both: Pair, pages: list[int], k: int) -> None:
    """The first k pages are there; the rest is to come."""
    kv, start = both.decoder.kv, k * PAGE_TOKENS
    kv.reset()
    kv.put(HELD, pages, 0, start)
    kv.want(HELD, pages, 0, start)
    kv.want(TAG, pages, start, NUM_POSITIONS)


async def some_rounds(rng: Random) -> None:
    """Let the poller see what was done so far, or not."""
    for _ in range(rng.choice((0, 1, 3, 20))):
        await asyncio.sleep(0)


async def check_arrival(both: Pair, fetch: kvmsgr.Fetch, k: int) -> None:
    arrival = await within(fetch)
    await within(fetch.released())
    assert (arrival.num_tokens, arrival.rows) == (NUM_POSITIONS, (PAGES - k) * PAGE_TOKENS * ROWS_A_POSITION)
    both.decoder.kv.check()


async def check_released(request: kvmsgr.PrefillRequest, k: int) -> None:
    assert await within(request.released()) == (PAGES - k) * PAGE_TOKENS * ROWS_A_POSITION
    assert (await within(request.outcome())).ok


def announce(both: Pair, request: kvmsgr.PrefillRequest, spans: list[Span], *, cached: object, j: int) -> None:
    """The pages that the prefiller has, and a forward pass for the others."""
    held = j * PAGE_TOKENS
    if held:
        both.begin(Chunk(request, 0, held, spans, ready=cached))  # type: ignore[arg-type]  # True or a step
    if held < NUM_POSITIONS:
        both.forward(both.begin(Chunk(request, held, NUM_POSITIONS, spans)), TAG, list(spans[0].pages))


def scattered(rng: Random) -> tuple[list[int], list[int]]:
    """Source and destination pages of which no two can be merged: their order is another one on each side."""
    pages = rng.sample(range(PAGES), PAGES)
    return [2 * page for page in pages], [2 * page + 1 for page in sorted(pages)]


@pytest.mark.slow
@pytest.mark.parametrize("fabric", FABRICS)
def test_t03_the_prefiller_has_them_in_its_cache(fabric: str) -> None:
    async def scenario() -> None:
        rng = Random(fabric)
        async with pair(fabric) as both:
            for k, j in itertools.product(range(PAGES + 1), range(PAGES + 1)):
                src, dst = scattered(rng)
                decoder_holds(both, dst, k)
                both.prefiller.kv.reset()
                both.prefiller.kv.put(TAG, src, 0, j * PAGE_TOKENS)
                before = both.prefiller.messenger.stats()["posted_writes"]
                fetch = both.fetch(f"{k=} {j=}", NUM_POSITIONS + 1, dst[k:], k * PAGE_TOKENS)
                request = await both.accepted()
                announce(both, request, [Span(0, 0, src)], cached=True, j=j)
                await check_arrival(both, fetch, k)
                await check_released(request, k)
                assert both.prefiller.messenger.stats()["posted_writes"] - before == LAYERS * (PAGES - k)

    run(fabric, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", FABRICS)
def test_t03_another_request_is_computing_them(fabric: str) -> None:
    """The prefiller's first j pages are computed by a step of another prompt, which has begun or not, or is over: it is
    when that prompt's next step has begun."""

    async def scenario() -> None:
        rng = Random(fabric)
        async with pair(fabric, num_pages=36) as both:
            for k, j in itertools.product(range(PAGES + 1), range(1, PAGES + 1)):
                src, dst = scattered(rng)
                others, held, end = rng.sample(range(2 * PAGES, 36), j + 1), j * PAGE_TOKENS, j * PAGE_TOKENS + 3
                decoder_holds(both, dst, k)
                both.decoder.kv.want(TAG, others, 0, end)
                both.prefiller.kv.reset()
                other = both.fetch(f"other {k=} {j=}", end + 1, others)
                owner = await both.accepted()
                fetch = both.fetch(f"{k=} {j=}", NUM_POSITIONS + 1, dst[k:], k * PAGE_TOKENS)
                request = await both.accepted()
                spans, other_pages = [Span(0, 0, src)], [*src[:j], 35]
                step = both.begin(Chunk(owner, 0, held, [Span(0, 0, src[:j])]))
                when = rng.randint(0, LAYERS + 1)  # bumps; the last stands for the next step
                both.forward(step, TAG, src, range(min(when, LAYERS)))
                if when > LAYERS:
                    both.forward(both.begin(Chunk(owner, held, end, [Span(0, held, [35])])), TAG, other_pages)
                await some_rounds(rng)
                joining = both.begin(Chunk(request, 0, held, spans, ready=step))
                assert not joining.moves
                await some_rounds(rng)
                both.forward(step, TAG, src, range(when, LAYERS))
                if when <= LAYERS:
                    both.forward(both.begin(Chunk(owner, held, end, [Span(0, held, [35])])), TAG, other_pages)
                if j < PAGES:
                    both.forward(both.begin(Chunk(request, held, NUM_POSITIONS, spans)), TAG, src)
                await within(other)
                await within(other.released())
                await check_arrival(both, fetch, k)
                await check_released(request, k)
                assert (await within(owner.outcome())).ok

    run(fabric, scenario)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("cached", [PAGES * PAGE_TOKENS - 1, 0], ids=["prefix cached", "nothing cached"])
def test_t03_a_full_hit_that_wants_context(fabric: str, cached: int) -> None:
    """Nothing but its context moves. The prefiller computes the last position alone, or all of them."""

    async def scenario() -> None:
        src, dst = list(range(PAGES)), list(range(PAGES, 2 * PAGES))
        async with pair(fabric, num_context_slots=2) as both:
            decoder_holds(both, dst, PAGES)
            both.prefiller.kv.put(TAG, src, 0, cached)
            fetch = both.fetch("full hit", NUM_POSITIONS + 1, [], NUM_POSITIONS)
            request = await both.accepted()
            if cached:
                both.begin(Chunk(request, 0, cached, [], ready=True))
            step = both.begin(Chunk(request, cached, NUM_POSITIONS, []))
            both.forward(step, TAG, src)
            assert step.signals_context
            request.context["hidden"].view("f4")[:] = 7
            step.signal.bump()
            arrival = await within(fetch)
            assert (arrival.num_tokens, arrival.rows) == (NUM_POSITIONS, 1)
            assert arrival.context["hidden"].view("f4").tolist() == [7] * DIM
            arrival.release()
            assert await within(request.released()) == 1
            assert (await within(request.outcome())).ok
            await within(fetch.released())
            both.decoder.kv.check()

    run(fabric, scenario)


@pytest.mark.parametrize("fabric", FABRICS)
def test_t03_a_full_hit_without_context_is_ready_at_once(fabric: str) -> None:
    """No prefiller need be there for it, and one that is gets its release."""

    async def scenario() -> None:
        async with pair(fabric, num_context_slots=1) as both:
            for number in range(4):  # more than there are context slots
                fetch = both.fetch(f"hit {number}", NUM_POSITIONS + 1, [], NUM_POSITIONS, context=False)
                assert fetch.done, "before anything was sent"
                arrival = await within(fetch)
                assert (arrival.num_tokens, arrival.rows, dict(arrival.contexts)) == (NUM_POSITIONS, 0, {})
            for _ in range(4):
                request = await both.asked()
                request.accept()
                both.begin(Chunk(request, 0, NUM_POSITIONS, [Span(0, 0, range(PAGES))], ready=True))
                assert not request.wants_context
                assert await within(request.released()) == 0
                assert (await within(request.outcome())).ok
            both.decoder.kv.check()

    run(fabric, scenario)


@pytest.mark.parametrize("fabric", FABRICS)
def test_t03_two_requests_share_the_pages_that_are_there(fabric: str) -> None:
    """Pages before the first position that is asked for are nobody's destination."""
    k = 6
    shared, own = list(range(k)), [[10, 11, 12, 13], [14, 15, 16, 17]]
    src = [list(range(PAGES)), [*range(k), 10, 11, 12, 13]]

    async def scenario() -> None:
        async with pair(fabric) as both:
            kv = both.decoder.kv
            kv.put(HELD, shared, 0, k * PAGE_TOKENS)
            kv.want(HELD, shared, 0, k * PAGE_TOKENS)
            fetches = [
                both.fetch(f"fetch {tag}", NUM_POSITIONS + 1, pages, k * PAGE_TOKENS)
                for tag, pages in enumerate(own, 3)
            ]
            with pytest.raises(LayoutError, match="page 10 may still be written to"):
                both.fetch("a page too many", NUM_POSITIONS + 1, [10, 18, 19, 20], k * PAGE_TOKENS)
            requests = [await both.accepted() for _ in own]
            step = both.begin(
                *(Chunk(request, 0, NUM_POSITIONS, [Span(0, 0, src[n])]) for n, request in enumerate(requests))
            )
            step.signal.start()
            for layer in range(LAYERS):
                for n, tag in enumerate((3, 4)):
                    both.prefiller.kv.put(tag, src[n], k * PAGE_TOKENS, NUM_POSITIONS, [layer])
                step.signal.bump()
            for tag, pages, fetch in zip((3, 4), own, fetches, strict=True):
                arrival = await within(fetch)
                assert arrival.rows == (PAGES - k) * PAGE_TOKENS * ROWS_A_POSITION
                kv.want(tag, [*shared, *pages], k * PAGE_TOKENS, NUM_POSITIONS)
            kv.check()

    run(fabric, scenario)
