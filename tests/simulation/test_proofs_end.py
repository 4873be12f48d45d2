"""Every quarantine comes to an end while its peer lives, too, and a rotation costs nobody who lives.

What the prefiller says it has posted may never land, or land while peers are moved; endpoints may not open.
"""

from __future__ import annotations

import asyncio
import errno

import pytest

import kvmsgr
from kvmsgr.core.failure import Failure
from kvmsgr.core.rotation import RotationState
from kvmsgr.errors import ShortCountError, TransferError
from kvmsgr.fabric.inprocess import Air
from kvmsgr.fabric.interface import PORT_FAILED
from kvmsgr.runtime import peer as runtime_peer
from kvmsgr.runtime.peer import PeerDriver
from kvmsgr.testing.loop import simulate
from kvmsgr_protocol import Reason

from .world import PAGE_TOKENS, Engine, go_live, num_pages_of, until, world

NUM_TOKENS = 10 * PAGE_TOKENS
SECONDS = 30.0  # of simulated time: far more than any timer


def leg_of(fetch: kvmsgr.Fetch) -> str:
    return str(next(iter(fetch._attempt.legs.values())).state)


def peer_of(engine: Engine, name: str) -> PeerDriver:
    return next(peer for peer in engine.node.peers if peer.name == name and peer.failure is None)


async def lose_with_something_under_way(decoder: Engine, source: Engine, number: int) -> kvmsgr.Fetch:
    """Give up a peer that has taken a request."""
    fetch = decoder.fetch(f"lost-{number}", number, source, PAGE_TOKENS, await decoder.take(1))
    await until(lambda: leg_of(fetch) not in ("waiting", "dispatched"), "it was taken")
    peer_of(decoder, source.messenger.descriptor.name).lose(Failure(Reason.peer_lost, "the test says so"))
    return fetch


def test_rows_that_never_land_end_the_epoch_of_a_cancelled_request() -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            prefiller.scattered, prefiller.layer_s = True, 0.02
            prefiller.poller.inject("drop", 1)
            fetch = decoder.fetch("r", 7, prefiller, NUM_TOKENS, await decoder.take(num_pages_of(NUM_TOKENS)))
            await until(lambda: fetch.rows_landed > 0, "rows landed")
            peer = peer_of(decoder, prefiller.messenger.descriptor.name)
            fetch.cancel()
            await asyncio.wait_for(fetch.released(), SECONDS)
            assert peer.failure is not None
            assert peer.failure.reason is Reason.short_count

    simulate(scenario, 0)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_complete_an_attempt_let_its_peer_move(seed: int) -> None:
    async def scenario(air: Air) -> None:
        async with world(air, ("p", "q"), fence="rotation") as (decoder, p, q):
            await go_live(decoder, p)
            await go_live(decoder, q)
            air.hold(decoder.address("p"), completes=True)
            fetch = decoder.fetch("r", 7, p, NUM_TOKENS, await decoder.take(num_pages_of(NUM_TOKENS)))
            await until(lambda: leg_of(fetch) == "sent", "all is posted, and nothing has landed")
            where, alive = decoder.address("p"), peer_of(decoder, "p")
            await lose_with_something_under_way(decoder, q, 8)
            await until(lambda: bool(decoder.node.rotation._moving.get(alive)), "p holds back, and rows are missing")
            air.release(where)
            await asyncio.wait_for(fetch, SECONDS)
            await until(lambda: decoder.node.rotation._machine.state is RotationState.idle, "the rotation is over")
            assert alive.failure is None

    simulate(scenario, seed)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_finished_leg_are_waited_for_before_their_port_is_closed(seed: int) -> None:
    async def scenario(air: Air) -> None:
        async with world(air, ("p", "q"), fence="rotation") as (decoder, p, q):
            await go_live(decoder, p)
            await go_live(decoder, q)
            p.scattered, p.layer_s = True, 0.05
            where = decoder.address("p")
            fetch = decoder.fetch("r", 7, p, NUM_TOKENS, await decoder.take(num_pages_of(NUM_TOKENS)))
            await until(lambda: leg_of(fetch) == "accepted", "it was taken")
            air.hold(where, completes=True)
            await until(lambda: len(air.flights(where)) > 0, "writes are in the air")
            fetch.cancel()
            await until(lambda: leg_of(fetch) == "counting", "it has said how much it posted")
            alive = peer_of(decoder, "p")
            lost = await lose_with_something_under_way(decoder, q, 8)
            await until(lambda: decoder.node.rotation._moving.get(alive) is not None, "p holds back")
            air.release(where)
            await asyncio.wait_for(fetch.released(), SECONDS)
            await asyncio.wait_for(lost.released(), SECONDS)
            assert alive.failure is None

    simulate(scenario, seed)


def test_a_peer_that_leaves_idle_is_forgotten_where_all_share_an_endpoint() -> None:
    async def scenario(air: Air) -> None:
        async with world(air, ("p",), fence="rotation") as (decoder, p):
            await go_live(decoder, p)
            loop, started_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
            await p.messenger.close()
            assert loop.time() - started_s < 1, "closing waited for an endpoint that the others use"
            await until(lambda: not decoder.node.peers, "its window is free again")

    simulate(scenario, 0)


def test_without_a_second_endpoint_the_only_one_is_the_fence_and_the_next_is_used() -> None:
    async def scenario(air: Air) -> None:
        async with world(air, ("p", "q"), fence="rotation") as (decoder, p, q):
            await go_live(decoder, p)
            await go_live(decoder, q)
            lives = decoder.poller._engine.lives
            rotate = lives.rotate

            def fail_once(keys: tuple[int, ...]) -> None:
                lives.rotate = rotate  # type: ignore[method-assign]
                lives._records.report(PORT_FAILED, 0, errno.ENOMEM)

            lives.rotate = fail_once  # type: ignore[method-assign]
            bystander = peer_of(decoder, "p")
            first = await lose_with_something_under_way(decoder, q, 8)
            await asyncio.wait_for(first.released(), SECONDS)
            assert bystander.failure is not None
            assert "no second endpoint" in bystander.failure.detail
            second = await lose_with_something_under_way(decoder, q, 9)
            await asyncio.wait_for(second.released(), SECONDS)
            await until(lambda: decoder.node.rotation._machine.state is RotationState.idle, "the rotation is over")

    simulate(scenario, 0)


def test_a_failed_post_is_never_told_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the peer's last message is waited for: its counts prove nothing any more."""
    monkeypatch.setattr(runtime_peer, "DISCONNECTED", runtime_peer.DISCONNECTED | {errno.EIO})

    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            prefiller.scattered = True
            prefiller.poller.inject("fail", 25)
            fetch = decoder.fetch("r", 7, prefiller, NUM_TOKENS, await decoder.take(num_pages_of(NUM_TOKENS)))
            with pytest.raises(TransferError) as raised:
                await fetch
            assert not isinstance(raised.value, ShortCountError)
            await asyncio.wait_for(fetch.released(), SECONDS)
            assert leg_of(fetch) == "fenced"

    simulate(scenario, 0)
