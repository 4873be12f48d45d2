"""Whole messengers between two shardings, over the fabric inside one process: every byte, every kind of mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvmsgr.fabric.inprocess import Air, use_air

from .sharded import Group, Sharding, move, node

GQA = Group(heads=4)
MLA = Group("latent", heads=1, planes=1, dim=9)
WINDOW = Group("window", layers=(3, 4), heads=4, window=10)
STATE = Group("state", layers=(5, 6), heads=4, planes=1, dim=24, recurrent=True, num_pages=3)
INDEXER = Group("indexer", heads=1, planes=1, dim=3)


async def check(
    source: Sequence[Group], ours: Sharding, target: Sequence[Group], theirs: Sharding, **more: object
) -> None:
    with use_air(Air(seed=3)):
        async with (
            node("p", source, ours, fabric="inprocess", **more) as prefiller,  # type: ignore[arg-type]
            node("d", target, theirs, fabric="inprocess", **more) as decoder,  # type: ignore[arg-type]
        ):
            for number, (num_tokens, chunk) in enumerate([(2, 99), (5, 99), (18, 7), (33, 8), (40, 99)]):
                await move(prefiller, decoder, number, num_tokens, chunk=chunk)


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 2), (2, 8), (8, 8)])
@pytest.mark.parametrize("orders", [("hnd", "hnd"), ("hnd", "nhd"), ("nhd", "hnd")])
async def test_heads_split_merged_and_replicated(tps: tuple[int, int], orders: tuple[str, str]) -> None:
    groups = [[replace(GQA, order=order)] for order in orders]
    await check(groups[0], Sharding(tps[0]), groups[1], Sharding(tps[1]))


@pytest.mark.parametrize("tps", [(1, 1), (4, 4), (4, 1), (1, 4), (3, 2)])
async def test_latents_are_on_every_rank(tps: tuple[int, int]) -> None:
    await check([MLA], Sharding(tps[0]), [MLA], Sharding(tps[1]))


@pytest.mark.parametrize("pages", [(4, 8), (8, 4), (4, 16), (16, 4)])
@pytest.mark.parametrize("orders", [("hnd", "hnd"), ("nhd", "hnd"), ("nhd", "nhd")])
async def test_page_sizes_that_differ(pages: tuple[int, int], orders: tuple[str, str]) -> None:
    ours, theirs = (
        replace(GQA, page_tokens=tokens, num_pages=48 // tokens, order=order)
        for tokens, order in zip(pages, orders, strict=True)
    )
    await check([ours], Sharding(2), [theirs], Sharding(1))


@pytest.mark.parametrize("ways", [(Sharding(2, 2), Sharding(1, 1)), (Sharding(1, 3), Sharding(2, 2))])
async def test_pipeline_stages(ways: tuple[Sharding, Sharding]) -> None:
    """A rank holds some layers; each rank counts its own."""
    group = replace(GQA, layers=(0, 1, 2, 3, 4))
    await check([group], ways[0], [group], ways[1], layer_counters="rank")


@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (4, 4)])
@pytest.mark.parametrize("counters", ["lead", "rank"])
async def test_groups_of_different_geometry(tps: tuple[int, int], counters: str) -> None:
    """Full attention, a sliding window, an indexer that has keys alone, and recurrent state."""
    groups = [GQA, WINDOW, STATE, INDEXER]
    await check(groups, Sharding(tps[0]), groups, Sharding(tps[1]), layer_counters=counters)


@pytest.mark.parametrize("one_each", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("tps", [(2, 2), (2, 1), (1, 2)])
async def test_a_messenger_a_rank(one_each: tuple[bool, bool], tps: tuple[int, int]) -> None:
    """Without a lead a request has several legs, and is fetched by several messengers."""
    with use_air(Air(seed=3)):
        async with (
            node("p", [GQA], Sharding(tps[0]), fabric="inprocess", one_each=one_each[0]) as prefiller,
            node("d", [GQA], Sharding(tps[1]), fabric="inprocess", one_each=one_each[1]) as decoder,
        ):
            for number, num_tokens in enumerate([2, 18, 33]):
                await move(prefiller, decoder, number, num_tokens, chunk=8)


@pytest.mark.parametrize("interfaces", [(2, 2), (1, 3), (3, 2)])
async def test_several_interfaces_a_rank(interfaces: tuple[int, int]) -> None:
    with use_air(Air(seed=3)):
        async with (
            node("p", [GQA, MLA], Sharding(2), fabric="inprocess", interfaces=interfaces[0]) as prefiller,
            node("d", [GQA, MLA], Sharding(2), fabric="inprocess", interfaces=interfaces[1]) as decoder,
        ):
            for number, num_tokens in enumerate([2, 18, 33, 45]):
                await move(prefiller, decoder, number, num_tokens, chunk=9)


async def test_ranks_of_data_parallel_attention() -> None:
    """A request lives on one rank of the prefiller and one of the decoder; the others see nothing of it."""
    with use_air(Air(seed=3)):
        async with (
            node("p", [MLA], Sharding(4), fabric="inprocess", layer_counters="rank") as prefiller,
            node("d", [MLA], Sharding(4), fabric="inprocess") as decoder,
        ):
            for number in range(8):
                await move(prefiller, decoder, number, 30, ranks=[number % 4], accept=[3 - number // 2])


async def test_context_comes_from_one_rank_to_each_that_wants_it() -> None:
    with use_air(Air(seed=3)):
        async with (
            node("p", [GQA], Sharding(2), fabric="inprocess", context=True) as prefiller,
            node("d", [GQA], Sharding(4), fabric="inprocess", context=True) as decoder,
        ):
            [arrival] = await move(prefiller, decoder, 9, 21)
            assert sorted(arrival.contexts) == [0, 1, 2, 3]
            for views in arrival.contexts.values():
                assert (views["hidden"] == 9).all()
            arrival.release()
