"""A request whose pages a running step of another one computes, on several ranks."""

from __future__ import annotations

import pytest

import kvmsgr
from kvmsgr.errors import LocalProtocolError, RankLostError, StepFaultError
from kvmsgr.fabric.inprocess import Air, use_air

from .halfway import Halfway, asked, forward, halfway, run_layer
from .sharded import Group, Node, Sharding, node, within

GQA = Group(heads=4, num_pages=60)
MLA = Group("latent", heads=1, planes=1, dim=9, num_pages=60)
NUM_TOKENS, PAGES_EACH = 37, 9


async def prompt(source: Node, target: Node, number: int, rank: int | None = None) -> Halfway:
    """A request in pages of its own."""
    pages = list(range(number * PAGES_EACH, (number + 1) * PAGES_EACH))
    return await asked(source, target, number, NUM_TOKENS, rank=rank, pages=pages)


async def same_prompt(one: Halfway, number: int, rank: int | None = None) -> Halfway:
    """Another request with the pages of `one`."""
    other = await prompt(one.source, one.target, number, rank)
    other.number, other.source_pages = one.number, one.source_pages
    other.request.accept(None if rank is None else [rank])
    return other


def join(one: Halfway, step: kvmsgr.Step) -> None:
    spans = one.source.spans(one.source_pages, one.num_positions)
    chunk = kvmsgr.Chunk(one.request, 0, one.num_positions, spans, ready=step)
    assert not one.source.lead.begin_step([chunk]).moves


@pytest.mark.parametrize("counters", ["lead", "rank"])
@pytest.mark.parametrize(("fabric", "pollers"), [("inprocess", 1), ("net", 1), ("net", 2)])
async def test_the_ranks_of_a_request_join_each_its_counter(counters: str, fabric: str, pollers: int) -> None:
    with use_air(Air(seed=1)):
        async with (
            node("p", [GQA], Sharding(2), fabric=fabric, layer_counters=counters, pollers=pollers) as prefiller,
            node("d", [GQA], Sharding(1), fabric=fabric) as decoder,
        ):
            for number in range(1, 5, 2):
                one = await prompt(prefiller, decoder, number)
                other = await same_prompt(one, number + 1)
                step = await halfway(one)
                one.compute(1)
                step.signals[-1].bump()  # with a counter a rank: one of them is a layer ahead, as it may be
                join(other, step)
                for layer in prefiller.layers[1:]:
                    one.compute(layer)
                    for signal in step.signals[: -1 if layer == 1 else None]:
                        signal.bump()
                await one.check_arrives()
                await other.check_arrives()


async def test_what_is_lost_of_a_step_is_refused_and_the_rest_can_be_joined() -> None:
    """Data-parallel attention: each request lives on one rank."""
    with use_air(Air(seed=2)):
        async with (
            node("p", [MLA], Sharding(2), fabric="inprocess", layer_counters="rank") as prefiller,
            node("d", [MLA], Sharding(2), fabric="inprocess") as decoder,
        ):
            lost = await prompt(prefiller, decoder, 1, 1)
            one = await prompt(prefiller, decoder, 2, 0)
            before, other = await same_prompt(lost, 3, 1), await same_prompt(one, 4, 0)
            step = await halfway(lost, one)
            join(before, step)
            prefiller.lead.rank_lost(1, "worker 1 was killed")
            join(other, step)
            for layer in prefiller.layers[1:]:
                run_layer(step, layer, one, dead=[1])
            await one.check_arrives()
            await other.check_arrives()
            for gone in (lost, before):
                with pytest.raises(RankLostError):
                    await within(gone.fetch)
                await within(gone.fetch.released())
                await within(gone.request.released())


async def test_a_rank_that_shows_too_few_signals_fails_who_joined_there() -> None:
    with use_air(Air(seed=3)):
        async with (
            node("p", [MLA], Sharding(2), fabric="inprocess", layer_counters="rank") as prefiller,
            node("d", [MLA], Sharding(2), fabric="inprocess") as decoder,
        ):
            one = await prompt(prefiller, decoder, 1, 0)
            bad = await prompt(prefiller, decoder, 2, 1)
            joins, too_late = await same_prompt(bad, 3, 1), await same_prompt(bad, 4, 1)
            step = await halfway(one, bad)
            join(joins, step)
            for layer in prefiller.layers[1:]:
                run_layer(step, layer, one, bad, dead=[1])
            after = await prompt(prefiller, decoder, 5, 0)
            after.request.accept([0])
            forward(after)
            await one.check_arrives()
            await after.check_arrives()
            for failed in (bad, joins):
                with pytest.raises(StepFaultError, match=r"rank 1: .* after 1 of 3"):
                    await within(failed.fetch)
                await within(failed.fetch.released())
                await within(failed.request.released())
            with pytest.raises(LocalProtocolError, match="failed or was abandoned"):
                join(too_late, step)
