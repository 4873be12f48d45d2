"""T01, T22: both sides of a request, with everything under way between them, in any order.

Messages travel in order, rows in any; a local completion says nothing about landing. Whatever happens first - a cancel,
a failure, the end of an epoch, time - each side ends once, and destination pages come back only when no row can land.
A failing run names its seed and what happened in it, in order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from kvmsgr.core import fetch, leg, serve
from kvmsgr.core.failure import Failure
from kvmsgr.errors import LocalProtocolError
from kvmsgr_protocol import Reason

ROWS = 6


class BothSides:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.story: list[str] = []
        self.fetch, self.leg = fetch.Fetch("r", ROWS), leg.Leg("r at p")
        self.serve: serve.Serve | None = None
        self.to_prefiller: deque[object] = deque()
        self.to_decoder: deque[object] = deque()
        self.posted = self.completed = self.in_air = self.landed = 0
        self.awaited: int | None = None
        self.live = False
        self.decoder_lost = self.prefiller_lost = self.fenced = False
        self.released = self.source_released = 0
        self.decided: list[object] = []
        self.settled: list[object] = []

    # The decoder

    def feed_leg(self, event: object) -> None:
        for effect in self.leg.feed(event):
            match effect:
                case leg.FailAttempt(failure):
                    self.feed_fetch(fetch.LegFailed(failure))
                case leg.AwaitCount(rows):
                    self.awaited = rows
                    if self.landed == rows:
                        self.feed_leg(leg.CountEqual())
                case leg.CheckCount():
                    pass
                case _ if not self.decoder_lost:
                    self.to_prefiller.append(effect)
        if self.leg.state in leg.CLEAN and self.fetch.state is fetch.FetchState.quarantined:
            self.feed_fetch(fetch.LegsClean())

    def feed_fetch(self, event: object) -> None:
        for effect in self.fetch.feed(event):
            match effect:
                case fetch.EndAttempt(None):
                    self.feed_leg(leg.AttemptReady())
                case fetch.EndAttempt(failure):
                    assert failure is not None
                    self.feed_leg(leg.AttemptFailed(failure))
                case fetch.ReleasePages():
                    self.released += 1
                    assert self.released == 1, "the pages came back twice"
                    assert not self.in_air or self.fenced, f"{self.in_air} rows can still land in pages that are free"
                case fetch.FailPeers():
                    self.lose_prefiller()
                case _:
                    self.decided.append(effect)

    @property
    def pages_held(self) -> bool:
        return not self.released

    def peer_becomes_live(self) -> None:
        self.live = True
        self.feed_leg(leg.PeerLive())

    def decoder_cancels(self) -> None:
        self.feed_fetch(fetch.Cancelled(self.landed, "the client left"))

    def time_runs_out(self) -> None:
        self.feed_fetch(fetch.TimeExpired(self.landed, 1.0))

    def lose_prefiller(self) -> None:
        self.decoder_lost = True
        if self.pages_held:
            self.feed_leg(leg.PeerLost(Failure(Reason.peer_lost, "the connection ended")))

    def fence(self) -> None:
        self.fenced = True
        self.in_air = 0
        if self.pages_held:
            self.feed_leg(leg.Fenced())

    def rows_land(self) -> None:
        for _ in range(self.random.randint(1, self.in_air)):
            assert self.pages_held, "a row landed in a page that is free"
            self.in_air -= 1
            self.landed += 1
            if self.landed == ROWS:
                self.feed_fetch(fetch.RowsCounted(ROWS))
            if self.landed == self.awaited and self.pages_held:
                self.feed_leg(leg.CountEqual())

    def decoder_hears(self) -> None:
        message = self.to_decoder.popleft()
        if self.released:
            return  # the request is forgotten
        match message:
            case serve.SendAccept():
                self.feed_leg(leg.Accepted())
            case serve.SendDecline(failure):
                self.feed_leg(leg.Declined(failure))
            case serve.SendSent(rows):
                self.feed_leg(leg.AllPosted(rows))
            case serve.SendFailure(failure):
                self.feed_leg(leg.PeerGaveUp(failure))
            case serve.SendDrained(rows):
                self.feed_leg(leg.Drained(rows))

    # The prefiller

    def feed_serve(self, event: object) -> None:
        assert self.serve is not None
        for effect in self.serve.feed(event):
            match effect:
                case serve.StopWrites():
                    self.check_completed()
                case serve.ReleasePages():
                    self.source_released += 1
                    assert self.source_released == 1, "the source pages came back twice"
                    assert self.completed == self.posted, "source pages came back while they are read"
                case serve.SettleOutcome():
                    self.settled.append(effect)
                    assert len(self.settled) == 1, f"two outcomes: {self.settled}"
                case serve.Forget():
                    pass
                case _ if not self.prefiller_lost:
                    self.to_decoder.append(effect)

    def check_completed(self) -> None:
        assert self.serve is not None
        if self.completed != self.posted:
            return
        if self.serve.state is serve.ServeState.stopping:
            self.feed_serve(serve.ReadsEnded(self.posted))
        elif self.posted == ROWS and self.serve.state in (serve.ServeState.accepted, serve.ServeState.arrived):
            self.feed_serve(serve.WritesCompleted(self.posted))

    @property
    def is_served(self) -> bool:
        return self.serve is not None and self.serve.state is not serve.ServeState.ended

    def prefiller_hears(self) -> None:
        message = self.to_prefiller.popleft()
        if isinstance(message, leg.SendDispatch):
            self.serve = serve.Serve("r")
        elif not self.is_served:
            pass  # forgotten, and it has been told
        elif isinstance(message, leg.SendFinished):
            self.feed_serve(serve.DecoderFinished())
        elif isinstance(message, leg.SendEnd):
            self.feed_serve(serve.DecoderFailed(message.failure))

    def engine_accepts(self) -> None:
        self.feed_serve(serve.EngineAccepted())

    def engine_declines(self) -> None:
        self.feed_serve(serve.EngineDeclined(Failure(Reason.refused, "no")))

    def engine_fails(self) -> None:
        self.feed_serve(serve.Failed(Failure(Reason.engine, "it gave up")))

    def rows_are_posted(self) -> None:
        num = self.random.randint(1, ROWS - self.posted)
        self.posted += num
        if not self.fenced:
            self.in_air += num

    def writes_complete(self) -> None:
        self.completed += self.random.randint(1, self.posted - self.completed)
        self.check_completed()

    def lose_decoder(self) -> None:
        self.prefiller_lost = True
        if self.is_served:
            self.feed_serve(serve.PeerEnded(Failure(Reason.peer_lost, "the connection ended")))

    # The walk

    def possible(self) -> list[tuple[Callable[[], None], float]]:
        """What can happen now, and how likely it is beside the rest. Trouble is rare, so that most runs get far."""
        at = self.serve.state if self.serve is not None else None
        offered, accepted = at is serve.ServeState.offered, at is serve.ServeState.accepted
        every = [
            (self.peer_becomes_live, 1, not self.live and not self.decoder_lost),
            (self.decoder_hears, 1, bool(self.to_decoder) and not self.decoder_lost),
            (self.prefiller_hears, 1, bool(self.to_prefiller) and not self.prefiller_lost),
            (self.engine_accepts, 1, offered),
            (self.engine_declines, 0.1, offered),
            (self.rows_are_posted, 1, accepted and self.posted < ROWS),
            (self.writes_complete, 1, self.completed < self.posted),
            (self.rows_land, 1, self.in_air > 0),
            (self.fence, 1, self.decoder_lost and not self.fenced),
            (self.decoder_cancels, 0.2, True),
            (self.time_runs_out, 0.1, self.fetch.state is fetch.FetchState.pending),
            (self.engine_fails, 0.1, self.is_served),
            (self.lose_prefiller, 0.1, not self.decoder_lost),
            (self.lose_decoder, 0.1, not self.prefiller_lost),
        ]
        return [(happens, weight) for happens, weight, now in every if now]

    def walk(self) -> None:
        for _ in range(self.random.randint(0, 40)):
            events, weights = zip(*self.possible(), strict=True)
            self.take(self.random.choices(events, weights)[0])

    def take(self, event: Callable[[], None]) -> None:
        self.story.append(event.__name__)
        event()

    def take_if_possible(self, event: Callable[[BothSides], None]) -> None:
        for possible, _ in self.possible():
            if possible.__name__ == event.__name__:
                self.take(possible)

    def come_to_an_end(self) -> None:
        """Let everything that is under way arrive."""
        if self.prefiller_lost and not self.decoder_lost:
            self.take(self.lose_prefiller)  # the other end of the same connection
        if self.decoder_lost and not self.prefiller_lost:
            self.take(self.lose_decoder)
        self.take(self.decoder_cancels)
        settling = {self.peer_becomes_live, self.decoder_hears, self.prefiller_hears, self.writes_complete, self.fence}
        settling.add(self.rows_land)
        while events := [event for event, _ in self.possible() if event in settling]:
            self.take(self.random.choice(events))

    def check_end(self) -> None:
        """Nothing may be stranded, undecided, or decided twice."""
        assert len(self.decided) == 1, f"decided {len(self.decided)} times: {self.decided}"
        assert self.released, (
            f"the pages are stranded: leg {self.leg.state}, {self.landed} of {self.posted} rows landed"
        )
        if self.serve is not None:
            assert self.serve.state is serve.ServeState.ended, f"the prefiller is stuck in {self.serve.state}"
            assert self.source_released
            assert len(self.settled) == 1


LIFE = [
    BothSides.peer_becomes_live,
    BothSides.prefiller_hears,
    BothSides.engine_accepts,
    BothSides.decoder_hears,
    BothSides.rows_are_posted,
    BothSides.rows_land,
    BothSides.writes_complete,
    BothSides.decoder_hears,
    BothSides.prefiller_hears,
]
RIVALS = [
    BothSides.time_runs_out,
    BothSides.engine_fails,
    BothSides.engine_declines,
    BothSides.lose_prefiller,
    BothSides.lose_decoder,
    BothSides.fence,
]


@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize("cancel_first", [True, False])
@pytest.mark.parametrize("rival", [None, *RIVALS], ids=lambda rival: rival.__name__ if rival else "the next event")
@pytest.mark.parametrize("at", range(len(LIFE) + 1))
def test_t22_cancel_races_with_every_transition(
    at: int, rival: Callable[[BothSides], None] | None, cancel_first: bool, cancels: int
) -> None:
    """T22: at each point of a life, a cancel (or two) and another event in both orders, within one turn."""
    both = BothSides(seed=at)
    for event in LIFE[:at]:
        both.take_if_possible(event)
    race = [BothSides.decoder_cancels] * cancels
    natural = rival or (LIFE[at] if at < len(LIFE) else BothSides.decoder_cancels)
    for event in [*race, natural] if cancel_first else [natural, *race]:
        both.take_if_possible(event)
    both.come_to_an_end()
    both.check_end()


@pytest.mark.parametrize("block", range(10))
def test_t01_pages_come_back_once_and_only_when_nothing_can_land(block: int) -> None:
    for seed in range(block * 1000, block * 1000 + 1000):
        both = BothSides(seed)
        try:
            both.walk()
            both.come_to_an_end()
            both.check_end()
        except (AssertionError, LocalProtocolError) as error:
            raise AssertionError(f"seed {seed}: {error}\nafter {', '.join(both.story)}") from error
