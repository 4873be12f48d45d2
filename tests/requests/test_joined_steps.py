"""Chunks whose pages a step of another request computes: what they share with it, and what is refused."""

from __future__ import annotations

import pytest

import kvmsgr
from kvmsgr import Chunk, Span
from kvmsgr.errors import LocalProtocolError, StepFaultError
from kvmsgr.fabric import records
from kvmsgr_protocol import Reason

from .nodes import DIM, FABRICS, LAYERS, ROWS_A_POSITION, Pair, pair, run, until, within

HELD, NUM_POSITIONS, PAGES = 8, 12, [0, 1, 2]
SPANS = [Span(0, 0, PAGES)]
ROWS = NUM_POSITIONS * ROWS_A_POSITION


class Two:
    """The owner of a step, a request of `HELD` positions, and one that begins with the same and goes on."""

    def __init__(self, both: Pair) -> None:
        self.both = both

    async def ask(self, **more: object) -> Two:
        both = self.both
        self.owner_fetch = both.fetch("owner", HELD + 1, [10, 11], **more)
        self.owner = await both.accepted()
        self.fetch = both.fetch("joins", NUM_POSITIONS + 1, [12, 13, 14], **more)
        self.request = await both.accepted()
        self.step = both.begin(Chunk(self.owner, 0, HELD, [Span(0, 0, PAGES[:2])]))
        return self

    def join(self, stop: int = HELD, start: int = 0, **more: bool) -> kvmsgr.Step:
        return self.both.begin(Chunk(self.request, start, stop, SPANS, ready=self.step, **more))

    def owner_runs(self, *layers: int) -> None:
        self.both.forward(self.step, 1, PAGES, layers or range(LAYERS))

    def rest_runs(self) -> None:
        self.both.forward(self.both.begin(Chunk(self.request, HELD, NUM_POSITIONS, SPANS)), 1, PAGES)

    async def check_arrives(self) -> None:
        self.both.decoder.kv.want(1, [12, 13, 14], 0, NUM_POSITIONS)
        arrival = await within(self.fetch)
        assert arrival.rows == ROWS
        assert await within(self.request.released()) == ROWS
        assert (await within(self.request.outcome())).ok

    async def check_owner_arrives(self) -> None:
        self.both.decoder.kv.want(1, [10, 11], 0, HELD)
        await within(self.owner_fetch)

    async def check_fails(self, why: str) -> None:
        """Both, by name, and both give their pages back."""
        for fetch, request in ((self.owner_fetch, self.owner), (self.fetch, self.request)):
            with pytest.raises(StepFaultError, match=why):
                await within(fetch)
            await within(fetch.released())
            await within(request.released())
            assert (await within(request.outcome())).reason is Reason.step_fault
            assert not request.open_steps


