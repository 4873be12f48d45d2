"""What an engine may do with steps, in which order, and what it is told when it errs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvmsgr import Chunk, Span
from kvmsgr.errors import (
    ConfigError,
    LayoutError,
    LocalProtocolError,
    MessengerClosedError,
    StepFaultError,
    StepLimitError,
)
from kvmsgr.runtime import outbox
from kvmsgr_protocol import Reason

from .engines import DIM, HEADS, LAYERS, PAGE_TOKENS, pair, settle, until, within

ROWS_A_PAGE = PAGE_TOKENS * LAYERS * 2 * HEADS


def chunk(request: object, start: int, stop: int, pages: list[int], *, ready: bool = False) -> Chunk:
    return Chunk(request, start, stop, [Span(0, 0, pages)], ready)  # type: ignore[arg-type]


async def test_a_request_must_be_accepted_before_its_chunks_are_announced() -> None:
    async with pair("net", context=False) as both:
        both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        with pytest.raises(LocalProtocolError, match="accept"):
            both.prefiller.messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [1])])
        await settle(both.prefiller)
        assert both.prefiller.messenger.stats()["posted_rows"] == 0


async def test_a_step_that_has_started_cannot_be_taken_back() -> None:
    async with pair("net", context=False) as both:
        fetch = both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        request.accept()
        step = both.prefiller.messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [1])])
        both.run(step, 1, [1], num_bumps=1)
        step.abandon()
        with pytest.raises(StepFaultError, match=f"abandoned after 1 of {LAYERS}"):
            await within(fetch)
        assert (await within(request.outcome())).reason is Reason.step_fault
        # Its positions do not come back: announcing them again is an error, not a second copy of the rows.
        with pytest.raises(LayoutError, match="expected is none, for all were announced"):
            both.prefiller.messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [1])])


async def test_abandoning_a_step_that_has_run_changes_nothing() -> None:
    async with pair("net", context=False) as both:
        fetch = both.fetch("r", 2 * PAGE_TOKENS + 1, [0, 1])
        request = await both.asked()
        request.accept()
        for n in range(2):
            step = both.prefiller.messenger.begin_step([chunk(request, n * PAGE_TOKENS, (n + 1) * PAGE_TOKENS, [2, 3])])
            both.run(step, 1, [2, 3])
            step.abandon()  # as from a `finally`
        assert (await within(fetch)).rows == 2 * ROWS_A_PAGE


async def test_pages_that_were_ready_have_gone_even_if_the_step_is_abandoned() -> None:
    async with pair("net", context=False) as both:
        fetches = [both.fetch(f"r{n}", PAGE_TOKENS + 1, [n]) for n in range(2)]
        requests = [await both.asked() for _ in fetches]
        for request in requests:
            request.accept()
        both.prefiller.cache.put(0, range(LAYERS), [8], 0, PAGE_TOKENS)
        messenger = both.prefiller.messenger
        step = messenger.begin_step(
            [chunk(requests[0], 0, PAGE_TOKENS, [8], ready=True), chunk(requests[1], 0, PAGE_TOKENS, [9])]
        )
        step.abandon()
        assert (await within(fetches[0])).rows == ROWS_A_PAGE
        with pytest.raises(LayoutError, match="expected is none, for all were announced"):
            messenger.begin_step([chunk(requests[0], 0, PAGE_TOKENS, [8], ready=True)])
        both.run(messenger.begin_step([chunk(requests[1], 0, PAGE_TOKENS, [9])]), 1, [9])
        await within(fetches[1])


async def test_an_abandoned_chunk_may_come_back_on_other_pages() -> None:
    async with pair("net", context=False) as both:
        fetch = both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        request.accept()
        messenger = both.prefiller.messenger
        messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [4])]).abandon()
        both.run(messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [5])]), 1, [5])
        await within(fetch)
        both.decoder.cache.check(1, range(LAYERS), [0], 0, PAGE_TOKENS)


async def test_more_steps_than_the_counter_can_tell_apart_are_refused_and_leave_no_trace() -> None:
    async with pair("net", context=False) as both:
        num_slots = both.prefiller.node.counters[0].num_slots
        messenger = both.prefiller.messenger
        num_tokens, pages = 40, list(range(10))
        last = num_tokens - PAGE_TOKENS  # the decoders have all before it
        steps = []
        for n in range(2):  # one token a step, none of them run
            both.fetch(f"r{n}", num_tokens + 1, [n], first_token=last)
            request = await both.asked()
            request.accept()
            for position in range(num_tokens):
                if len(steps) == num_slots:
                    break
                steps.append(messenger.begin_step([chunk(request, position, position + 1, pages)]))
        with pytest.raises(StepLimitError):
            messenger.begin_step([chunk(request, position, position + 1, pages)])
        for step in steps:
            both.run(step, 1, pages)
        await until(lambda: len(both.prefiller.node.steps) == 1, "all steps but the last are over")
        both.run(messenger.begin_step([chunk(request, position, position + 1, pages)]), 1, pages)


async def test_the_list_of_chunks_belongs_to_the_caller() -> None:
    async with pair("net", context=False, step_timeout_s=0.1) as both:
        fetch = both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        request.accept()
        chunks = [chunk(request, 0, PAGE_TOKENS, [1])]
        step = both.prefiller.messenger.begin_step(chunks)
        chunks.clear()
        step.signal.start()
        with pytest.raises(StepFaultError, match=f"0 of {LAYERS}"):
            await within(fetch)


async def test_a_request_that_ends_in_a_step_does_not_change_what_the_step_signals() -> None:
    async with pair("net") as both:
        fetches = [both.fetch(f"r{n}", PAGE_TOKENS + 1, [n]) for n in range(2)]
        requests = [await both.asked() for _ in fetches]
        for request in requests:
            request.accept()
        step = both.prefiller.messenger.begin_step(
            [chunk(request, 0, PAGE_TOKENS, [4 + n]) for n, request in enumerate(requests)]
        )
        step.signal.start()
        requests[0].fail("its client has gone")
        for layer in range(LAYERS):
            for n in range(2):
                both.prefiller.cache.put(n, [layer], [4 + n], 0, PAGE_TOKENS)
            step.signal.bump()
        for n, request in enumerate(requests):
            assert request.wants_context
            request.context["hidden"][:] = np.full(DIM, n, np.float32).view(np.uint8)
        assert step.signals_context
        step.signal.bump()
        arrival = await within(fetches[1])
        assert (arrival.context["hidden"].view(np.float32) == 1).all()


async def test_a_last_chunk_that_moves_nothing_still_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "check_cover", lambda *_: None)  # as a decoder of another make may ask
    async with pair("net", context=False) as both:
        fetch = both.fetch("r", 2 * PAGE_TOKENS + 1, [0])  # the decoder wants the first page only
        request = await both.asked()
        request.accept()
        messenger = both.prefiller.messenger
        both.run(messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [4, 5])]), 1, [4, 5])
        await within(fetch)
        both.run(messenger.begin_step([chunk(request, PAGE_TOKENS, 2 * PAGE_TOKENS, [4, 5])]), 1, [4, 5])
        assert await within(request.released()) == ROWS_A_PAGE
        assert (await within(request.outcome())).ok


async def test_a_chunk_too_many_is_an_error_and_does_not_stop_what_is_under_way() -> None:
    async with pair("net", context=False) as both:
        fetch = both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        request.accept()
        messenger = both.prefiller.messenger
        step = messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [1])])
        with pytest.raises(LayoutError, match="expected is none, for all were announced"):
            messenger.begin_step([chunk(request, PAGE_TOKENS, PAGE_TOKENS + 1, [1])])
        both.run(step, 1, [1])
        await within(fetch)
        assert await within(request.released()) == ROWS_A_PAGE
        assert (await within(request.outcome())).ok


async def test_steps_may_be_announced_from_another_thread() -> None:
    async with pair("net", context=False) as both:
        fetch = both.fetch("r", 4 * PAGE_TOKENS + 1, [0, 1, 2, 3])
        request = await both.asked()
        request.accept()

        def forward() -> None:
            for n in range(4):
                pages = [4, 5, 6, 7]
                step = both.prefiller.messenger.begin_step(
                    [chunk(request, n * PAGE_TOKENS, (n + 1) * PAGE_TOKENS, pages)]
                )
                both.run(step, 1, pages)

        engine = threading.Thread(target=forward)
        engine.start()
        await within(fetch)
        engine.join()
        both.decoder.cache.check(1, range(LAYERS), [0, 1, 2, 3], 0, 4 * PAGE_TOKENS)


async def test_what_cannot_be_announced_is_said() -> None:
    async with pair("net", context=False) as both:
        both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        request.accept()
        messenger = both.prefiller.messenger
        with pytest.raises(ConfigError, match="layer counter 1"):
            messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [1])], counter=1)
        with pytest.raises(LayoutError, match="one chunk a request"):
            messenger.begin_step([chunk(request, 0, 1, [1]), chunk(request, 1, 2, [1])])
        for pages in ([0.5], [-1], [1 << 40], [[1]], ["a"], [10**30]):
            with pytest.raises(LayoutError, match="page"):
                messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, pages)])])  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="12 pages"):
            messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [12])])
        await within(messenger.close())
        with pytest.raises(MessengerClosedError):
            messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [1])])


async def test_a_mistake_with_a_signal_is_told_where_it_is_made() -> None:
    async with pair("net", context=False) as both:
        both.fetch("r", 2 * PAGE_TOKENS + 1, [0, 1])
        request = await both.asked()
        request.accept()
        step = both.prefiller.messenger.begin_step([chunk(request, 0, PAGE_TOKENS, [1])])
        step.signal.start()
        with pytest.raises(LocalProtocolError, match=f"started before and has shown 0 of {LAYERS} layer signals"):
            step.signal.start()
        for _ in range(LAYERS):
            step.signal.bump()
        with pytest.raises(LocalProtocolError, match=f"shown {LAYERS + 1} layer signals, {LAYERS} were announced"):
            step.signal.bump()
        with pytest.raises(LocalProtocolError, match="started before"):
            step.signal.start()


async def test_what_is_neither_a_step_nor_a_bool_does_not_make_pages_ready() -> None:
    async with pair("net", context=False) as both:
        both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        request.accept()
        messenger = both.prefiller.messenger
        signal = messenger.begin_step([]).signal
        wrong = Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, [1])], ready=signal)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is a Signal; it must be a bool, or the Step"):
            messenger.begin_step([wrong])


async def test_chunks_leave_no_gap_where_pages_are_there_already() -> None:
    async with pair("net", context=False) as both:
        both.fetch("r", 2 * PAGE_TOKENS + 1, [0, 1])
        request = await both.asked()
        request.accept()
        with pytest.raises(LayoutError, match=r"starts at 0 and stops at 8 at the latest; .* by ready=True"):
            both.prefiller.messenger.begin_step([chunk(request, PAGE_TOKENS, 2 * PAGE_TOKENS, [1, 2])])
