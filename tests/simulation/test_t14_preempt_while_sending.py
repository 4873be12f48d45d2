"""T14: the prefiller takes a request's pages back while writes of it are in the air, and the decoder tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import kvmsgr
from kvmsgr.errors import (
    BusyError,
    ClosedError,
    LocalProtocolError,
    PeerLostError,
    RequestCancelledError,
    TransferError,
)
from kvmsgr.fabric.inprocess import Air
from kvmsgr.testing.loop import simulate
from kvmsgr_protocol import Drained, Reason

from .test_liars import leave_out
from .world import PAGE_TOKENS, PAGES, ROWS_A_POSITION, Engine, go_live, num_pages_of, until, world

SEEDS = range(6)
PAGES_A_CHUNK, NUM_CHUNKS = 6, 3
CHUNK = PAGES_A_CHUNK * PAGE_TOKENS
NUM_TOKENS = NUM_CHUNKS * CHUNK + 1
NUM_PAGES = num_pages_of(NUM_TOKENS)
CHUNK_ROWS = CHUNK * ROWS_A_POSITION
SECONDS = 30.0  # of simulated time


class Preempted:
    """The request "a", where it comes to a prefiller for the first time: its pages are taken back after the first of
    three chunks, once something is so. The step of the second one is running then."""

    def __init__(self, prefiller: Engine, when: Callable[[], bool] = lambda: True) -> None:
        self._when = when
        self.requests: list[kvmsgr.PrefillRequest] = []
        self.rows: asyncio.Future[int] | None = None
        self.called = False
        prefiller.chunk, prefiller.scattered = CHUNK, True
        prefiller.on_step = self._after_step

    def _after_step(self, request: kvmsgr.PrefillRequest) -> None:
        if request.request_id != "a":
            return
        self.requests.append(request)
        if self.rows is None:
            self.rows = asyncio.ensure_future(self._preempt(request))

    async def _preempt(self, request: kvmsgr.PrefillRequest) -> int:
        await until(self._when, "now the pages are needed")
        self.called = True
        return await request.preempt()

    @property
    def ended(self) -> bool:
        return self.rows is not None and self.rows.done()

    async def begun(self) -> asyncio.Future[int]:
        await until(lambda: self.called, "the pages are taken back")
        assert self.rows is not None
        return self.rows


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("completes", [True, False], ids=["complete early", "complete late"])
@pytest.mark.parametrize("fence", ["endpoint", "rotation"])
def test_t14_pages_go_to_another_request_while_writes_are_in_the_air(seed: int, completes: bool, fence: str) -> None:
    async def scenario(air: Air) -> None:
        async with world(air, fence=fence) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            others = await prefiller.take(PAGES - NUM_PAGES)
            pages, where = await decoder.take(NUM_PAGES), decoder.address("p")
            air.hold(where, completes=completes)
            preempted, prefiller.layer_s = Preempted(prefiller, lambda: len(air.flights(where)) >= 16), 0.05
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, pages)
            rows = await preempted.begun()
            # It wants them for this one.
            pages_b = await decoder.take(NUM_PAGES)
            other = decoder.fetch("b", 3, prefiller, NUM_TOKENS, pages_b)
            await asyncio.sleep(0.5)
            assert preempted.ended is completes, "it ends when every read of these pages is over, and not before"
            assert not fetch.done
            assert fetch.num_restarts == 0, "nothing proves yet that the first attempt has ended"
            state = decoder.node.fabric.state
            (leg,) = (leg for leg in state.legs() if leg.request_id == "a")
            assert (leg.state, leg.reason) == ("counting" if completes else "draining", "preempted")
            assert "have landed" in leg.why
            assert (state.quarantined, fetch.quarantine) == (0, None), "the request is alive"
            air.release(where)
            await asyncio.wait_for(asyncio.shield(rows), SECONDS)
            assert CHUNK_ROWS <= rows.result() < NUM_CHUNKS * CHUNK_ROWS
            assert await preempted.requests[0].cancelled() is Reason.preempted
            await asyncio.wait_for(other, SECONDS)
            decoder.check(3, NUM_TOKENS, pages_b)
            arrival = await asyncio.wait_for(fetch, SECONDS)
            decoder.check(2, NUM_TOKENS, pages)
            assert (arrival.rows, fetch.rows_landed, fetch.num_restarts) == (NUM_CHUNKS * CHUNK_ROWS,) * 2 + (1,)
            assert await fetch is arrival
            again = preempted.requests[-1]
            assert again is not preempted.requests[0]
            assert (await again.outcome()).ok
            for one, taken in ((fetch, pages), (other, pages_b)):
                await one.released()
                await decoder.give(taken)
            await prefiller.give(others)
            await until(lambda: prefiller.num_free == PAGES, "source pages free")
            assert decoder.poller.stats()["strays"] == 0
            assert not decoder.node.fabric.state.legs()

    simulate(scenario, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_t14_again_and_again(seed: int) -> None:
    """Each attempt but the last is preempted, at any point: before anything is posted, or when all of it is."""

    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            prefiller.chunk, prefiller.layer_s = CHUNK, 0.01
            preempting: list[asyncio.Future[int]] = []
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, await decoder.take(NUM_PAGES))
            for _ in range(5):
                started = fetch.num_restarts

                def running(started: int = started) -> list[kvmsgr.PrefillRequest]:
                    alive = prefiller.node.inbox.by_tag.values()
                    return [one for one in alive if fetch.num_restarts == started and not (one.offered or one.ended)]

                await until(lambda: bool(running()) or fetch.done, "it was accepted")
                await asyncio.sleep(0.02 * prefiller.rng.random())
                preempting += [asyncio.ensure_future(request.preempt()) for request in running()]
                await until(lambda: fetch.done or fetch.num_restarts > started, "it begins again, or was complete")  # noqa: B023
            assert (await asyncio.wait_for(fetch, SECONDS)).rows == NUM_CHUNKS * CHUNK_ROWS
            await asyncio.wait_for(asyncio.gather(*preempting), SECONDS)
            assert 0 < fetch.num_restarts <= len(preempting)

    simulate(scenario, seed)


def cancel(decoder: Engine, prefiller: Engine, fetch: kvmsgr.Fetch) -> None:
    fetch.cancel()


def lose(decoder: Engine, prefiller: Engine, fetch: kvmsgr.Fetch) -> None:
    prefiller.poller.vanish()


def close_decoder(decoder: Engine, prefiller: Engine, fetch: kvmsgr.Fetch) -> None:
    decoder._spawn(decoder.messenger.close())


def close_prefiller(decoder: Engine, prefiller: Engine, fetch: kvmsgr.Fetch) -> None:
    prefiller._spawn(prefiller.messenger.close())


def lose_rank(decoder: Engine, prefiller: Engine, fetch: kvmsgr.Fetch) -> None:
    decoder.messenger.rank_lost(0, "the test says so")


RIVALS = {
    cancel: {Reason.cancelled},
    lose: {Reason.peer_lost},
    close_decoder: {Reason.closed},
    close_prefiller: {Reason.closed, Reason.peer_lost},
    lose_rank: {Reason.rank_lost},
}
"""What may happen, and the reasons that it may be given."""


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.__name__)
def test_t14_preempt_races_with_other_ends(rival: Callable[[Engine, Engine, kvmsgr.Fetch], None], seed: int) -> None:
    """A preemption and something else, at any distance: the request ends once, and all pages come back."""

    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            prefiller.layer_s, where = 0.01, decoder.address("p")
            air.hold(where, completes=bool(seed % 2))
            loop = asyncio.get_running_loop()
            preempted = Preempted(prefiller)
            pages = await decoder.take(NUM_PAGES)
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, pages)
            rows = await preempted.begun()
            if rival is not lose:
                loop.call_later(0.2 * prefiller.rng.random(), air.release, where)
            await asyncio.sleep(0.3 * prefiller.rng.random())
            was_decided = fetch.done
            rival(decoder, prefiller, fetch)
            try:
                await asyncio.wait_for(fetch, SECONDS)
                arrived = True
            except TransferError as error:
                arrived, reason = False, error.reason
            if arrived:
                decoder.check(2, NUM_TOKENS, pages)
            else:
                assert reason in RIVALS[rival]
                assert not was_decided
            await asyncio.wait_for(fetch.released(), SECONDS)
            if rival is lose:
                await prefiller.messenger.close()  # its poller did nothing any more
            await asyncio.wait_for(rows, SECONDS)
            await decoder.give(pages)
            if rival is not close_decoder:
                assert not decoder.node.fabric.state.legs()

    simulate(scenario, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_t14_writes_that_never_complete_end_with_the_endpoint(seed: int) -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            air.hold(decoder.address("p"), completes=False)
            preempted = Preempted(prefiller)
            pages = await decoder.take(NUM_PAGES)
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, pages)
            rows = await preempted.begun()
            with pytest.raises(PeerLostError):
                await asyncio.wait_for(fetch, SECONDS)
            await asyncio.wait_for(rows, SECONDS)
            await asyncio.wait_for(fetch.released(), SECONDS)
            await decoder.give(pages)
            await until(lambda: prefiller.num_free == PAGES, "source pages free")

    simulate(scenario, seed)


def test_t14_a_peer_that_does_not_say_what_it_posted_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(air: Air) -> None:
        async with world(air, drain_timeout_s=3.0) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            leave_out(monkeypatch, Drained)
            preempted = Preempted(prefiller)
            pages = await decoder.take(NUM_PAGES)
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, pages)
            await preempted.begun()
            with pytest.raises(TransferError, match=r"has not said within 3 s how many rows it posted"):
                await asyncio.wait_for(fetch, SECONDS)
            await asyncio.wait_for(fetch.released(), SECONDS)
            assert fetch.num_restarts == 0

    simulate(scenario, 0)


def test_t14_the_time_allowed_goes_on() -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            loop, where = asyncio.get_running_loop(), decoder.address("p")
            air.hold(where)
            preempted = Preempted(prefiller)
            prefiller.layer_s = 0.001
            began_s = loop.time()
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, await decoder.take(NUM_PAGES), time_allowed_s=2.0)
            await preempted.begun()
            await asyncio.sleep(0.9)
            prefiller.on_step = lambda request: None
            prefiller.layer_s = 100.0
            air.release(where)
            await until(lambda: fetch.num_restarts == 1, "it begins again")
            left_s = next(iter(prefiller.node.inbox.by_tag.values())).dispatch.time_allowed_s
            assert left_s == pytest.approx(began_s + 2.0 - loop.time(), abs=0.05)
            with pytest.raises(TransferError, match="in the 2 s allowed"):
                await fetch
            assert loop.time() - began_s == pytest.approx(2.0, abs=0.01)
            prefiller.layer_s = 0.0

    simulate(scenario, 0)


def test_t14_without_a_slot_for_the_next_attempt_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_slots_are_free(decoder: Engine) -> bool:
        monkeypatch.setattr(decoder.node.slots, "take", lambda: None)
        return True

    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            preempted = Preempted(prefiller, lambda: no_slots_are_free(decoder))
            pages = await decoder.take(NUM_PAGES)
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, pages)
            await preempted.begun()
            with pytest.raises(BusyError, match="every immediate slot is held"):
                await asyncio.wait_for(fetch, SECONDS)
            await fetch.released()
            fetch.cancel()
            assert (fetch.done, fetch.quarantine, fetch.num_restarts) == (True, None, 0)
            assert not decoder.node.fabric.state.legs()
            assert decoder.node.slots.num_held == 1, "the heartbeats have one"

    simulate(scenario, 0)


def test_t14_what_was_sent_is_not_taken_back() -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            requests: list[kvmsgr.PrefillRequest] = []
            prefiller.on_step = requests.append
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, await decoder.take(NUM_PAGES))
            await until(lambda: bool(requests), "all was computed")
            posted = await requests[0].released()
            assert await requests[0].preempt() == posted == NUM_CHUNKS * CHUNK_ROWS
            await fetch
            assert (await requests[0].outcome()).ok
            assert await requests[0].preempt() == posted
            assert fetch.num_restarts == 0

    simulate(scenario, 0)


def test_t14_a_request_that_was_not_accepted_cannot_be_preempted() -> None:
    async def scenario(air: Air) -> None:
        async with world(air, ()) as (decoder,):
            fetch = decoder.fetch("a", 2, decoder, NUM_TOKENS, await decoder.take(NUM_PAGES))
            request = await anext(decoder.messenger.requests())
            with pytest.raises(LocalProtocolError, match=r"not accepted: to put it off, call busy\(\)"):
                await request.preempt()
            request.busy("no room", 2.0)
            with pytest.raises(BusyError):
                await fetch

    simulate(scenario, 0)


def test_t14_what_is_being_preempted_is_not_answered_again() -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            air.hold(decoder.address("p"), completes=False)
            preempted = Preempted(prefiller)
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, await decoder.take(NUM_PAGES))
            rows = await preempted.begun()
            await asyncio.sleep(0.01)
            assert not rows.done()
            request = preempted.requests[0]
            for answer in (request.accept, lambda: request.refuse("no"), lambda: request.busy("later")):
                with pytest.raises(LocalProtocolError, match=r"was accepted before; to give it up, call fail\(\)"):
                    answer()
            air.release(decoder.address("p"))
            await asyncio.wait_for(rows, SECONDS)
            request.accept()  # over: does nothing
            await asyncio.wait_for(fetch, SECONDS)

    simulate(scenario, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_t14_leaving_the_block_while_it_begins_again(seed: int) -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            where = decoder.address("p")
            air.hold(where, completes=bool(seed % 2))
            preempted = Preempted(prefiller)
            pages = await decoder.take(NUM_PAGES)
            async with decoder.fetch("a", 2, prefiller, NUM_TOKENS, pages) as fetch:
                await preempted.begun()
                await asyncio.sleep(0.1 * prefiller.rng.random())
                asyncio.get_running_loop().call_later(0.2, air.release, where)
            await decoder.give(pages)
            with pytest.raises(RequestCancelledError):
                await fetch
            assert fetch.num_restarts == 0

    simulate(scenario, seed)


def test_t14_a_messenger_that_closes_meanwhile_says_so() -> None:
    async def scenario(air: Air) -> None:
        async with world(air) as (decoder, prefiller):
            await go_live(decoder, prefiller)
            air.hold(decoder.address("p"))
            preempted = Preempted(prefiller)
            fetch = decoder.fetch("a", 2, prefiller, NUM_TOKENS, await decoder.take(NUM_PAGES))
            await preempted.begun()
            await until(lambda: str(fetch._attempt.state) == "restarting", "it waits for the proof")
            await decoder.messenger.close()
            with pytest.raises(ClosedError):
                await fetch
            await fetch.released()

    simulate(scenario, 0)
