"""A process that holds a rank has died: what needs the rank fails on both sides, its pages come back by proof, and what
does not need it goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvmsgr.errors import ConfigError, RankLostError, StepFaultError, TransferError
from kvmsgr.fabric.inprocess import Air, use_air
from kvmsgr_protocol import Reason

from .halfway import Halfway, asked, halfway, run_layer, start, until
from .sharded import Group, Node, Sharding, move, node, within

GQA = Group(heads=3, num_pages=24)
MLA = Group("latent", heads=1, planes=1, dim=9, num_pages=24)
NUM_TOKENS = 90
NUM_POSITIONS = NUM_TOKENS - 1
PATIENT = {"lease_s": 20.0, "stall_s": 20.0}
SOON_S = 5.0  # much sooner than any of these
WHY = "worker 1 was killed"
pytestmark = pytest.mark.parametrize("fabric", ["inprocess", pytest.param("net", marks=pytest.mark.slow)])


@asynccontextmanager
async def nodes(group: Group, **more: object) -> AsyncIterator[tuple[Node, Node]]:
    """A prefiller and a decoder of three ranks with two interfaces each."""
    with use_air(Air(seed=5)):
        async with (
            node("p", [group], Sharding(3), interfaces=2, **PATIENT, **more) as prefiller,  # type: ignore[arg-type]
            node("d", [group], Sharding(3), interfaces=2, **PATIENT, **more) as decoder,  # type: ignore[arg-type]
        ):
            yield prefiller, decoder


async def check_lost(one: Halfway, rank: int, name: str) -> None:
    """Both sides say which rank of which messenger, and all pages come back."""
    with pytest.raises(RankLostError) as raised:
        await within(one.fetch, SOON_S)
    outcome = await within(one.request.outcome(), SOON_S)
    assert (outcome.ok, outcome.reason) == (False, Reason.rank_lost)
    for text in (str(raised.value), outcome.detail):
        assert f"rank {rank} of {name} is lost: {WHY}" in text
    await within(one.request.released(), SOON_S)
    await within(one.fetch.released(), SOON_S)


async def check_clean(*sides: Node) -> None:
    """Nothing is left of any request, and the peers have kept their epoch."""
    for side in sides:
        state = side.lead._node.fabric.state
        await until(lambda state=state: not state.legs(), "all legs are over")
        assert not sum(pages.held for pages in state.pages())
        assert side.lead.unhealthy is None
        assert [peer.failure for peer in side.lead._node.peers] == [None]


@pytest.mark.parametrize("side", ["prefiller", "decoder"])
async def test_a_request_of_all_ranks_fails_on_both_sides(fabric: str, side: str) -> None:
    async with nodes(GQA, fabric=fabric) as (prefiller, decoder):
        await move(prefiller, decoder, 1, NUM_TOKENS)
        one = await asked(prefiller, decoder, 2, NUM_TOKENS)
        await halfway(one)
        lossy = prefiller if side == "prefiller" else decoder
        lossy.lead.rank_lost(1, WHY)
        await check_lost(one, 1, side[0])
        await check_clean(prefiller, decoder)


async def test_a_request_that_waits_is_refused_when_the_engine_takes_it(fabric: str) -> None:
    async with nodes(GQA, fabric=fabric) as (prefiller, decoder):
        one = await asked(prefiller, decoder, 1, NUM_TOKENS)
        prefiller.lead.rank_lost(1, WHY)
        one.request.accept()
        await check_lost(one, 1, "p")
        await check_clean(prefiller, decoder)


async def test_a_lost_rank_is_asked_for_nothing(fabric: str) -> None:
    async with nodes(MLA, fabric=fabric) as (prefiller, decoder):
        decoder.lead.rank_lost(1, WHY)
        pages = decoder.draw_pages(NUM_POSITIONS)
        for ranks in (None, [1], [0, 1]):
            with pytest.raises(RankLostError, match=WHY):
                decoder.lead.fetch(
                    "lost", prefiller.descriptors, range(NUM_TOKENS), decoder.spans(pages, NUM_POSITIONS), ranks=ranks
                )
        await move(prefiller, decoder, 1, NUM_TOKENS, ranks=[0, 2])
        await check_clean(prefiller, decoder)


@pytest.mark.parametrize("side", ["prefiller", "decoder"])
async def test_requests_on_other_ranks_go_on(fabric: str, side: str) -> None:
    """Data-parallel attention: each request lives on one rank, and one forward pass computes several of them. The rank
    that is lost bumps its layer counter no more, in this pass and in those to come."""
    async with nodes(MLA, fabric=fabric, layer_counters="rank") as (prefiller, decoder):
        lost, other, later = [
            await asked(prefiller, decoder, number, NUM_TOKENS, rank=number % 3) for number in (1, 2, 3)
        ]
        step = await halfway(lost, other)
        (prefiller if side == "prefiller" else decoder).lead.rank_lost(1, WHY)
        dead = [1] if side == "prefiller" else []
        await check_lost(lost, 1, side[0])
        for layer in (1, 2):
            run_layer(step, layer, other, dead=dead)
        await other.check_arrives()
        later.request.accept([later.rank])
        steps = prefiller.lead._node.steps  # a counter's last step stays there until the next one begins
        for position in range(NUM_POSITIONS):  # more steps than a layer counter has slots
            step = prefiller.lead.begin_step([later.chunk(position, position + 1)])
            start(step, dead)
            for layer in range(3):
                run_layer(step, layer, later, dead=dead)
            await until(lambda: len(steps) == 3 - len(dead), "older steps are over")
        await later.check_arrives()
        await check_clean(prefiller, decoder)


async def test_a_rank_may_be_lost_after_the_messenger_closed(fabric: str) -> None:
    """Worker processes end with their engine, and whoever watches them says so. A step of theirs never ended."""
    async with nodes(MLA, fabric=fabric, layer_counters="rank") as (prefiller, decoder):
        one = await asked(prefiller, decoder, 1, NUM_TOKENS, rank=1)
        await halfway(one)
        await within(prefiller.lead.close())
        prefiller.lead.rank_lost(1, WHY)
        assert (await within(one.request.outcome())).reason is Reason.closed
        await within(one.fetch.released())


async def test_a_rank_that_stops_computing_fails_its_own_requests(fabric: str) -> None:
    """Nobody has said that it is lost: the time allowed for the step runs out."""
    async with nodes(MLA, fabric=fabric, layer_counters="rank", step_timeout_s=0.5) as (prefiller, decoder):
        stuck, other = [await asked(prefiller, decoder, number, NUM_TOKENS, rank=number) for number in (1, 2)]
        step = await halfway(stuck, other, stop=NUM_POSITIONS // 2)
        for layer in (1, 2):
            run_layer(step, layer, other, dead=[1])
        told = "rank 1: step 1 of layer counter 1 showed 1 of 3 layer signals when its time ran out"
        with pytest.raises(StepFaultError, match=told):
            await within(stuck.fetch)
        await within(stuck.fetch.released())
        last = prefiller.lead.begin_step([other.chunk(NUM_POSITIONS // 2)])
        start(last, dead=[1])
        for layer in range(3):
            run_layer(last, layer, other, dead=[1])
        await other.check_arrives()
        await check_clean(prefiller, decoder)


async def test_a_request_that_is_over_stays_as_it_is(fabric: str) -> None:
    """A rank is lost while the pages of a request are in quarantine, and after another has arrived."""
    async with nodes(GQA, fabric=fabric) as (prefiller, decoder):
        one = await asked(prefiller, decoder, 1, NUM_TOKENS)
        await halfway(one)
        prefiller.lead._node.loop.call_soon(decoder.lead.rank_lost, 1, WHY)
        one.fetch.cancel("nobody wants it")
        prefiller.lead.rank_lost(0, WHY)
        with pytest.raises(TransferError, match="nobody wants it"):
            await within(one.fetch, SOON_S)
        await within(one.fetch.released(), SOON_S)
        await within(one.request.released(), SOON_S)
        await check_clean(prefiller, decoder)


async def test_there_is_such_a_rank(fabric: str) -> None:
    async with nodes(GQA, fabric=fabric) as (prefiller, _):
        for rank in (-1, 3):
            with pytest.raises(ConfigError, match=f"rank {rank} does not exist"):
                prefiller.lead.rank_lost(rank, WHY)
        prefiller.lead.rank_lost(2, WHY)
        prefiller.lead.rank_lost(2, "again")
        assert prefiller.lead._node.lost_ranks == {2: WHY}
