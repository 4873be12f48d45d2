"""A decoder cancels in the middle of a transfer, and gives the pages to somebody else the moment they come back.

Half of the seeds hold the decoder's poller until Drained has arrived: then everything the prefiller has posted is on
its way, locally complete, and not landed. A Drained that was believed without the count would free the pages too early,
and what is on its way would land in the pages of their next owner: `tools/test --without-row-comparison` shows it.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

import kvmsgr
from kvmsgr import Descriptor, Span
from kvmsgr.core.fetch import FetchState
from kvmsgr.core.leg import LegState
from kvmsgr.errors import RequestCancelledError
from kvmsgr.fabric import leftovers
from tests.loopback.engines import (
    DIM,
    HEADS,
    LAYERS,
    PAGE_TOKENS,
    PAGES,
    SHAPES,
    Side,
    TestCache,
    settle,
    until,
    within,
)

NUM_SEEDS = 200
CANARY = -7.0
LEASE_S = 30.0  # a poller that is held sends no heartbeats on time


@asynccontextmanager
async def prefiller(fabric: str) -> AsyncIterator[Descriptor]:
    """A prefiller in a process of its own."""
    command = [sys.executable, "-m", "tests.lost.prefiller", fabric]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield pickle.loads(bytes.fromhex((await within(child.stdout.readline())).decode()))
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
        leftovers.sweep(leftovers.state_folder())


def fill(cache: TestCache, pages: list[int], value: float) -> None:
    for part in cache.parts:
        for array in part:
            array[:, pages] = value  # axes of SHAPES[0]: layer, page, ...


def check_canary(cache: TestCache, pages: list[int], seed: int) -> None:
    for part in cache.parts:
        for array in part:
            found = array[:, pages]
            assert (found == CANARY).all(), f"seed {seed}: written after its pages were free: {found[found != CANARY]}"


async def cancel_one(side: Side, source: Descriptor, seed: int) -> None:
    """One request, cancelled somewhere."""
    rng = random.Random(seed)
    held = bool(seed % 2)
    num_pages = rng.randint(1, 4)
    pages = rng.sample(range(PAGES), num_pages)
    num_tokens = (num_pages - 1) * PAGE_TOKENS + rng.randint(1, PAGE_TOKENS) + 1
    length = rng.choice([PAGE_TOKENS, 2 * PAGE_TOKENS, num_tokens])
    last_bumps = rng.randint(0, LAYERS)
    payload = f"{seed} {last_bumps} {length}".encode()
    state, poller = side.node.fabric.state, side.node.fabric.poller
    fill(side.cache, pages, 0.0)
    fetch = side.messenger.fetch(f"seed-{seed}", [source], range(num_tokens), [Span(0, 0, pages)], payload=payload)
    if held:
        poller.hold(True)
    in_last_chunk = (num_tokens - 2) % length + 1
    will_be_posted = ((num_tokens - 1 - in_last_chunk) * LAYERS + in_last_chunk * last_bumps) * 2 * HEADS
    enough = 0 if held else rng.randint(0, will_be_posted)
    leg = next(iter(fetch._legs.values()))
    await until(lambda: leg.state is not LegState.waiting, "it was dispatched")
    for _ in range(rng.randint(0, 20)):
        await asyncio.sleep(0)
    await until(
        lambda: fetch.done or fetch.rows_landed >= enough or leg.state is LegState.sent, f"{enough} rows landed"
    )
    fetch.cancel("the client left")
    if fetch._machine.state is not FetchState.ready:
        with pytest.raises(RequestCancelledError):
            await within(fetch)
    owner = asyncio.create_task(next_owner(fetch, side.cache, pages))
    if held:
        said = "the prefiller said how much it has posted"
        await until(lambda: owner.done() or leg.state is not LegState.draining, f"seed {seed}: {said}")
        landed = state.slot_rows(*next(iter(fetch.slots.values())))
        if leg.state is LegState.counting:
            assert fetch.quarantine is not None
            assert f"{landed} of the {leg.rows_posted} rows" in fetch.quarantine
        for _ in range(5):  # a next owner that had the pages would have written by now
            await asyncio.sleep(0)
        poller.hold(False)
    await within(owner)
    await settle(side, 50)
    check_canary(side.cache, pages, seed)


async def next_owner(fetch: kvmsgr.Fetch, cache: TestCache, pages: list[int]) -> None:
    """Takes the pages the moment they come back."""
    await fetch.released()
    fill(cache, pages, CANARY)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_pages_of_a_cancelled_request_come_back_only_by_proof(fabric: str) -> None:
    cache = TestCache(SHAPES[0])
    config = kvmsgr.Config(name="decoder", model="test", fabric=fabric, lease_s=LEASE_S, stall_s=LEASE_S)
    async with prefiller(fabric) as source, await kvmsgr.Messenger.open(config, cache.describe()) as messenger:
        side = Side(messenger, cache, np.zeros((4, DIM), np.float32))
        for seed in range(NUM_SEEDS):
            await cancel_one(side, source, seed)
        assert messenger.unhealthy is None
        assert not side.node.fabric.state.legs()
