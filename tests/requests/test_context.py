"""When context travels, who may write and read it, and what an engine that errs is told."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import kvmsgr
from kvmsgr import Chunk, Span
from kvmsgr.errors import (
    BusyError,
    ContextReleasedError,
    EngineFailedError,
    LocalProtocolError,
    RequestCancelledError,
    TransferTimeout,
)

from .nodes import DIM, FABRICS, LAYERS, NET, POISON, ROWS_A_POSITION, Pair, pair, run, until, within

NUM_POSITIONS, PAGES = 8, [0, 1]
SPANS = [Span(0, 0, PAGES)]
NUM_ROWS = NUM_POSITIONS * ROWS_A_POSITION + 1


def write(request: kvmsgr.PrefillRequest, value: float) -> None:
    request.context["hidden"].view("f4")[:] = value


async def begun(both: Pair, name: str = "a", **more: object) -> tuple[kvmsgr.Fetch, kvmsgr.PrefillRequest]:
    fetch = both.fetch(name, NUM_POSITIONS + 1, PAGES, **more)
    return fetch, await both.accepted()


async def check_arrives(fetch: kvmsgr.Fetch, value: float) -> None:
    arrival = await within(fetch)
    assert arrival.rows == NUM_ROWS
    assert arrival.context["hidden"].view("f4").tolist() == [value] * DIM
    arrival.release()
    await within(fetch.released())


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("ready", [False, True])
def test_context_is_sent_later_from_another_thread(fabric: str, ready: bool) -> None:
    async def scenario() -> None:
        async with pair(fabric, num_context_slots=1) as both:
            for value in (3, 4):  # the slot comes back
                fetch, request = await begun(both)
                if ready:
                    both.prefiller.kv.put(1, PAGES, 0, NUM_POSITIONS)
                step = both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=ready, context_later=True))
                assert not step.signals_context
                if not ready:
                    both.forward(step, 1, PAGES)
                await until(lambda fetch=fetch: fetch.rows_landed == NUM_ROWS - 1, "all rows but the context")  # type: ignore[misc]  # bound at once
                assert not fetch.done
                assert not request._released.done(), "it is not sent before its context is"
                write(request, value)
                sampler = threading.Thread(target=request.send_context)
                sampler.start()
                sampler.join()
                await check_arrives(fetch, value)
                assert await within(request.released()) == NUM_ROWS
                assert (await within(request.outcome())).ok

    run(fabric, scenario)


def test_a_step_signals_the_context_that_is_not_sent_later() -> None:
    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=2) as both:
            later, now = await begun(both, "later"), None
            fetch = both.fetch("now", NUM_POSITIONS + 1, [2, 3])
            now = await both.accepted()
            step = both.begin(
                Chunk(later[1], 0, NUM_POSITIONS, SPANS, context_later=True),
                Chunk(now, 0, NUM_POSITIONS, [Span(0, 0, [2, 3])]),
            )
            assert step.signals_context
            both.forward(step, 1, PAGES)
            write(now, 6)
            step.signal.bump()
            await check_arrives(fetch, 6)
            assert later[0].rows_landed == NUM_ROWS - 1, "the bump is not for the one that is sent later"
            write(later[1], 5)
            later[1].send_context()
            await check_arrives(later[0], 5)

    run("inprocess", scenario)


def test_send_context_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=1) as both:
            fetch, request = await begun(both, context=False)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True, context_later=True))
            with pytest.raises(LocalProtocolError, match=r"request 'a': no context is wanted"):
                request.send_context()
            assert (await within(fetch)).rows == NUM_ROWS - 1
            await within(fetch.released())

            fetch, request = await begun(both, "b")
            with pytest.raises(LocalProtocolError, match="context_later is said of chunk"):
                both.begin(Chunk(request, 0, 4, SPANS, context_later=True))
            both.begin(Chunk(request, 0, 4, SPANS, ready=True))
            with pytest.raises(LocalProtocolError, match="announced up to 4 of 8"):
                request.send_context()
            step = both.begin(Chunk(request, 4, NUM_POSITIONS, SPANS, context_later=True))
            both.forward(step, 1, PAGES)
            write(request, 1)
            both.decoder.node.fabric.poller.hold(True)  # the decoder cannot end it
            request.send_context()
            with pytest.raises(LocalProtocolError, match="sent, or goes with its last chunk"):
                request.send_context()
            both.decoder.node.fabric.poller.hold(False)
            await check_arrives(fetch, 1)
            await within(request.outcome())
            request.send_context()  # it is over

            fetch, request = await begun(both, "c")
            step = both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS))
            both.forward(step, 1, PAGES)
            with pytest.raises(LocalProtocolError, match="announce that chunk with context_later"):
                request.send_context()
            write(request, 2)
            step.signal.bump()
            await check_arrives(fetch, 2)

    run("inprocess", scenario)


@pytest.mark.parametrize("how", ["send_context", "fail"])
def test_the_slot_of_a_cancelled_request_is_held_while_its_context_is_due(how: str) -> None:
    """A thread may be writing it. It is nobody else's until the engine has said that this has ended."""

    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=1) as both:
            fetch, request = await begun(both)
            both.forward(both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, context_later=True)), 1, PAGES)
            await until(lambda: fetch.rows_landed == NUM_ROWS - 1, "all rows but the context")
            fetch.cancel()
            await within(request.released())
            await within(fetch.released())
            with pytest.raises(BusyError, match="every context slot is in use"):
                await within(both.fetch("b", NUM_POSITIONS + 1, PAGES))
            write(request, 1)
            if how == "fail":
                request.fail("the engine has nothing to do with it any more")
            else:
                request.send_context()
            await until(lambda: both.prefiller.node.context_slots.num_held == 0, "the slot is free")
            with pytest.raises(ContextReleasedError, match=r"request 'a' has no context any more: it is over"):
                write(request, 1)
            request.send_context()  # does nothing
            with pytest.raises(RequestCancelledError):
                await fetch
            assert (both.decoder.hidden == POISON).all(), "nothing was sent"
            fetch, request = await begun(both, "c")
            write(request, 2)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True))
            await check_arrives(fetch, 2)

    run("inprocess", scenario)


