"""No byte of layer l is posted while the layer counter says <= l (T04)."""

from __future__ import annotations

import pytest

from kvmsgr import Chunk, Span

from .engines import HEADS, LAYERS, PAGE_TOKENS, pair, settle, until, within

ROWS_A_PAGE_AND_LAYER = PAGE_TOKENS * 2 * HEADS


@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_a_layer_goes_with_its_signal_and_never_before(fabric: str) -> None:
    src, dst = [4, 5, 6, 7], [0, 3, 1, 2]
    async with pair(fabric, context=False) as both:
        cache, messenger = both.prefiller.cache, both.prefiller.messenger

        def rows_posted() -> int:
            return messenger.stats()["posted_rows"]

        async def only(rows: int) -> None:
            """Exactly these rows are posted, however long the poller has had to post more."""
            await until(lambda: fetch.rows_landed >= rows, f"{rows} rows landed")
            await settle(both.prefiller)
            assert rows_posted() == fetch.rows_landed == rows

        fetch = both.fetch("r", 4 * PAGE_TOKENS + 1, dst)
        request = await both.asked()
        request.accept()
        first = messenger.begin_step([Chunk(request, 0, 2 * PAGE_TOKENS, [Span(0, 0, src)])])
        decode_only = messenger.begin_step([])
        second = messenger.begin_step([Chunk(request, 2 * PAGE_TOKENS, 3 * PAGE_TOKENS, [Span(0, 0, src)])])
        second.abandon()
        again = messenger.begin_step([Chunk(request, 2 * PAGE_TOKENS, 4 * PAGE_TOKENS, [Span(0, 0, src)])])
        await only(0)  # announced, not started

        decode_only.signal.start()  # a forward that moves nothing, with the others announced already
        for _ in range(LAYERS):
            decode_only.signal.bump()
        await only(0)

        first.signal.start()
        await only(0)  # started, nothing signalled
        done = 0
        for layer in range(LAYERS):
            cache.put(1, [layer], src, 0, 2 * PAGE_TOKENS)  # final just before its signal
            await only(done)
            both.decoder.cache.check_untouched(range(layer, LAYERS), dst)
            first.signal.bump()
            done += 2 * ROWS_A_PAGE_AND_LAYER
            await only(done)
            both.decoder.cache.check(1, [layer], dst, 0, 2 * PAGE_TOKENS)
        both.decoder.cache.check_untouched(range(LAYERS), dst[2:])  # chunk 1 releases nothing of chunk 2

        again.signal.start()
        await only(done)
        cache.put(1, range(LAYERS), src, 2 * PAGE_TOKENS, 4 * PAGE_TOKENS)
        for _ in range(LAYERS):  # the poller sees some of these values, or only the last
            again.signal.bump()
        done += 2 * LAYERS * ROWS_A_PAGE_AND_LAYER
        arrival = await within(fetch)
        assert arrival.rows == done
        both.decoder.cache.check(1, range(LAYERS), dst, 0, 4 * PAGE_TOKENS)
        await only(done)
        assert await within(request.released()) == done


@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_an_abandoned_step_posts_nothing_even_when_its_neighbours_run(fabric: str) -> None:
    async with pair(fabric, context=False) as both:
        messenger = both.prefiller.messenger
        fetches = [both.fetch(f"r{n}", PAGE_TOKENS + 1, [n]) for n in range(2)]
        requests = [await both.asked() for _ in fetches]
        for request in requests:
            request.accept()
        steps = [
            messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, [8 + n])])])
            for n, request in enumerate(requests)
        ]
        steps[0].abandon()
        both.run(steps[1], 1, [9])
        await within(fetches[1])
        await settle(both.prefiller)
        assert fetches[0].rows_landed == 0
        both.decoder.cache.check_untouched(range(LAYERS), [0])
        both.run(messenger.begin_step([Chunk(requests[0], 0, PAGE_TOKENS, [Span(0, 0, [8])])]), 0, [8])
        await within(fetches[0])
        both.decoder.cache.check(0, range(LAYERS), [0], 0, PAGE_TOKENS)


@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_a_word_left_in_the_ring_by_an_older_step_releases_nothing(fabric: str) -> None:
    async with pair(fabric, context=False) as both:
        messenger, num_slots = both.prefiller.messenger, both.prefiller.node.counters[0].num_slots
        tokens_a_request = num_slots // 2
        pages = list(range(tokens_a_request // PAGE_TOKENS))
        for n in range(2):  # one token a step: every slot of the ring has been used and shows all signals of its step
            fetch = both.fetch(f"filler-{n}", tokens_a_request + 1, pages)
            filler = await both.asked()
            filler.accept()
            for position in range(tokens_a_request):
                step = messenger.begin_step([Chunk(filler, position, position + 1, [Span(0, 0, pages)])])
                both.run(step, n, pages)
            await within(fetch)
        posted = messenger.stats()["posted_rows"]
        fetch = both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        request.accept()
        step = messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, [9])])])
        assert step.ticket > num_slots
        await settle(both.prefiller)
        assert messenger.stats()["posted_rows"] == posted, "the word of an older step released this one"
        both.run(step, 3, [9])
        await within(fetch)
        both.decoder.cache.check(3, range(LAYERS), [0], 0, PAGE_TOKENS)
