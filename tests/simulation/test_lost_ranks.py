"""Peers of three ranks with two interfaces each are lost as a whole, even if only one rail is cut: pages come back when
every endpoint that they could be written through is closed, and not before."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmsgr.errors import PeerLostError
from kvmsgr.fabric.inprocess import Air, InProcessPoller
from kvmsgr.testing.loop import simulate
from tests.ranks.halfway import Halfway, asked, forward, until
from tests.ranks.sharded import POISON, Group, Node, Sharding, move, node, within

RANKS, INTERFACES = 3, 2
GROUP = Group(heads=RANKS, num_pages=16)
NUM_TOKENS = 33
LEASE_S, FENCE_S = 2.0, 1.0
NEXT_OWNER = 0xC0DE

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("fence", ["endpoint", "rotation"])]


@asynccontextmanager
async def world(fence: str) -> AsyncIterator[tuple[Node, Node, Node]]:
    """A decoder and two prefillers: `d`, `p`, `q`."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        more: dict[str, Any] = {"fabric": "inprocess", "interfaces": INTERFACES, "fence": fence}
        d, p, q = [
            await stack.enter_async_context(
                node(name, [GROUP], Sharding(RANKS), listen=f"unix:{folder / name}", **more)
            )
            for name in "dpq"
        ]
        yield d, p, q


def poller(side: Node) -> InProcessPoller:
    found = side.lead._node.fabric.poller
    assert isinstance(found, InProcessPoller)
    return found


def addresses(side: Node, peer: str) -> list[bytes]:
    """Where a peer writes to: an endpoint for each interface."""
    links = [link for link, other in side.lead._node._links.items() if other.name == peer]
    assert len(links) == RANKS * INTERFACES
    return [poller(side).link_address(link) for link in links]


async def half_landed(source: Node, target: Node, number: int, pages: range) -> Halfway:
    one = await asked(source, target, number, NUM_TOKENS, pages=list(pages))
    one.request.accept()
    forward(one, 0, one.num_positions // 2)
    all_rows = one.request.dispatch.expected_rows
    await until(lambda: one.fetch.rows_landed * 2 == all_rows, "the first half")
    return one


def write_all_over(one: Halfway) -> None:
    for [shard] in one.target.shards:
        for rows in shard._rows:
            rows[:, :, one.pages[0]] = NEXT_OWNER


def check_canary(one: Halfway) -> None:
    for rank, [shard] in enumerate(one.target.shards):
        for rows in shard._rows:
            assert (rows[:, :, one.pages[0]] == NEXT_OWNER).all(), f"rank {rank} was written after its pages were free"


async def check_lost(one: Halfway, air: Air, held: list[bytes]) -> None:
    """It fails by the lease, and its pages come back by the fence: what was on its way reaches nobody after that."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(PeerLostError):
        await within(one.fetch)
    await within(one.fetch.released())
    write_all_over(one)
    assert LEASE_S - 0.6 < loop.time() - began < LEASE_S + FENCE_S
    for address in held:
        if address in air._endpoints:
            air.release(address)
    await asyncio.sleep(1)  # by the simulated clock: time enough to land
    check_canary(one)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_silent_prefiller_has_posted_on_any_rail_lands_nowhere(fence: str, seed: int) -> None:
    async def scenario(air: Air) -> None:
        async with world(fence) as (d, p, q):
            lost, beside = await half_landed(p, d, 1, range(8)), await half_landed(q, d, 2, range(8, 16))
            held = addresses(d, "p") if fence == "endpoint" else []  # a shared one is not p's alone
            for address in held:
                air.hold(address)
            forward(lost, lost.num_positions // 2)
            if held:
                await until(lambda: all(air.flights(address) for address in held), "writes on every rail")
            poller(p).vanish()
            await check_lost(lost, air, held)
            forward(beside, beside.num_positions // 2)
            await beside.check_arrives()

    simulate(scenario, seed)


@pytest.mark.parametrize("interface", range(RANKS * INTERFACES))
def test_one_rail_that_is_cut_ends_the_whole_epoch(fence: str, interface: int) -> None:
    async def scenario(air: Air) -> None:
        async with world(fence) as (d, p, q):
            lost = await half_landed(p, d, 1, range(8))
            cut = addresses(d, "p")[interface]
            air.hold(cut)
            forward(lost, lost.num_positions // 2)
            await check_lost(lost, air, [cut])
            for [shard] in d.shards:
                shard.fill(POISON)
            await move(p, d, 3, NUM_TOKENS)
            await move(q, d, 4, NUM_TOKENS)

    simulate(scenario, interface)


@pytest.mark.parametrize("seed", range(3))
def test_a_silent_decoder_gives_the_source_pages_back(fence: str, seed: int) -> None:
    async def scenario(air: Air) -> None:
        loop = asyncio.get_running_loop()
        async with world(fence) as (d, p, _):
            lost = await half_landed(p, d, 1, range(8))
            for address in addresses(d, "p"):
                air.hold(address, completes=False)
            forward(lost, lost.num_positions // 2)
            await until(lambda: bool(air.flights()), "writes in the air")
            poller(d).vanish()
            began = loop.time()
            await within(lost.request.released())
            assert LEASE_S - 0.6 < loop.time() - began < LEASE_S + FENCE_S
            with pytest.raises(PeerLostError):
                await within(lost.fetch)

    simulate(scenario, seed)