@pytest.mark.parametrize("how", ["preempt", "fail"])
def test_no_context_is_due_of_a_last_chunk_that_was_announced_after_the_engine_gave_up(how: str) -> None:
    """The thread that announces may learn of it later. Nobody calls `send_context` then, and the slot comes back."""

    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=1) as both:
            fetch, request = await begun(both)
            first = both.begin(Chunk(request, 0, 4, SPANS))
            both.forward(first, 1, PAGES, [0])
            await within(request.preempt()) if how == "preempt" else request.fail("others come first")
            assert request.context_slot >= 0, "the step that computes it still runs"
            last = both.begin(Chunk(request, 4, NUM_POSITIONS, [], context_later=True))
            both.forward(first, 1, PAGES, [1, 2])
            both.forward(last, 1, PAGES)
            if how == "preempt":
                (await both.accepted()).fail("and now it is too late")  # it came again, for the slot was free
            with pytest.raises(EngineFailedError):
                await within(fetch)
            await within(fetch.released())
            other, request = await begun(both, "b")
            write(request, 2)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True))
            await check_arrives(other, 2)

    run("inprocess", scenario)


@pytest.mark.parametrize("fabric", ["inprocess", NET])
def test_the_slot_of_a_cancelled_fetch_is_held_while_its_context_is_in_the_air(fabric: str) -> None:
    """It would land in another request's."""

    async def scenario() -> None:
        async with pair(fabric, num_context_slots=1) as both:
            fetch, request = await begun(both, "first")  # what is held before the first write connects nothing
            write(request, 3)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True))
            await check_arrives(fetch, 3)
            fetch, request = await begun(both)
            write(request, 1)
            await both.connected()
            held = both.decoder.node.fabric.poller
            held.hold(True)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True))
            await until(lambda: both.prefiller.messenger.stats()["posted_rows"] == 2 * NUM_ROWS, "all of it is posted")
            fetch.cancel()
            with pytest.raises(RequestCancelledError):
                await within(fetch)
            await within(request.cancelled())
            with pytest.raises(BusyError, match="every context slot is held by a request that is alive or not proven"):
                both.fetch("b", NUM_POSITIONS + 1, [2, 3])
            assert (both.decoder.hidden == 3).all()
            held.hold(False)
            await within(fetch.released())
            assert (both.decoder.hidden == 1).all(), "it did land"
            fetch, request = await begun(both, "c")
            write(request, 2)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True))
            await check_arrives(fetch, 2)

    run(fabric, scenario)


def test_a_slot_comes_back_when_its_step_has_shown_all_its_signals() -> None:
    """A step is over only when the next one starts, and there may be none while no slot is free."""

    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=1) as both:
            fetch, request = await begun(both)
            step = both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS))
            both.forward(step, 1, PAGES)
            fetch.cancel()
            await within(request.released())
            with pytest.raises(BusyError, match="every context slot is in use"):
                await within(both.fetch("b", NUM_POSITIONS + 1, [2, 3]))
            write(request, 1)
            step.signal.bump()
            await within(fetch.released())
            fetch, request = await begun(both, "c")
            write(request, 2)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True))
            await check_arrives(fetch, 2)

    run("inprocess", scenario)


def test_a_step_signals_no_context_of_a_request_that_was_over_before() -> None:
    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=1) as both:
            fetch, request = await begun(both)
            fetch.cancel()
            await within(request.released())
            step = both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS))
            assert request.context_slot == -1
            assert not step.signals_context
            both.forward(step, 1, PAGES)
            await within(fetch.released())

    run("inprocess", scenario)


