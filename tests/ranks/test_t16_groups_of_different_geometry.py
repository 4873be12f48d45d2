"""T16: full attention, a window of which only the last pages live, latents, an indexer that has keys alone, and layers
that share buffers: each group has its own pages, and the count follows from the decoder's side alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvmsgr.fabric.inprocess import Air, use_air

from .sharded import Group, Node, Sharding, move, node

FULL = Group("full", layers=(1, 3, 6, 7), heads=2, page_tokens=256, num_pages=6, num_sharing=2)
WINDOW = Group("window", layers=(0, 2, 4), heads=2, page_tokens=64, num_pages=6, window=150)
LATENT = Group("latent", layers=(5, 8), heads=1, planes=1, dim=9, page_tokens=64, num_pages=16)
INDEXER = Group("indexer", layers=(5, 8), heads=1, planes=1, dim=3, page_tokens=4, num_pages=220)
DECODER = [FULL, WINDOW, LATENT, INDEXER]
OTHER_PAGES = [
    replace(FULL, page_tokens=128, num_pages=12),
    replace(WINDOW, page_tokens=32, num_pages=12, order="nhd"),
    replace(LATENT, page_tokens=16, num_pages=64),
    replace(INDEXER, page_tokens=8, num_pages=110),
]
PROMPTS = [(1, 99), (63, 20), (64, 64), (151, 40), (300, 77), (777, 256)]


def num_buffers(groups: Sequence[Group]) -> int:
    """Each tensor is one: a group's, or that of a layer where layers share."""
    return sum(len(group.layers) - group.num_sharing if group.num_sharing else 1 for group in groups)


def rows(target: Node, num_positions: int) -> int:
    """What must land, from the decoder's groups, its sharding, and the length of the prompt."""
    return sum(
        (len(group.layers) - group.num_sharing) * group.planes * len(shard.heads) * len(group.positions(num_positions))
        for shards in target.shards
        for group, shard in zip(target.groups, shards, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["inprocess", "net"])
@pytest.mark.parametrize("source", [DECODER, OTHER_PAGES], ids=["the same pages", "other pages"])
@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (4, 2)])
async def test_groups_of_different_geometry(fabric: str, source: list[Group], tps: tuple[int, int]) -> None:
    with use_air(Air(seed=5)):
        async with (
            node("p", source, Sharding(tps[0]), fabric=fabric, seed=1) as prefiller,
            node("d", DECODER, Sharding(tps[1]), fabric=fabric, seed=2) as decoder,
        ):
            landed = 0
            for number, (num_positions, chunk) in enumerate(PROMPTS):
                await move(prefiller, decoder, number, num_positions + 1, chunk=chunk)
                landed += rows(decoder, num_positions)
                assert decoder.lead.stats()["landed_rows"] == landed
            for own, other in ((prefiller, decoder), (decoder, prefiller)):
                [peer] = other.lead._node.peers
                assert peer.routes is not None
                for rank in peer.routes.ranks.values():
                    assert len(rank.region_bytes) == num_buffers(own.groups)
                    assert [len(endpoint.regions) for endpoint in rank.endpoints] == [num_buffers(own.groups)]