@pytest.mark.parametrize("fabric", FABRICS)
def test_layers_that_are_signalled_go_at_once_and_the_others_as_they_come(fabric: str) -> None:
    async def scenario() -> None:
        async with pair(fabric) as both:
            two = await Two(both).ask()
            two.owner_runs(0)
            two.join(4)
            two.join(HELD, 4)  # a second time; the pages of the third layer are not even computed
            await until(lambda: two.fetch.rows_landed == HELD * ROWS_A_POSITION // LAYERS, "the first layer")
            two.owner_runs(1, 2)
            await until(lambda: two.fetch.rows_landed == HELD * ROWS_A_POSITION, "all layers")
            assert [chunk.request for chunk in two.step.chunks] == [two.owner]
            two.rest_runs()
            await two.check_arrives()
            await two.check_owner_arrives()
            both.decoder.kv.check()

    run(fabric, scenario)


@pytest.mark.parametrize("ended", ["cancelled", "failed"])
def test_it_goes_on_without_the_owner(ended: str) -> None:
    """The forward pass still runs, for the request that needs its pages."""

    async def scenario() -> None:
        async with pair("inprocess") as both:
            two = await Two(both).ask()
            two.join()
            two.owner_runs(0)
            two.owner_fetch.cancel() if ended == "cancelled" else two.owner.fail("preempted")
            await within(two.owner_fetch.released())
            two.owner_runs(1, 2)
            two.rest_runs()
            await two.check_arrives()

    run("inprocess", scenario)


@pytest.mark.parametrize("fabric", FABRICS)
def test_it_fails_with_the_step(fabric: str) -> None:
    async def scenario() -> None:
        async with pair(fabric) as both:
            two = await Two(both).ask()
            two.join()
            two.owner_runs(0)
            other = both.fetch("other", HELD + 1, [15, 16])
            request = await both.accepted()
            both.forward(both.begin(Chunk(request, 0, HELD, [Span(0, 0, [5, 6])])), 1, [5, 6])
            await two.check_fails("over after 1 of 3 layer signals")
            await within(other)

    run(fabric, scenario)


def test_a_step_that_has_started_is_abandoned_with_what_joined_it() -> None:
    async def scenario() -> None:
        async with pair("inprocess") as both:
            two = await Two(both).ask()
            two.join()
            two.owner_runs(0)
            two.step.abandon()
            await two.check_fails("abandoned after 1 of 3 layer signals")

    run("inprocess", scenario)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_step_that_never_ran_is_abandoned_with_what_joined_it(fabric: str) -> None:
    """Both may be announced again, from where they stood."""

    async def scenario() -> None:
        async with pair(fabric) as both:
            two = await Two(both).ask()
            two.join(4)
            two.join(HELD, 4)
            last = both.begin(Chunk(two.request, HELD, NUM_POSITIONS, SPANS))
            with pytest.raises(LocalProtocolError, match="one up to 12 was announced; abandon the later one first"):
                two.step.abandon()
            last.abandon()
            two.step.abandon()
            assert (two.owner.next_position, two.request.next_position) == (0, 0)
            with pytest.raises(LocalProtocolError, match=r"step 1, named by `ready` .* failed or was abandoned"):
                two.join()
            two.step = both.begin(Chunk(two.owner, 0, HELD, [Span(0, 0, PAGES[:2])]))
            two.join()
            two.owner_runs()
            two.rest_runs()
            await two.check_arrives()
            await two.check_owner_arrives()
            both.decoder.kv.check()

    run(fabric, scenario)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_request_that_is_over_keeps_no_step_from_being_abandoned(fabric: str) -> None:
    """Pages that followed were ready, so that there is no later step to abandon first."""

    async def scenario() -> None:
        async with pair(fabric) as both:
            two = await Two(both).ask()
            two.join()
            both.begin(Chunk(two.request, HELD, NUM_POSITIONS, SPANS, ready=True))
            with pytest.raises(LocalProtocolError, match="one up to 12 was announced; abandon the later one first"):
                two.step.abandon()
            two.request.fail("its step will not run")
            two.step.abandon()
            assert (two.owner.next_position, two.request.next_position) == (0, NUM_POSITIONS)
            await within(two.request.released())
            await within(two.fetch.released())
            await until(lambda: not two.request.open_steps, "it waits for no step")
            two.step = both.begin(Chunk(two.owner, 0, HELD, [Span(0, 0, PAGES[:2])]))
            two.owner_runs()
            await two.check_owner_arrives()

    run(fabric, scenario)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("started", [True, False])
def test_what_still_runs_when_the_messenger_closes_may_be_abandoned(fabric: str, started: bool) -> None:
    async def scenario() -> None:
        async with pair(fabric) as both:
            two = await Two(both).ask()
            two.join()
            if started:
                two.owner_runs(0)
            await within(both.prefiller.messenger.close())
            two.step.abandon()
            for request in (two.owner, two.request):
                assert (await within(request.outcome())).reason is Reason.closed
                await within(request.released())

    run(fabric, scenario)


def test_a_step_that_is_over_and_complete_is_ready() -> None:
    """Neither does it matter how long ago that was: the native layer need not know it any more."""

    async def scenario() -> None:
        async with pair("inprocess") as both:
            two = await Two(both).ask()
            two.owner_runs()
            await two.check_owner_arrives()
            for number in range(66):  # more than a counter has slots
                fetch = both.fetch(f"other {number}", 5, [15])
                request = await both.accepted()
                both.forward(both.begin(Chunk(request, 0, 4, [Span(0, 0, [5])])), 1, [5])
                await within(fetch)
                await within(fetch.released())
                await within(request.outcome())
            both.decoder.kv.want(1, [15], 0, 4)
            assert not two.step.running
            two.join()
            assert not two.request.open_steps
            two.rest_runs()
            await two.check_arrives()
            both.decoder.kv.check()

    run("inprocess", scenario)


def test_a_step_of_which_no_word_has_come_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has failed, or was complete long ago, and the record that says so is not read yet: the poller decides."""

    async def scenario() -> None:
        async with pair("inprocess") as both:
            two = await Two(both).ask()
            two.owner_runs(0)
            other = both.fetch("other", HELD + 1, [15, 16])
            request = await both.accepted()
            poller, kept = both.prefiller.node.fabric.poller, []
            take = poller.take
            monkeypatch.setattr(poller, "take", lambda *args: kept.extend(take(*args)) or [])
            both.forward(both.begin(Chunk(request, 0, HELD, [Span(0, 0, [5, 6])])), 1, [5, 6])
            await until(lambda: any(record[0] == records.STEP_FAULT for record in kept), "the first step is over")
            two.join()
            stopped = records.STOPPED, two.request.tag
            await until(lambda: any(record[:2] == stopped for record in kept), "the poller has looked at it")
            monkeypatch.undo()
            both.prefiller.node._records.extend(record for record in kept if record[1] == two.request.tag)
            both.prefiller.node._read_records()
            with pytest.raises(
                StepFaultError, match="step 1, whose layers its pages were to go with, is over and was not"
            ):
                await within(two.fetch)
            both.prefiller.node._records.extend(record for record in kept if record[1] != two.request.tag)
            both.prefiller.node._read_records()
            await two.check_fails("step 1")
            await within(other)  # what the second step has shown waits until the fault is known

    run("inprocess", scenario)


def test_the_last_pages_are_another_requests_and_the_context_is_its_own() -> None:
    async def scenario() -> None:
        async with pair("inprocess", num_context_slots=2) as both:
            fetch = both.fetch("owner", HELD + 1, [10, 11], context=False)
            owner = await both.accepted()
            joins = both.fetch("joins", HELD + 1, [12, 13])
            request = await both.accepted()
            step = both.begin(Chunk(owner, 0, HELD, SPANS))
            with pytest.raises(LocalProtocolError, match="say context_later"):
                both.begin(Chunk(request, 0, HELD, SPANS, ready=step))
            assert request.next_position == 0
            both.begin(Chunk(request, 0, HELD, SPANS, ready=step, context_later=True))
            assert not step.signals_context
            both.forward(step, 1, PAGES)
            await within(fetch)
            request.context["hidden"].view("f4")[:] = 9
            request.send_context()
            arrival = await within(joins)
            assert arrival.context["hidden"].view("f4").tolist() == [9] * DIM
            both.decoder.kv.want(1, [10, 11], 0, HELD)
            both.decoder.kv.want(1, [12, 13], 0, HELD)
            both.decoder.kv.check()

    run("inprocess", scenario)


def test_what_cannot_be_joined_is_refused_by_name_and_leaves_no_trace() -> None:
    async def scenario() -> None:
        async with pair("inprocess") as both, pair("inprocess") as others:
            two, elsewhere = await Two(both).ask(), await Two(others).ask()
            third = both.fetch("third", HELD + 1, [15, 16])
            request = await both.accepted()
            mine = Chunk(two.request, 0, HELD, SPANS, ready=two.step)
            for chunks in (
                [mine, Chunk(request, 0, HELD, [Span(0, 0, [5, 6])])],
                [mine, Chunk(request, 0, HELD, SPANS, ready=True)],
            ):
                with pytest.raises(
                    LocalProtocolError, match=r"1 of 2 chunks name 1 steps .* by a begin_step of their own"
                ):
                    both.begin(*chunks)
            second = both.begin(Chunk(request, 0, 4, [Span(0, 0, [5, 6])]))
            with pytest.raises(LocalProtocolError, match="2 of 2 chunks name 2 steps"):
                both.begin(mine, Chunk(request, 4, HELD, SPANS, ready=second))
            with pytest.raises(LocalProtocolError, match="is a step of another messenger"):
                both.begin(Chunk(two.request, 0, HELD, SPANS, ready=elsewhere.step))
            for idle in (both.begin(), two.join(4)):
                with pytest.raises(LocalProtocolError, match=r"step 0.* moves nothing"):
                    both.begin(Chunk(two.request, 4, HELD, SPANS, ready=idle))
            two.join(HELD, 4)
            two.owner_runs()
            both.forward(second, 1, [5, 6])
            both.forward(both.begin(Chunk(request, 4, HELD, [])), 1, [5, 6])
            await within(third)
            two.rest_runs()
            await two.check_arrives()
            await two.check_owner_arrives()
            both.decoder.kv.want(1, [15, 16], 0, HELD)
            both.decoder.kv.check()

    run("inprocess", scenario)