def test_context_is_not_read_after_its_release() -> None:
    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=1) as both:
            fetch, request = await begun(both)
            write(request, 1)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True))
            arrival = await within(fetch)
            arrival.release()
            for name in ("context", "contexts"):
                with pytest.raises(ContextReleasedError, match=r"'a' has no context any more: release\(\) was called"):
                    getattr(arrival, name)
            arrival.release()
            assert both.decoder.node.context_slots.num_held == 0

    run("inprocess", scenario)


@pytest.mark.parametrize("fabric", ["inprocess", NET])
def test_a_fetch_that_wants_no_context_takes_no_slot(fabric: str) -> None:
    async def scenario() -> None:
        async with pair(fabric, num_context_slots=1) as both:
            first = await begun(both)
            second = both.fetch("b", NUM_POSITIONS + 1, [2, 3], context=False)
            request = await both.accepted()
            assert (request.wants_context, dict(request.contexts), request.context_slot) == (False, {}, -1)
            step = both.begin(Chunk(request, 0, NUM_POSITIONS, [Span(0, 0, [2, 3])]))
            assert not step.signals_context
            both.forward(step, 1, [2, 3])
            arrival = await within(second)
            assert (arrival.rows, dict(arrival.context), arrival.context_slot) == (NUM_ROWS - 1, {}, -1)
            assert both.decoder.node.context_slots.num_held == both.prefiller.node.context_slots.num_held == 1
            write(first[1], 8)
            both.begin(Chunk(first[1], 0, NUM_POSITIONS, SPANS, ready=True))
            await check_arrives(first[0], 8)

    run(fabric, scenario)


def test_a_step_is_not_abandoned_after_its_context_was_sent() -> None:
    """Announcing it again would send the context twice."""

    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=1) as both:
            fetch, request = await begun(both)
            chunk = Chunk(request, 0, NUM_POSITIONS, SPANS, context_later=True)
            both.begin(chunk).abandon()
            with pytest.raises(LocalProtocolError, match="announced up to 0 of 8"):
                request.send_context()
            step = both.begin(chunk)
            write(request, 3)
            request.send_context()
            with pytest.raises(LocalProtocolError, match="send_context was called after"):
                step.abandon()
            both.forward(step, 1, PAGES)
            await check_arrives(fetch, 3)

    run("inprocess", scenario)


def test_a_request_that_is_posted_to_its_last_row_is_not_preempted() -> None:
    """Its pages would come back no sooner, and all of it would be computed once more."""

    async def scenario() -> None:
        async with pair("shm", num_context_slots=1) as both:
            fetch, request = await begun(both)
            write(request, 3)
            both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True))
            limit = time.monotonic() + 20
            while both.prefiller.messenger.stats()["posted_rows"] < NUM_ROWS:  # the event loop hears nothing of it
                assert time.monotonic() < limit
            assert await within(request.preempt()) == NUM_ROWS
            await check_arrives(fetch, 3)
            assert fetch.num_restarts == 0
            assert (await within(request.outcome())).ok

    run("shm", scenario)


def test_what_is_due_at_the_end_does_nothing() -> None:
    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=1) as both:
            fetch, request = await begun(both)
            both.forward(both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, context_later=True)), 1, PAGES)
            await within(both.prefiller.messenger.close())
            await asyncio.gather(asyncio.to_thread(request.send_context))
            with pytest.raises(kvmsgr.errors.ClosedError):
                await fetch

    run("inprocess", scenario)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("why_it_ends", ["arrives", "is cancelled", "runs out of time"])
def test_a_preempted_request_waits_for_its_context_slot_and_comes_again(fabric: str, why_it_ends: str) -> None:
    """The only slot is held until the step that may write it has shown all its signals; till then the prefiller is
    busy, and the decoder asks it again, as long as there is time and somebody wants it."""

    async def scenario() -> None:
        async with pair(fabric, num_context_slots=1) as both:
            fetch, request = await begun(both, time_allowed_s=1.0 if why_it_ends == "runs out of time" else 60.0)
            step = both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS))
            both.forward(step, 1, PAGES, [0])
            await within(request.preempt())
            attempts: set[int] = set()

            def put_off() -> bool:
                attempts.add(fetch.attempt)
                return len(attempts) > 3

            await until(put_off, "it was asked for several times")
            if why_it_ends == "is cancelled":
                fetch.cancel()
                with pytest.raises(RequestCancelledError):
                    await within(fetch)
            elif why_it_ends == "runs out of time":
                with pytest.raises(TransferTimeout):
                    await within(fetch)
            else:
                both.forward(step, 1, PAGES, range(1, LAYERS))
                write(request, 1)
                step.signal.bump()
                request = await both.accepted()
                both.begin(Chunk(request, 0, NUM_POSITIONS, SPANS, ready=True, context_later=True))
                write(request, 2)
                request.send_context()
                await check_arrives(fetch, 2)
                assert fetch.num_restarts == 1
            await within(fetch.released())

    run(fabric, scenario)
