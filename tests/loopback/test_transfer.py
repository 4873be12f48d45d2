"""Whole requests between two messengers over real libfabric: the right bytes, nothing else, exact counts."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvmsgr import Chunk, Span

from .engines import DIM, HEADS, LAYERS, PAGE_TOKENS, PAGES, SHAPES, Shape, pair, within

FABRICS = ["net", "shm"]
ROWS_A_POSITION = LAYERS * 2 * HEADS


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("source", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("destination", SHAPES, ids=lambda shape: shape.name)
async def test_every_layout_to_every_layout(fabric: str, source: Shape, destination: Shape) -> None:
    src_pages, dst_pages, num_tokens = [7, 2, 3, 9], [1, 8, 4, 5], 15
    async with pair(fabric, source, destination) as both:
        fetch = both.fetch("r", num_tokens, dst_pages, payload=b"lora=3")
        request = await both.asked()
        assert request.tokens.tolist() == list(range(num_tokens))
        assert request.payload == b"lora=3"
        request.accept()
        for start, stop in ((0, 6), (6, 9), (9, 14)):  # chunks that are not aligned to pages
            spans = [Span(0, start, src_pages[start // PAGE_TOKENS : (stop - 1) // PAGE_TOKENS + 1])]
            both.run(both.prefiller.messenger.begin_step([Chunk(request, start, stop, spans)]), 1, src_pages)
        arrival = await within(fetch)
        assert arrival.num_tokens == 14
        assert arrival.rows == 14 * ROWS_A_POSITION + 1
        assert (arrival.context["hidden"].view(np.float32) == 1).all()
        arrival.release()
        both.decoder.cache.check(1, range(LAYERS), dst_pages, 0, 14)
        both.decoder.cache.check_untouched(range(LAYERS), [p for p in range(PAGES) if p not in dst_pages])
        await within(fetch.released())
        assert await within(request.released()) == arrival.rows
        assert (await within(request.outcome())).ok


@pytest.mark.parametrize("fabric", FABRICS)
async def test_several_requests_share_a_step(fabric: str) -> None:
    pages = {1: ([0, 1], [3, 2]), 2: ([2, 3], [4, 5]), 3: ([4, 5], [11, 6])}
    async with pair(fabric) as both:
        fetches = {n: both.fetch(f"r{n}", 8, dst) for n, (_, dst) in pages.items()}
        asked = [await both.asked() for _ in pages]
        requests = {int(request.request_id[1:]): request for request in asked}
        for request in asked:
            request.accept()
        cache = both.prefiller.cache
        for start, stop in ((0, 4), (4, 7)):
            chunks = [Chunk(requests[n], start, stop, [Span(0, 0, src)]) for n, (src, _) in pages.items()]
            step = both.prefiller.messenger.begin_step(chunks)
            step.signal.start()
            for layer in range(LAYERS):
                for n, (src, _) in pages.items():
                    cache.put(n, [layer], src, start, stop)
                step.signal.bump()
            if stop == 7:
                for n, request in requests.items():
                    request.context["hidden"][:] = np.full(DIM, n, np.float32).view(np.uint8)
                step.signal.bump()
        for n, fetch in fetches.items():
            arrival = await within(fetch)
            both.decoder.cache.check(n, range(LAYERS), pages[n][1], 0, 7)
            assert (arrival.context["hidden"].view(np.float32) == n).all(), "another request's context"
            arrival.release()


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_prompt_of_one_token_is_ready_at_once_and_still_releases_the_prefiller(fabric: str) -> None:
    async with pair(fabric) as both:
        fetch = both.fetch("one", 1, [3])
        arrival = await within(fetch)
        assert (arrival.num_tokens, arrival.rows, dict(arrival.context)) == (0, 0, {})
        request = await both.asked()
        request.accept()
        assert (await within(request.outcome())).ok
        assert await within(request.released()) == 0
        both.decoder.cache.check_untouched(range(LAYERS), range(PAGES))


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("num_tokens", [2, PAGE_TOKENS, PAGE_TOKENS + 1, PAGE_TOKENS + 2, 3 * PAGE_TOKENS])
@pytest.mark.parametrize("chunk_tokens", [1, PAGE_TOKENS // 2, PAGE_TOKENS, 6])
async def test_page_edges(fabric: str, num_tokens: int, chunk_tokens: int) -> None:
    src, dst, extra = [5, 6, 7], [1, 2, 3], [9]
    async with pair(fabric, context=False) as both:
        fetch = both.fetch("r", num_tokens, [*dst, *extra])
        request = await both.asked()
        request.accept()
        for start in range(0, num_tokens - 1, chunk_tokens):
            stop = min(start + chunk_tokens, num_tokens - 1)
            both.run(both.prefiller.messenger.begin_step([Chunk(request, start, stop, [Span(0, 0, src)])]), 1, src)
        arrival = await within(fetch)
        assert arrival.rows == (num_tokens - 1) * ROWS_A_POSITION
        both.decoder.cache.check(1, range(LAYERS), dst, 0, num_tokens - 1)
        both.decoder.cache.check_untouched(range(LAYERS), extra)
        assert await within(request.released()) == arrival.rows


@pytest.mark.parametrize("fabric", FABRICS)
async def test_pages_the_decoder_has_are_never_written(fabric: str) -> None:
    src, dst = [0, 1, 2, 3], [8, 9]
    async with pair(fabric, context=False) as both:
        both.decoder.cache.put(2, range(LAYERS), [10, 8], 4, 6)  # what the decoder has up to position 6
        fetch = both.fetch("r", 12, dst, first_token=6)
        request = await both.asked()
        request.accept()
        both.run(both.prefiller.messenger.begin_step([Chunk(request, 0, 11, [Span(0, 0, src)])]), 1, src)
        arrival = await within(fetch)
        assert arrival.rows == (11 - 6) * ROWS_A_POSITION
        both.decoder.cache.check(1, range(LAYERS), [10, *dst], 6, 11)
        both.decoder.cache.check(2, range(LAYERS), [10, 8], 4, 6)


@pytest.mark.parametrize("fabric", FABRICS)
async def test_pages_that_are_computed_already_go_at_once(fabric: str) -> None:
    src, dst = [0, 1], [5, 4]
    async with pair(fabric) as both:
        both.prefiller.cache.put(1, range(LAYERS), src, 0, 7)
        fetch = both.fetch("r", 8, dst)
        request = await both.asked()
        request.accept()
        request.context["hidden"][:] = np.full(DIM, 1, np.float32).view(np.uint8)
        step = both.prefiller.messenger.begin_step([Chunk(request, 0, 7, [Span(0, 0, src)], ready=True)])
        assert step.ticket == 0
        await within(fetch)
        both.decoder.cache.check(1, range(LAYERS), dst, 0, 7)


async def test_a_messenger_plays_both_roles() -> None:
    async with pair("net", context=False) as both:
        there, back = both.prefiller, both.decoder
        fetch = there.messenger.fetch("back", [back.messenger.descriptor], range(5), [Span(0, 0, [3])])
        request = await within(anext(back.messenger.requests()))
        request.accept()
        back.cache.put(1, range(LAYERS), [6], 0, 4)
        back.messenger.begin_step([Chunk(request, 0, 4, [Span(0, 0, [6])], ready=True)])
        await within(fetch)
        there.cache.check(1, range(LAYERS), [3], 0, 4)


async def test_slots_and_pages_come_back_and_serve_again() -> None:
    async with pair("shm") as both:
        for n in range(12):
            fetch = both.fetch("again", 6, [0, 1])
            request = await both.asked()
            request.accept()
            step = both.prefiller.messenger.begin_step([Chunk(request, 0, 5, [Span(0, 0, [2, 3])])])
            both.run(step, n, [2, 3])
            arrival = await within(fetch)
            both.decoder.cache.check(n, range(LAYERS), [0, 1], 0, 5)
            arrival.release()
            await within(fetch.released())
        assert both.decoder.node.slots.num_held == 1, "only the heartbeats of the peer have a slot"
        assert both.decoder.node.outbox._pages[0][0].num_held == 0


def test_plain_values_need_neither_the_native_layer_nor_torch() -> None:
    code = """
import pickle, sys, kvmsgr
peer = kvmsgr.Descriptor("tcp://h:1", "0" * 32, "name")
assert pickle.loads(pickle.dumps(peer)) == peer
kvmsgr.Span(0, 0, [1]), kvmsgr.Config(name="n", model="m")
print([name for name in sys.modules if name.startswith("kvmsgr._ext") or name == "torch"])
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
