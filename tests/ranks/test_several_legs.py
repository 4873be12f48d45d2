"""A request of several legs, from its start to what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

import kvmsgr
from kvmsgr.errors import ConfigError, LayoutMismatchError, LocalProtocolError
from kvmsgr.fabric.inprocess import Air, use_air

from .halfway import until
from .sharded import Group, Node, Sharding, node, within

GQA = Group(num_pages=24)
NUM_TOKENS = 30
NUM_POSITIONS = NUM_TOKENS - 1


@asynccontextmanager
async def nodes(**more: object) -> AsyncIterator[tuple[Node, Node]]:
    """A prefiller of two messengers, each with a half of the heads, and a decoder."""
    with use_air(Air(seed=3)):
        async with (
            node("p", [GQA], Sharding(2), fabric="inprocess", one_each=True, **more) as prefiller,  # type: ignore[arg-type]
            node("d", [GQA], Sharding(1), fabric="inprocess", **more) as decoder,  # type: ignore[arg-type]
        ):
            yield prefiller, decoder


def legs_of(side: Node) -> list[Any]:
    return list(side.lead._node.fabric.state.legs())


def connections_of(side: Node) -> list[asyncio.Transport]:
    """The control connections, as far as they can be kept from being read."""
    return [cast("Any", peer._connection)._transport for peer in side.lead._node.peers]


def fetch(side: Node, name: str, sources: list[kvmsgr.Descriptor]) -> kvmsgr.Fetch:
    pages = side.draw_pages(NUM_POSITIONS)
    return side.lead.fetch(name, sources, range(NUM_TOKENS), side.spans(pages, NUM_POSITIONS))


async def all_live(side: Node, num: int) -> None:
    await until(lambda: [peer.machine.state for peer in side.lead._node.peers] == ["live"] * num, "all are live")


@pytest.mark.parametrize("live", [False, True])
async def test_one_that_has_no_rows_leaves_no_leg(live: bool) -> None:
    async with nodes() as (prefiller, decoder):
        if live:
            await within(decoder.lead.fetch("first", prefiller.descriptors, [1], []))
            await all_live(decoder, 2)
        one = decoder.lead.fetch("no rows", prefiller.descriptors, [1], [])
        await within(one)
        await within(one.released())
        await all_live(decoder, 2)
        assert not legs_of(decoder)


async def test_one_that_is_cancelled_before_its_peers_are_live_leaves_no_leg() -> None:
    async with nodes() as (prefiller, decoder):
        one = fetch(decoder, "cancelled", prefiller.descriptors)
        one.cancel()
        await within(one.released())
        await all_live(decoder, 2)
        assert not legs_of(decoder)


async def test_one_that_is_over_does_not_keep_others_from_their_peer() -> None:
    """It would have failed: half of what it asks for is nowhere."""
    async with nodes() as (prefiller, decoder):
        bad = fetch(decoder, "bad", prefiller.descriptors[:1])
        good = decoder.lead.fetch("good", prefiller.descriptors[:1], [1], [])
        bad.cancel()
        await within(bad.released())
        await within(good)
        asked = await within(anext(aiter(prefiller.lead.requests())))
        assert asked.request_id == "good"
        assert [peer.failure for peer in decoder.lead._node.peers] == [None]


async def test_pages_in_quarantine_are_counted_once() -> None:
    async with nodes(drain_timeout_s=5.0) as (prefiller, decoder):
        one = fetch(decoder, "held", prefiller.descriptors)
        for messenger in prefiller.messengers:
            request = await within(anext(aiter(messenger.requests())))
            request.accept()
        await until(lambda: [leg.state for leg in legs_of(decoder)] == ["accepted"] * 2, "both are accepted")
        connections = connections_of(decoder)
        for connection in connections:
            connection.pause_reading()
        one.cancel()
        node_ = decoder.lead._node
        num_pages = GQA.num_needed(NUM_POSITIONS)
        assert [leg.state for leg in legs_of(decoder)] == ["draining"] * 2
        assert node_.fabric.state.quarantined == num_pages
        for connection in connections:
            connection.resume_reading()
        await within(one.released())
        assert node_.fabric.state.quarantined == 0


async def test_an_accept_that_is_refused_leaves_no_trace() -> None:
    """The first half of what is asked for could be chosen, the second could not."""
    with use_air(Air(seed=3)):
        async with (
            node("p", [GQA], Sharding(2, 2), fabric="inprocess") as prefiller,
            node("d", [GQA], Sharding(1), fabric="inprocess") as decoder,
        ):
            one = fetch(decoder, "one", prefiller.descriptors)
            request = await within(anext(aiter(prefiller.lead.requests())))
            balance = prefiller.lead._node.balance
            with pytest.raises(LayoutMismatchError, match="accept"):
                request.accept([0, 1, 2])
            with pytest.raises(ConfigError, match="needed are some of"):
                request.accept([4])
            assert (request.ranks, balance.given_bytes, balance.unique_bytes) == ((), [0] * 4, 0)
            request.accept()
            with pytest.raises(LocalProtocolError, match="accepted before"):
                request.accept([3])
            assert request.ranks == (0, 1, 2, 3)
            assert sum(balance.given_bytes) == balance.unique_bytes > 0
            one.cancel()
            await within(one.released())
