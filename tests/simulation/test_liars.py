"""Peers that run, and do not say what they must, or say what is not so: the other side ends by itself, by name."""

from __future__ import annotations

import asyncio

import pytest

import kvmsgr
from kvmsgr.core.failure import Failure
from kvmsgr.fabric.inprocess import Air
from kvmsgr.runtime.peer import PeerDriver
from kvmsgr.runtime.serve import COUNT_S
from kvmsgr.testing.loop import simulate
from kvmsgr_protocol import Finished, Message, Reason, Resume, Rotate

from .test_proofs_end import lose_with_something_under_way, peer_of
from .world import PAGE_TOKENS, Engine, go_live, num_pages_of, until, world

NUM_TOKENS = 10 * PAGE_TOKENS
SECONDS = 200.0  # of simulated time


def leave_out(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """No peer says it any more."""
    send = PeerDriver.send

    def send_others(peer: PeerDriver, message: Message) -> None:
        if not isinstance(message, kind):
            send(peer, message)

    monkeypatch.setattr(PeerDriver, "send", send_others)


async def offered(engine: Engine) -> kvmsgr.PrefillRequest:
    """The one that is called "r"."""

    def found() -> list[kvmsgr.PrefillRequest]:
        return [request for request in engine.node.inbox.by_tag.values() if request.request_id == "r"]

    await until(lambda: bool(found()), "it was offered")
    return found()[0]


def test_a_decoder_that_never_says_it_finished_does_not_keep_its_request_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            await until(lambda: not prefiller.node.inbox.by_tag, "the first one is over")
            leave_out(monkeypatch, Finished)
            fetch = decoder.fetch("r", 7, prefiller, NUM_TOKENS, await decoder.take(num_pages_of(NUM_TOKENS)))
            request = await offered(prefiller)
            await fetch
            await asyncio.wait_for(request.released(), SECONDS)
            assert await asyncio.wait_for(request.cancelled(), SECONDS) is Reason.timeout
            assert not prefiller.node.inbox.by_tag, "it counts against max_requests no more"

    simulate(scenario, 0)


def test_a_request_that_was_not_posted_cannot_have_finished() -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            prefiller.layer_s = 1.0
            fetch = decoder.fetch("r", 7, prefiller, NUM_TOKENS, await decoder.take(num_pages_of(NUM_TOKENS)))
            request = await offered(prefiller)
            rows = request.dispatch.expected_rows
            peer_of(decoder, "p").send(Finished(request_id="r", attempt=fetch.attempt, rows=rows))
            outcome = await asyncio.wait_for(request.outcome(), SECONDS)
            assert (outcome.ok, outcome.reason) == (False, Reason.protocol)
            assert outcome.rows_posted < rows
            await asyncio.wait_for(fetch.released(), SECONDS)

    simulate(scenario, 0)


def test_a_decoder_may_go_away_while_its_finished_is_looked_at_again() -> None:
    """It is compared with the rows posted, and once more a moment later; the request may be over by then."""

    async def scenario(air: Air) -> None:
        wrong: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            await until(lambda: not prefiller.node.inbox.by_tag, "the first one is over")
            prefiller.layer_s = 1.0
            fetch = decoder.fetch("r", 7, prefiller, NUM_TOKENS, await decoder.take(num_pages_of(NUM_TOKENS)))
            request = await offered(prefiller)
            finished = Finished(request_id="r", attempt=fetch.attempt, rows=request.dispatch.expected_rows)
            request.message_received(finished)
            request.peer_lost(Failure(Reason.closed, "it is gone"))
            assert (await asyncio.wait_for(request.outcome(), SECONDS)).reason is Reason.closed
            await asyncio.wait_for(request.released(), SECONDS)
            await asyncio.sleep(2 * COUNT_S)  # of simulated time
        assert not wrong

    simulate(scenario, 0)


def test_a_writer_that_is_held_back_and_forgotten_loses_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, Resume)

    async def scenario(air: Air) -> None:
        async with world(air, ("p", "q"), fence="rotation") as (decoder, p, q):
            await go_live(decoder, p)
            await go_live(decoder, q)
            p.layer_s = 0.5
            decoder.fetch("r", 7, p, NUM_TOKENS, await decoder.take(num_pages_of(NUM_TOKENS)))
            request = await offered(p)
            await lose_with_something_under_way(decoder, q, 8)
            outcome = await asyncio.wait_for(request.outcome(), 10 * decoder.node.config.lease_s)
            assert outcome.reason is Reason.timeout
            assert "has not let us go on" in outcome.detail
            await asyncio.wait_for(request.released(), SECONDS)

    simulate(scenario, 0)


def test_a_resume_that_nobody_waits_for_ends_the_epoch() -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            deceived = next(iter(prefiller.node.peers))
            peer_of(decoder, "p").send(Resume())
            await until(lambda: deceived.failure is not None, "it was noticed")
            assert deceived.failure is not None
            assert deceived.failure.reason is Reason.protocol

    simulate(scenario, 0)


def test_a_peer_that_rotates_again_before_it_has_let_us_go_on_is_lost() -> None:
    """Its Rotated would be sent too early: when some of our links are held for the second time, others not yet."""

    async def scenario(air: Air) -> None:
        async with world(air, fence="rotation") as (decoder, prefiller):
            await go_live(decoder, prefiller)
            prefiller_of, decoder_of = peer_of(decoder, "p"), peer_of(prefiller, "d")
            for _ in range(2):
                prefiller_of.send(Rotate(ranks=prefiller_of.rank_fabric()))
            await until(lambda: decoder_of.failure is not None, "the decoder is lost")
            assert decoder_of.failure is not None
            assert decoder_of.failure.reason is Reason.protocol
            assert "a second Rotate" in decoder_of.failure.detail

    simulate(scenario, 0)
