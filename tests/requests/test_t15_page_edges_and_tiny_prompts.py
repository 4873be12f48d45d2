"""T15: prompts around the page size, chunks that end inside pages, a destination page too many."""

from __future__ import annotations

from random import Random

import pytest

from kvmsgr import Chunk, Span

from .nodes import FABRICS, ROWS_A_POSITION, Pair, pair, run, until, within

PAGE = 8
PROMPTS = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1]
CHUNKS = [1, PAGE // 2, PAGE, PAGE * 3 // 2]
SHAPES = [
    ((PAGE, PAGE), ("hnd", "hnd")),
    ((PAGE, PAGE), ("nhd", "hnd")),
    ((PAGE // 2, PAGE), ("hnd", "nhd, tokens outside")),
    ((PAGE, PAGE // 2), ("nhd", "nhd")),
]


async def prefill(both: Pair, rng: Random, num_tokens: int, chunk: int, name: str) -> None:
    """One request, chunk by chunk. Units that a chunk makes final arrive then, and no others."""
    src_tokens, dst_tokens = both.prefiller.kv.page_tokens, both.decoder.kv.page_tokens
    unit, num_positions = min(src_tokens, dst_tokens), num_tokens - 1
    both.prefiller.kv.reset()
    both.decoder.kv.reset()
    src = rng.sample(range(16), -(-num_positions // src_tokens))
    dst = rng.sample(range(16), -(-num_positions // dst_tokens) + 1)
    fetch = both.fetch(name, num_tokens, dst)
    request = await both.accepted()
    assert request.num_positions == num_positions
    for start in range(0, num_positions, chunk):
        stop = min(start + chunk, num_positions)
        pages = src[start // src_tokens : -(-stop // src_tokens)]
        step = both.begin(Chunk(request, start, stop, [Span(0, start, pages)]))
        both.forward(step, 1, src)
        final = stop if stop == num_positions else stop // unit * unit
        both.decoder.kv.want(1, dst, 0, final)
        await until(lambda rows=final * ROWS_A_POSITION: fetch.rows_landed == rows, f"positions up to {final}")  # type: ignore[misc]  # bound at once
        assert stop == num_positions or not fetch.done
        both.decoder.kv.check()
    arrival = await within(fetch)
    await within(fetch.released())
    assert (arrival.num_tokens, arrival.rows) == (num_positions, num_positions * ROWS_A_POSITION)
    assert await within(request.released()) == arrival.rows
    assert (await within(request.outcome())).ok
    both.decoder.kv.check()


@pytest.mark.slow
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_t15_each_page_goes_when_it_is_final(fabric: str, shape: tuple[tuple[int, int], tuple[str, str]]) -> None:
    async def scenario() -> None:
        rng = Random(f"{fabric} {shape}")
        async with pair(fabric, num_pages=16, page_tokens=shape[0], axes=shape[1]) as both:
            for num_tokens in PROMPTS:
                for chunk in CHUNKS:
                    await prefill(both, rng, num_tokens, chunk, f"{num_tokens} tokens by {chunk}")

    run(fabric, scenario)
