"""T14 over libfabric, with several ranks and several prefillers: pages are taken back while writes are under way, and
have another owner the moment that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import kvmsgr
from kvmsgr.fabric.inprocess import Air, use_air
from kvmsgr_protocol import Reason

from .halfway import Halfway, asked, halfway, run_layer, start, until
from .sharded import Group, Node, Sharding, move, node, within

GROUP = Group(heads=4, num_pages=48)
PAGES_A_CHUNK, NUM_CHUNKS = 6, 3
CHUNK = PAGES_A_CHUNK * GROUP.page_tokens
NUM_POSITIONS = NUM_CHUNKS * CHUNK
NUMBER, OTHER = 5, 6
REAL = "net", "shm"
CASES = {
    "one rank": (Sharding(1), Sharding(1), False),
    "several ranks": (Sharding(2, 2), Sharding(4), False),
    "two prefillers": (Sharding(2), Sharding(1), True),
    "two prefillers, two ranks": (Sharding(1, 2), Sharding(2), True),
}


@asynccontextmanager
async def nodes(fabric: str, case: str) -> AsyncIterator[tuple[Node, Node]]:
    """A prefiller and a decoder, neither of which is lost while the test keeps it from reading."""
    source, target, one_each = CASES[case]
    with use_air(Air(seed=3)):
        async with (
            node("p", [GROUP], source, fabric=fabric, one_each=one_each, lease_s=20.0, context=True) as prefiller,
            node("d", [GROUP], target, fabric=fabric, lease_s=20.0, stall_s=20.0, context=True) as decoder,
        ):
            yield prefiller, decoder


def hold(side: Node, held: bool) -> None:
    """Read no completion queue: what is posted stays so, and what lands is not counted."""
    for messenger in side.messengers:
        messenger._node.fabric.poller.hold(held)


def num_posted(side: Node) -> int:
    return sum(messenger.stats()["posted_writes"] for messenger in side.messengers)


async def rounds(side: Node, num: int = 50) -> None:
    """Give its pollers time to do what they must not."""
    for messenger in side.messengers:
        end = messenger.stats()["rounds"] + num
        await until(lambda messenger=messenger, end=end: messenger.stats()["rounds"] >= end, f"{num} rounds")  # type: ignore[misc]


class Served:
    """A request at each of the prefiller's messengers, and its source pages."""

    def __init__(self, side: Node, parts: list[kvmsgr.PrefillRequest]) -> None:
        self.parts = parts
        self._side = side
        self._pages = side.draw_pages(NUM_POSITIONS)

    @property
    def spans(self) -> list[kvmsgr.Span]:
        return self._side.spans(self._pages, NUM_POSITIONS)

    def compute(self, number: int, start: int, stop: int) -> None:
        """Every layer of these positions, as a request of that number has them."""
        for layer in self._side.layers:
            self._side._compute(number, layer, self._pages, start, stop, NUM_POSITIONS)

    def run(self, start: int, stop: int) -> None:
        """One forward pass from start to end."""
        self.compute(NUMBER, start, stop)
        steps = [
            messenger.begin_step([kvmsgr.Chunk(part, start, stop, self.spans)])
            for messenger, part in zip(self._side.messengers, self.parts, strict=True)
        ]
        for step in steps:
            for signal in step.signals:
                signal.start()
        for layer in self._side.layers:
            self._side._bump(steps, layer)


async def served(side: Node) -> Served:
    parts = [await within(anext(aiter(messenger.requests()))) for messenger in side.messengers]
    for part in parts:
        part.accept()
    return Served(side, parts)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fabric", ["inprocess", *(pytest.param(name, marks=pytest.mark.slow) for name in REAL)])
async def test_t14_the_next_owner_is_never_seen(fabric: str, case: str) -> None:
    async with nodes(fabric, case) as (prefiller, decoder):
        for arrival in await move(prefiller, decoder, 1, NUM_POSITIONS + 1):  # so that every endpoint knows its peers
            arrival.release()
        posted = num_posted(prefiller)
        pages = decoder.draw_pages(NUM_POSITIONS)
        fetch = fetch_from(prefiller, decoder, pages)
        first = await served(prefiller)
        hold(decoder, True)
        hold(prefiller, True)
        first.run(0, CHUNK)
        await until(lambda: num_posted(prefiller) >= posted + 16, "16 writes are posted")
        first.run(CHUNK, 2 * CHUNK)  # armed, and maybe posted
        preempting = asyncio.gather(*(part.preempt() for part in first.parts[:1]))
        await rounds(prefiller)
        assert not preempting.done(), "writes read these pages"
        hold(prefiller, False)
        await within(preempting)
        if len(first.parts) == 1:
            first.compute(OTHER, 0, NUM_POSITIONS)  # the next owner writes at once
        hold(decoder, False)
        for part in first.parts:  # the other leg was told
            assert await within(part.cancelled()) is Reason.preempted
            await within(part.released())
        first.compute(OTHER, 0, NUM_POSITIONS)

        again = asyncio.ensure_future(prefiller.prefill(NUMBER, CHUNK))
        arrival = await within(fetch)
        await within(again)
        decoder.check(NUMBER, pages, NUM_POSITIONS, range(len(decoder.shards)))
        for views in arrival.contexts.values():
            assert (views["hidden"] == NUMBER).all()
        arrival.release()
        await within(fetch.released())
        assert fetch.num_restarts == 1
        own = decoder.lead._node
        assert not own.fabric.state.legs()
        assert own.context_slots.num_held == 0
        assert decoder.lead.stats()["strays"] == 0


