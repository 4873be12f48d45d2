"""A decoder cancels in the middle of a transfer, and gives the pages to somebody else the moment they come back.

Half of the seeds hold the decoder's poller until Drained has arrived: then everything the prefiller has posted is on
its way, locally complete, and not landed. A Drained that was believed without the count would free the pages too early,
and what is on its way would land in the pages of their next owner: `tools/test --without-row-comparison` shows it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

import kvmsgr
from kvmsgr import Descriptor, Span
from kvmsgr.core.attempt import AttemptState
from kvmsgr.core.leg import LegState
from kvmsgr.errors import RequestCancelledError
from kvmsgr.fabric import leftovers
from kvmsgr.runtime.node import Node
from tests.loopback.engines import HEADS, LAYERS, PAGE_TOKENS, PAGES, TestCache, until, within

from .prefiller import describe, shards

CANARY = -7.0
NUM_SEEDS = int(os.environ.get("KVMSGR_CANCEL_SEEDS", "100"))  # each cancels elsewhere
LEASE_S = 30.0  # a poller that is held sends no heartbeats on time


@asynccontextmanager
async def prefiller(fabric: str, num_ranks: int, num_interfaces: int) -> AsyncIterator[Descriptor]:
    """A prefiller in a process of its own."""
    command = [sys.executable, "-m", "tests.lost.prefiller", fabric, str(num_ranks), str(num_interfaces)]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield pickle.loads(bytes.fromhex((await within(child.stdout.readline())).decode()))
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
        leftovers.sweep(leftovers.state_folder())


def fill(caches: Sequence[TestCache], pages: list[int], value: float) -> None:
    for cache in caches:
        for part in cache.parts:
            for array in part:
                array[:, pages] = value  # axes of SHAPES[0]: layer, page, ...


def check_canary(caches: Sequence[TestCache], pages: list[int], seed: int) -> None:
    for rank, cache in enumerate(caches):
        for part in cache.parts:
            for array in part:
                found = array[:, pages]
                late = found[found != CANARY]
                assert not late.size, f"seed {seed}: written on rank {rank} after its pages were free: {late}"


async def settle(node: Node, rounds: int = 50) -> None:
    """Give the poller many rounds in which it could do what it must not."""
    poller = node.fabric.poller
    end = poller.stats()["rounds"] + rounds
    await until(lambda: poller.stats()["rounds"] >= end, f"{rounds} rounds of the poller")


async def cancel_one(messenger: kvmsgr.Messenger, caches: Sequence[TestCache], source: Descriptor, seed: int) -> None:
    """One request, cancelled somewhere."""
    node = messenger._node
    rng = random.Random(seed)
    held = bool(seed % 2)
    num_pages = rng.randint(1, 4)
    pages = rng.sample(range(PAGES), num_pages)
    num_tokens = (num_pages - 1) * PAGE_TOKENS + rng.randint(1, PAGE_TOKENS) + 1
    length = rng.choice([PAGE_TOKENS, 2 * PAGE_TOKENS, num_tokens])
    last_bumps = rng.randint(0, LAYERS)
    payload = f"{seed} {last_bumps} {length}".encode()
    state, poller = node.fabric.state, node.fabric.poller
    fill(caches, pages, 0.0)
    fetch = messenger.fetch(f"seed-{seed}", [source], range(num_tokens), [Span(0, 0, pages)], payload=payload)
    if held:
        poller.hold(True)
    in_last_chunk = (num_tokens - 2) % length + 1
    will_be_posted = (num_tokens - 1 - in_last_chunk) * LAYERS + in_last_chunk * last_bumps
    will_be_posted *= 2 * HEADS * len(caches)
    enough = 0 if held else rng.randint(0, will_be_posted)
    leg = next(iter(fetch._attempt.legs.values()))
    await until(lambda: leg.state is not LegState.waiting, "it was dispatched")
    for _ in range(rng.randint(0, 20)):
        await asyncio.sleep(0)
    await until(
        lambda: fetch.done or fetch.rows_landed >= enough or leg.state is LegState.sent, f"{enough} rows landed"
    )
    fetch.cancel("the client left")
    if fetch._attempt.state is not AttemptState.ready:
        with pytest.raises(RequestCancelledError):
            await within(fetch)
    owner = asyncio.create_task(next_owner(fetch, caches, pages))
    if held:
        said = "the prefiller said how much it has posted"
        await until(lambda: owner.done() or leg.state is not LegState.draining, f"seed {seed}: {said}")
        landed = state.slot_rows(*next(iter(fetch._attempt.slots.values())))
        if leg.state is LegState.counting:
            assert fetch.quarantine is not None
            assert f"{landed} of the {leg.rows_posted} rows" in fetch.quarantine
        for _ in range(5):  # a next owner that had the pages would have written by now
            await asyncio.sleep(0)
        poller.hold(False)
    await within(owner)
    await settle(node)
    check_canary(caches, pages, seed)


async def next_owner(fetch: kvmsgr.Fetch, caches: Sequence[TestCache], pages: list[int]) -> None:
    """Takes the pages the moment they come back."""
    await fetch.released()
    fill(caches, pages, CANARY)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
@pytest.mark.parametrize(
    ("num_seeds", "num_ranks", "num_interfaces"),
    [(NUM_SEEDS, 1, 1), (NUM_SEEDS // 3, 3, 2)],
    ids=["one rank", "three ranks with two interfaces"],
)
async def test_pages_of_a_cancelled_request_come_back_only_by_proof(
    fabric: str, num_seeds: int, num_ranks: int, num_interfaces: int
) -> None:
    caches = shards(num_ranks)
    config = kvmsgr.Config(name="decoder", model="test", fabric=fabric, lease_s=LEASE_S, stall_s=LEASE_S)
    async with (
        prefiller(fabric, num_ranks, num_interfaces) as source,
        await kvmsgr.Messenger.open(config, ranks=describe(caches, num_interfaces)) as messenger,
    ):
        for seed in range(num_seeds):
            await cancel_one(messenger, caches, source, seed)
        assert messenger.unhealthy is None
        assert not messenger._node.fabric.state.legs()
