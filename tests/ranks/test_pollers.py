"""Whole messengers whose ranks are served by several polling threads."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import cast

import pytest

import kvmsgr
from kvmsgr._ext import native
from kvmsgr.device.cache import Memory
from kvmsgr.errors import ConfigError, PeerLostError, StepFaultError, TransferError
from kvmsgr.fabric import records
from kvmsgr.fabric.libfabric import providers
from kvmsgr.fabric.pollers import PollerGroup
from kvmsgr.messenger import _deal
from kvmsgr.runtime import node as runtime

from .halfway import Halfway, asked, forward, halfway, run_layer, start, until
from .sharded import Group, Node, Sharding, move, node, within

NET = next(name for name in ("tcp", "net") if name in providers())
GQA = Group(heads=4, num_pages=24)
MLA = Group("latent", heads=1, planes=1, dim=9, num_pages=24)
NUM_TOKENS = 80
SLOW_NS = 900_000_000
LATE_S = 0.3


def pollers_of(side: Node) -> list[native.Poller]:
    group = side.lead._node.fabric.poller
    assert isinstance(group, PollerGroup)
    return group._pollers


def clear(failed: Halfway) -> None:
    """Take away what landed of it: nobody may find it later."""
    for shards in failed.target.shards:
        for shard, own in zip(shards, failed.pages, strict=True):
            shard.poison(own)


@pytest.mark.parametrize("fabric", [NET, pytest.param("shm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("counters", ["lead", "rank"])
@pytest.mark.parametrize(("tps", "pollers"), [((2, 2), (2, 2)), ((4, 2), (3, 1)), ((2, 4), (1, 2))])
async def test_shardings(fabric: str, counters: str, tps: tuple[int, int], pollers: tuple[int, int]) -> None:
    how = {"fabric": fabric, "interfaces": 2, "context": True, "layer_counters": counters}
    async with (
        node("p", [GQA, MLA], Sharding(tps[0]), pollers=pollers[0], **how) as prefiller,  # type: ignore[arg-type]
        node("d", [GQA, MLA], Sharding(tps[1]), pollers=pollers[1], **how) as decoder,  # type: ignore[arg-type]
    ):
        for number, (num_tokens, chunk) in enumerate([(2, 99), (18, 7), (90, 8), (95, 99)]):
            for arrival in await move(prefiller, decoder, number, num_tokens, chunk=chunk):
                for views in arrival.contexts.values():
                    assert (views["hidden"] == number).all()
                arrival.release()
        for side, num in ((prefiller, pollers[0]), (decoder, pollers[1])):
            if num > 1:
                stats = [poller.stats() for poller in pollers_of(side)]
                moved = "posted_writes" if side is prefiller else "landed_writes"
                assert len(stats) == num
                assert all(one[moved] for one in stats), "each has its share"


async def test_more_steps_than_a_ring_has_slots() -> None:
    """Each slot comes back from both."""
    async with (
        node("p", [MLA], Sharding(2), fabric=NET, pollers=2) as prefiller,
        node("d", [MLA], Sharding(2), fabric=NET, pollers=2) as decoder,
    ):
        for number in range(4):
            await move(prefiller, decoder, number, 90, chunk=3)


@pytest.mark.parametrize("counters", ["lead", "rank"])
async def test_a_signal_that_is_missing_fails_the_request_once(counters: str) -> None:
    how = {"fabric": NET, "layer_counters": counters}
    async with (
        node("p", [GQA], Sharding(2), pollers=2, **how) as prefiller,  # type: ignore[arg-type]
        node("d", [GQA], Sharding(2), **how) as decoder,  # type: ignore[arg-type]
    ):
        one = await asked(prefiller, decoder, 1, NUM_TOKENS // 2, pages=list(range(10)))
        await halfway(one)
        other = await asked(prefiller, decoder, 2, NUM_TOKENS // 2, pages=list(range(10, 20)))
        other.request.accept()
        forward(other)
        with pytest.raises(StepFaultError, match="1 of 3"):
            await within(one.fetch)
        await within(one.request.released())
        await within(one.fetch.released())
        await other.check_arrives()
        steps = prefiller.lead._node.steps
        await until(lambda: {ticket for _, ticket in steps} == {2}, "the first step is over on all counters")


@pytest.mark.parametrize("counters", ["lead", "rank"])
async def test_a_fault_that_is_heard_of_late_is_known_to_every_thread(
    counters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later step of the request shows all meanwhile, and one of another request's."""

    def late(node: runtime.Node, *values: int) -> None:
        node.loop.call_later(LATE_S, type(node)._step_failed, node, *values)

    monkeypatch.setitem(runtime.Node._handlers, records.STEP_FAULT, late)
    how = {"fabric": NET, "layer_counters": counters}
    async with (
        node("p", [GQA], Sharding(2), pollers=2, **how) as prefiller,  # type: ignore[arg-type]
        node("d", [GQA], Sharding(2), **how) as decoder,  # type: ignore[arg-type]
    ):
        one = await asked(prefiller, decoder, 1, NUM_TOKENS // 2, pages=list(range(10)))
        other = await asked(prefiller, decoder, 2, NUM_TOKENS // 2, pages=list(range(10, 20)))
        for each in (one, other):
            each.request.accept()
        start(prefiller.lead.begin_step([one.chunk(0, GQA.page_tokens // 2)]))
        forward(one, GQA.page_tokens // 2)
        forward(other)
        with pytest.raises(StepFaultError, match="0 of 3"):
            await within(one.fetch)
        assert one.fetch.rows_landed == 0
        await within(one.request.released())
        await within(one.fetch.released())
        await other.check_arrives()


async def test_an_abandoned_step_is_announced_again() -> None:
    async with (
        node("p", [GQA], Sharding(2), fabric=NET, pollers=2) as prefiller,
        node("d", [GQA], Sharding(2), fabric=NET) as decoder,
    ):
        one = await asked(prefiller, decoder, 1, NUM_TOKENS)
        one.request.accept()
        for _ in range(100):
            prefiller.lead.begin_step([one.chunk()]).abandon()
            await asyncio.sleep(0)
        forward(one)
        await one.check_arrives()


@pytest.mark.parametrize("fence", ["endpoint", "rotation"])
async def test_the_fence_is_closed_on_all_threads(fence: str) -> None:
    """A peer fails on one of them: all its links end, its pages come back, and a later request finds a new epoch."""
    how = {"fabric": NET, "fence": fence, "lease_s": 1.0, "heartbeat_s": 0.2}
    async with (
        node("p", [GQA], Sharding(2), pollers=2, **how) as prefiller,  # type: ignore[arg-type]
        node("d", [GQA], Sharding(2), pollers=2, **how) as decoder,  # type: ignore[arg-type]
    ):
        one = await asked(prefiller, decoder, 1, NUM_TOKENS)
        step = await halfway(one)
        pollers_of(prefiller)[1].inject("fail", 1)
        run_layer(step, 1, one)
        with pytest.raises(TransferError):
            await within(one.fetch)
        await within(one.fetch.released())
        await within(one.request.released())
        clear(one)
        await move(prefiller, decoder, 2, NUM_TOKENS)
        await move(prefiller, decoder, 3, NUM_TOKENS)
        for side in (prefiller, decoder):
            assert not sum(pages.held for pages in side.lead._node.fabric.state.pages())


async def test_a_peer_with_a_thread_that_hears_nothing_is_lost() -> None:
    """And only what it serves is silent: each endpoint is judged by its own poller."""
    how = {"fabric": NET, "lease_s": 1.0, "heartbeat_s": 0.2}
    async with (
        node("p", [GQA], Sharding(2), pollers=2, **how) as prefiller,  # type: ignore[arg-type]
        node("d", [GQA], Sharding(2), pollers=2, **how) as decoder,  # type: ignore[arg-type]
    ):
        await move(prefiller, decoder, 1, NUM_TOKENS)
        one = await asked(prefiller, decoder, 2, NUM_TOKENS)
        await halfway(one)
        held = pollers_of(decoder)[1]
        held.hold(True)
        with pytest.raises(PeerLostError):
            await within(one.fetch)
        held.hold(False)
        await within(one.fetch.released())
        await within(one.request.released())
        clear(one)
        await move(prefiller, decoder, 3, NUM_TOKENS)


def test_a_rank_stays_with_one_thread_whatever_it_has() -> None:
    interfaces = [(0, None), (0, None), (0, None), (1, None), (2, None), (2, None)]
    memory = cast(Memory, SimpleNamespace(ranks=range(3), interfaces=interfaces))
    cpu = min(os.sched_getaffinity(0))
    assert _deal(kvmsgr.Config(name="x", model="m", pollers=2), memory) == [(4, None), (2, None)]
    assert _deal(kvmsgr.Config(name="x", model="m", poller_core=cpu), memory) == [(6, cpu)]
    spread = kvmsgr.Config(name="x", model="m", pollers=3, poller_core=[cpu] * 3)
    assert _deal(spread, memory) == [(3, cpu), (1, cpu), (2, cpu)]


async def test_there_are_no_more_threads_than_ranks() -> None:
    with pytest.raises(ConfigError, match="pollers is 3, and there are 2 ranks"):
        async with node("p", [GQA], Sharding(2), fabric="inprocess", pollers=3):
            pass


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"pollers": 0}, "pollers is 0"),
        ({"pollers": 65}, "pollers is 65"),
        ({"pollers": 2, "poller_core": 0}, "2 polling threads need one CPU each"),
        ({"pollers": 2, "poller_core": [0, 1 << 20]}, f"poller_core is {1 << 20}"),
    ],
)
def test_threads_and_their_cpus_are_checked(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        kvmsgr.Config(name="x", model="m", **wrong)  # type: ignore[arg-type]