def fetch_from(prefiller: Node, decoder: Node, pages: list[list[int]]) -> kvmsgr.Fetch:
    spans = decoder.spans(pages, NUM_POSITIONS)
    return decoder.lead.fetch("r", prefiller.descriptors, range(NUM_POSITIONS + 1), spans)


async def check_arrives_again(fetch: kvmsgr.Fetch, prefiller: Node, decoder: Node, pages: list[list[int]]) -> None:
    again = asyncio.ensure_future(prefiller.prefill(NUMBER))
    await within(fetch)
    await within(again)
    decoder.check(NUMBER, pages, NUM_POSITIONS, [0])
    await within(fetch.released())


async def test_t14_every_prefiller_of_a_request_may_preempt_it() -> None:
    async with nodes("inprocess", "two prefillers") as (prefiller, decoder):
        pages = decoder.draw_pages(NUM_POSITIONS)
        fetch = fetch_from(prefiller, decoder, pages)
        first = await served(prefiller)
        first.run(0, CHUNK)
        await within(asyncio.gather(*(part.preempt() for part in first.parts)))
        second = await served(prefiller)
        assert fetch.num_restarts == 1
        second.run(0, CHUNK)
        await within(second.parts[1].preempt())
        await check_arrives_again(fetch, prefiller, decoder, pages)
        assert fetch.num_restarts == 2


async def test_t14_a_prefiller_that_has_sent_its_part_is_asked_for_it_again() -> None:
    async with nodes("inprocess", "two prefillers") as (prefiller, decoder):
        pages = decoder.draw_pages(NUM_POSITIONS)
        fetch = fetch_from(prefiller, decoder, pages)
        first = await served(prefiller)
        first.compute(NUMBER, 0, NUM_POSITIONS)
        whole = [kvmsgr.Chunk(first.parts[1], 0, NUM_POSITIONS, first.spans, ready=True)]
        prefiller.messengers[1].begin_step(whole)
        assert await within(first.parts[1].released()) == await within(first.parts[1].preempt()) > 0
        await within(first.parts[0].preempt())
        assert await within(first.parts[1].cancelled()) is Reason.preempted
        await check_arrives_again(fetch, prefiller, decoder, pages)
        assert fetch.num_restarts == 1


def finish(step: kvmsgr.Step, *computed: Halfway, layers: list[int]) -> None:
    """Run the rest of a forward pass, with context."""
    for layer in layers:
        run_layer(step, layer, *computed)
    assert step.signals_context
    for signal in step.signals:
        signal.bump()


async def test_t14_a_step_goes_on_for_its_other_requests() -> None:
    async with nodes("inprocess", "several ranks") as (prefiller, decoder):
        one, other = [await asked(prefiller, decoder, number, 20) for number in (1, 2)]
        step = await halfway(one, other)
        posted = await within(one.request.preempt())
        assert 0 < posted < one.request.dispatch.expected_rows
        finish(step, other, layers=prefiller.layers[1:])
        await other.check_arrives()
        assert one.fetch.rows_landed == 0, "the bumps released nothing of the one that has no pages any more"
        assert (await one.request.outcome()).rows_posted == posted
        again = await within(anext(aiter(prefiller.lead.requests())))
        assert (again.request_id, again.payload, list(again.tokens)) == (one.request.request_id, b"", list(range(20)))
        with pytest.raises(kvmsgr.errors.LocalProtocolError, match="not been accepted"):
            prefiller.lead.begin_step([kvmsgr.Chunk(again, 0, 19, [])])

        again.accept()
        one.request = again
        step = prefiller.lead.begin_step([one.chunk()])
        start(step)
        finish(step, one, layers=prefiller.layers)
        await one.check_arrives()
        await until(lambda: prefiller.lead._node.context_slots.num_held == 0, "its context slots are free")


async def test_t14_one_of_two_prefillers_is_gone_before_the_next_attempt() -> None:
    """The other one has taken its pages back, and said how much it had posted."""
    async with nodes("inprocess", "two prefillers") as (prefiller, decoder):
        pages = decoder.draw_pages(NUM_POSITIONS)
        fetch = fetch_from(prefiller, decoder, pages)
        first = await served(prefiller)
        first.run(0, CHUNK)
        (slow,) = (peer for peer in decoder.lead._node.peers if peer.name == "p1")
        assert slow._connection is not None
        await until(lambda: {str(leg.state) for leg in fetch._attempt.legs.values()} == {"accepted"}, "both accepted")
        slow._connection._transport.pause_reading()  # type: ignore[union-attr]
        await within(first.parts[0].preempt())
        await until(lambda: "drained" in {str(leg.state) for leg in fetch._attempt.legs.values()}, "one is drained")
        assert str(fetch._attempt.state) == "restarting"
        await within(prefiller.messengers[0].close())
        with pytest.raises(kvmsgr.errors.ClosedError):
            await within(fetch)
        slow._connection._transport.resume_reading()  # type: ignore[union-attr]
        await within(fetch.released())
        assert fetch.num_restarts == 0
