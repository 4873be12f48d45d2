"""T47: what every rank of the prefiller holds is sent by all of them, each about as much, and no more often than it is
wanted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

import kvmsgr
from kvmsgr.layout import Balance
from kvmsgr.testing.loop import simulate

from .sharded import ITEM_BYTES, Group, Node, Sharding, node, within

NUM_REQUESTS, NUM_AGAIN, NUM_RANKS = 1000, 100, 8
MOST_OFF = 0.2
LATENT = Group("latent", layers=(0, 1), heads=1, planes=1, dim=9, page_tokens=4, num_pages=16)
BYTES_A_POSITION = len(LATENT.layers) * LATENT.dim * ITEM_BYTES


def check_even(given_bytes: list[int]) -> None:
    mean = sum(given_bytes) / len(given_bytes)
    assert len(given_bytes) == NUM_RANKS
    assert all(abs(given / mean - 1) <= MOST_OFF for given in given_bytes), given_bytes


@pytest.mark.parametrize("seed", range(1, 6))
def test_t47_choices_are_even_and_the_same_for_the_same_seed(seed: int) -> None:
    """Prompts as long as in real traces: few of them are most of the bytes."""

    def choices() -> tuple[list[int], Balance]:
        rng, balance = Random(seed), Balance(NUM_RANKS)
        lengths = [int(rng.lognormvariate(8.8, 1.0)) for _ in range(NUM_REQUESTS)]
        return [balance.choose(range(NUM_RANKS), num, rng.getrandbits(32)) for num in lengths], balance

    chosen, balance = choices()
    check_even(balance.given_bytes)
    assert choices()[0] == chosen


@dataclass(frozen=True)
class Asked:
    """A request, and the decoder's rank that wants it (None: all)."""

    number: int
    num_positions: int
    rank: int | None

    @property
    def ranks(self) -> range:
        return range(NUM_RANKS) if self.rank is None else range(self.rank, self.rank + 1)


def requests(seed: int) -> list[Asked]:
    rng = Random(seed)
    return [
        Asked(number, rng.randint(1, 40), rng.choice([None, rng.randrange(NUM_RANKS)]))
        for number in range(NUM_REQUESTS)
    ]


async def serve(prefiller: Node) -> None:
    """All pages are computed already."""
    async for request in prefiller.lead.requests():
        spans = prefiller.spans(prefiller.draw_pages(request.num_positions), request.num_positions)
        request.accept()
        prefiller.lead.begin_step([kvmsgr.Chunk(request, 0, request.num_positions, spans, ready=True)])


async def fetch(source: Node, target: Node, asked: Asked) -> dict[int, int]:
    """For each of the decoder's ranks that wants it, the prefiller's rank that sent it: so says what has landed."""
    pages = target.draw_pages(asked.num_positions)
    fetch = target.lead.fetch(
        f"request {asked.number}",
        [source.lead.descriptor],
        range(asked.num_positions + 1),
        target.spans(pages, asked.num_positions),
        ranks=asked.ranks,
    )
    await within(fetch)
    await within(fetch.released())
    sources = {}
    for rank in asked.ranks:
        [shard] = target.shards[rank]
        [source_rank] = {
            int(value)
            for layer in LATENT.layers
            for value in set(shard.found(layer, pages[0], asked.num_positions).ravel())
        }
        sources[rank] = source_rank
        shard.poison(pages[0])
    return sources


async def scenario(seed: int, folder: Path, num_requests: int) -> list[dict[int, int]]:
    """Who sent what to whom, request by request."""
    async with (
        node("p", [LATENT], Sharding(NUM_RANKS), fabric="inprocess", listen=f"unix:{folder / 'p'}") as prefiller,
        node("d", [LATENT], Sharding(NUM_RANKS), fabric="inprocess", listen=f"unix:{folder / 'd'}") as decoder,
    ):
        for rank, [shard] in enumerate(prefiller.shards):
            shard.fill(rank)
        serving = asyncio.ensure_future(serve(prefiller))
        every = requests(seed)[:num_requests]
        sources = [await fetch(prefiller, decoder, asked) for asked in every]
        given_bytes, unique_bytes = [0] * NUM_RANKS, 0
        for asked, chosen in zip(every, sources, strict=True):
            unique_bytes += asked.num_positions * BYTES_A_POSITION
            for rank in chosen.values():
                given_bytes[rank] += asked.num_positions * BYTES_A_POSITION
        if num_requests == NUM_REQUESTS:
            check_even(given_bytes)
        spread = prefiller.lead.spread
        assert list(spread.given_bytes) == given_bytes
        assert spread.unique_bytes == unique_bytes
        assert spread.redundancy == sum(given_bytes) / unique_bytes
        serving.cancel()
    return sources


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_t47_replicas_share_the_bytes(seed: int, tmp_path: Path) -> None:
    """Half of the requests are wanted by one rank, half by all eight: then each byte travels eight times."""

    def run(air_seed: int, num_requests: int) -> list[dict[int, int]]:
        return simulate(lambda air: scenario(seed, tmp_path, num_requests), air_seed)

    assert run(seed, NUM_REQUESTS)[:NUM_AGAIN] == run(seed + 100, NUM_AGAIN), "the same request ids, other choices"
