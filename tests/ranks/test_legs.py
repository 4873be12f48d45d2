"""A request with several sources: together they hold everything once, and each of them is held to its own count."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvmsgr
from kvmsgr.errors import ConfigError, CountOverflowError, IncompatiblePeerError
from kvmsgr.fabric.inprocess import Air, use_air
from kvmsgr_protocol import immediate
from tests.simulation.world import until

from .sharded import Group, Node, Sharding, node, within

GROUP = Group(heads=4)
PAGES = [[0, 2]]
MOST_ROWS_A_WRITE = 16  # a page of 4 tokens, 2 heads, K and V


def fetch(target: Node, sources: list[kvmsgr.Descriptor], **more: object) -> kvmsgr.Fetch:
    spans = target.spans(PAGES, 8)
    return target.lead.fetch("r", sources, range(9), spans, **more)  # type: ignore[arg-type]


async def test_sources_must_hold_everything() -> None:
    with use_air(Air()):
        async with (
            node("p", [GROUP], Sharding(2), fabric="inprocess", one_each=True) as source,
            node("d", [GROUP], Sharding(1), fabric="inprocess") as target,
        ):
            half = fetch(target, source.descriptors[:1])
            with pytest.raises(IncompatiblePeerError, match=r"heads 0\.\.3 of layer 0 .* no source holds 2, 3"):
                await within(half)
            await within(half.released())
            with pytest.raises(ConfigError, match="named twice"):
                fetch(target, source.descriptors[:1] * 2)


async def test_what_a_source_holds_is_looked_at_for_each_rank() -> None:
    """It holds all of rank 0, which is remembered, and nothing of rank 1."""
    with use_air(Air()):
        async with (
            node("p", [GROUP], Sharding(2), fabric="inprocess", one_each=True) as source,
            node("d", [GROUP], Sharding(2), fabric="inprocess") as target,
        ):
            for number in range(2):
                good = fetch(target, source.descriptors[:1], ranks=[0])
                request = await within(anext(aiter(source.lead.requests())))
                good.cancel()
                assert await within(request.cancelled()) is kvmsgr.Reason.cancelled, number
                await within(good.released())
            bad = fetch(target, source.descriptors[:1], ranks=[1])
            with pytest.raises(IncompatiblePeerError, match="no source holds 2, 3"):
                await within(bad)
            await within(bad.released())


async def test_sources_must_not_hold_the_same() -> None:
    with use_air(Air()):
        async with (
            node("p", [replace(GROUP, heads=1)], Sharding(2), fabric="inprocess", one_each=True) as source,
            node("d", [replace(GROUP, heads=1)], Sharding(1), fabric="inprocess") as target,
        ):
            both = fetch(target, source.descriptors)
            with pytest.raises(IncompatiblePeerError, match=r"sources p0, p1 together would send 96.*different layers"):
                await within(both)
            await within(both.released())


async def test_a_source_that_is_gone_fails_the_request_and_the_other_is_told() -> None:
    with use_air(Air()):
        async with (
            node("p", [GROUP], Sharding(2), fabric="inprocess", one_each=True) as source,
            node("d", [GROUP], Sharding(1), fabric="inprocess") as target,
        ):
            lost = fetch(target, source.descriptors)
            asked = [await within(anext(aiter(messenger.requests()))) for messenger in source.messengers]
            for request in asked:
                request.accept()
            await within(source.messengers[0].close())
            with pytest.raises(kvmsgr.errors.ClosedError):
                await within(lost)
            assert await within(asked[1].cancelled()) is kvmsgr.Reason.closed
            await within(lost.released())


async def test_one_leg_too_many_and_another_too_few_is_no_success() -> None:
    """The sum is right. A row of one source may be anything."""
    with use_air(Air()):
        async with (
            node("p", [GROUP], Sharding(2), fabric="inprocess", one_each=True) as source,
            node("d", [GROUP], Sharding(1), fabric="inprocess") as target,
        ):
            wrong = fetch(target, source.descriptors)
            state, expected = target.lead._node.fabric.state, GROUP.heads * 2 * 3 * 8
            source.messengers[1].inject("drop", 1)
            await within(source.prefill(1))
            await until(
                lambda: state.attempt_rows(wrong.attempt) >= expected - MOST_ROWS_A_WRITE, "all but one write landed"
            )
            missing = expected - state.attempt_rows(wrong.attempt)
            assert missing > 0
            slot = next(iter(wrong._attempt.slots.values()))
            state.land(immediate.base(*slot) | (missing - 1))  # as of the other source
            wrong._attempt.rows_counted(expected)
            with pytest.raises(CountOverflowError, match="do not add up"):
                await within(wrong)
            await within(wrong.released())
