"""T01, T14, T22: both sides of a request, with everything under way between them, in any order.

Messages travel in order, rows in any; a local completion says nothing about landing. Whatever happens first - a cancel,
a failure, a preemption, the end of an epoch, time - each side ends once, and destination pages come back, or go to
the next attempt, only when no row can land. A failing run names its seed and what happened in it, in order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from kvmsgr.core import attempt, leg, serve
from kvmsgr.core.attempt import AttemptState
from kvmsgr.core.failure import Failure
from kvmsgr.errors import LocalProtocolError
from kvmsgr_protocol import Reason

ROWS = 6
LOST = Failure(Reason.peer_lost, "the connection ended")
PREEMPTED = Failure(Reason.preempted, "the pages are needed")


class Try:
    """One attempt, on both sides."""

    def __init__(self) -> None:
        self.attempt, self.leg = attempt.Attempt("r", ROWS), leg.Leg("r at p")
        self.serve: serve.Serve | None = None
        self.posted = self.completed = self.in_air = self.landed = 0
        self.awaited: int | None = None
        self.source_released = 0
        self.settled: list[serve.SettleOutcome] = []

    @property
    def serve_state(self) -> serve.ServeState | None:
        return self.serve.state if self.serve is not None else None

    @property
    def is_served(self) -> bool:
        return self.serve_state not in (None, serve.ServeState.ended)


class BothSides:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.story: list[str] = []
        self.tries = [Try()]
        self.to_prefiller: deque[tuple[Try, object]] = deque()
        self.to_decoder: deque[tuple[Try, object]] = deque()
        self.live = False
        self.decoder_lost = self.prefiller_lost = self.fenced = False
        self.released = 0
        self.decided: list[object] = []

    @property
    def now(self) -> Try:
        """The attempt that the decoder is at."""
        return self.tries[-1]

    # The decoder

    def feed_leg(self, event: object) -> None:
        now = self.now
        for effect in now.leg.feed(event):
            match effect:
                case leg.FailAttempt(failure):
                    self.feed_attempt(attempt.LegFailed(failure))
                case leg.RestartAttempt(failure):
                    self.feed_attempt(attempt.LegRestarted(failure))
                case leg.AwaitCount(rows):
                    now.awaited = rows
                    if now.landed == rows:
                        self.feed_leg(leg.CountEqual())
                case leg.CheckCount() | leg.AwaitDrained():
                    pass
                case _ if not self.decoder_lost:
                    self.to_prefiller.append((now, effect))
        held = now.attempt.state in (AttemptState.quarantined, AttemptState.restarting)
        if now.leg.state in leg.CLEAN and held:
            self.feed_attempt(attempt.LegsClean())

    def feed_attempt(self, event: object) -> None:
        for effect in self.now.attempt.feed(event):
            match effect:
                case attempt.EndAttempt(None):
                    self.feed_leg(leg.AttemptReady())
                case attempt.EndAttempt(failure):
                    assert failure is not None
                    self.feed_leg(leg.AttemptFailed(failure))
                case attempt.ReleasePages():
                    self.released += 1
                    assert self.released == 1, "the pages came back twice"
                    self.check_nothing_lands()
                case attempt.StartOver():
                    assert not self.decided, "a request that is over begins again"
                    self.check_nothing_lands()
                    self.tries.append(Try())
                    self.feed_leg(leg.PeerLive())
                case attempt.FailPeers():
                    self.lose_prefiller()
                case _:
                    self.decided.append(effect)

    def check_nothing_lands(self) -> None:
        in_air = sum(one.in_air for one in self.tries)
        assert not in_air or self.fenced, f"{in_air} rows can still land in pages that are somebody else's"

    @property
    def pages_held(self) -> bool:
        return not self.released

    def peer_becomes_live(self) -> None:
        self.live = True
        self.feed_leg(leg.PeerLive())

    def decoder_cancels(self) -> None:
        self.feed_attempt(attempt.Cancelled(self.now.landed, "the client left"))

    def time_runs_out(self) -> None:
        self.feed_attempt(attempt.TimeExpired(self.now.landed, 1.0, "late"))

    def lose_prefiller(self) -> None:
        self.decoder_lost = True
        if self.pages_held:
            self.feed_leg(leg.PeerLost(LOST))

    def fence(self) -> None:
        self.fenced = True
        for one in self.tries:
            one.in_air = 0
        if self.pages_held:
            self.feed_leg(leg.Fenced())

    def rows_land(self) -> None:
        flying = self.random.choice([one for one in self.tries if one.in_air])
        for _ in range(self.random.randint(1, flying.in_air)):
            assert self.pages_held, "a row landed in a page that is free"
            assert flying is self.now, "a row of an attempt landed in the pages of the next one"
            flying.in_air -= 1
            flying.landed += 1
            if flying.landed == ROWS:
                self.feed_attempt(attempt.RowsCounted(ROWS))
            if flying.landed == flying.awaited and self.pages_held and flying is self.now:
                self.feed_leg(leg.CountEqual())

    def decoder_hears(self) -> None:
        about, message = self.to_decoder.popleft()
        if self.released or about is not self.now:
            return  # that attempt is forgotten
        match message:
            case serve.SendAccept():
                self.feed_leg(leg.Accepted())
            case serve.SendDecline(failure):
                again = len(self.tries) > 1 and self.now.leg.state is leg.LegState.dispatched
                self.feed_leg(leg.PutOff(failure) if again else leg.Declined(failure))
            case serve.SendSent(rows):
                self.feed_leg(leg.AllPosted(rows))
            case serve.SendFailure(failure):
                self.feed_leg(leg.PeerGaveUp(failure))
            case serve.SendRestarted():
                self.feed_leg(leg.PeerRestarted(PREEMPTED))
            case serve.SendDrained(rows):
                self.feed_leg(leg.Drained(rows))
            case _:
                raise AssertionError(f"no decoder hears {message}")

    # The prefiller

    def feed_serve(self, one: Try, event: object) -> None:
        assert one.serve is not None
        for effect in one.serve.feed(event):
            match effect:
                case serve.StopWrites():
                    self.check_completed(one)
                case serve.ReleasePages():
                    one.source_released += 1
                    assert one.source_released == 1, "the source pages came back twice"
                    assert one.completed == one.posted, "source pages came back while they are read"
                case serve.SettleOutcome():
                    one.settled.append(effect)
                    assert len(one.settled) == 1, f"two outcomes: {one.settled}"
                case serve.Forget():
                    pass
                case _ if not self.prefiller_lost:
                    self.to_decoder.append((one, effect))

    def check_completed(self, one: Try) -> None:
        if one.completed != one.posted:
            return
        if one.serve_state is serve.ServeState.stopping:
            self.feed_serve(one, serve.ReadsEnded(one.posted))
        elif one.posted == ROWS and one.serve_state in (serve.ServeState.accepted, serve.ServeState.arrived):
            self.feed_serve(one, serve.WritesCompleted(one.posted))

    @property
    def served(self) -> list[Try]:
        """The attempts that the prefiller has a record of."""
        return [one for one in self.tries if one.is_served]

    @property
    def answered(self) -> list[Try]:
        """Those that its engine has answered, or need not answer any more."""
        return [one for one in self.tries if one.serve_state not in (None, serve.ServeState.offered)]

    def prefiller_hears(self) -> None:
        about, message = self.to_prefiller.popleft()
        if isinstance(message, leg.SendDispatch):
            about.serve = serve.Serve("r")
        elif not about.is_served:
            pass  # forgotten, and it has been told
        elif isinstance(message, leg.SendFinished):
            self.feed_serve(about, serve.DecoderFinished())
        elif isinstance(message, leg.SendEnd):
            self.feed_serve(about, serve.DecoderFailed(message.failure))

    def engine_accepts(self) -> None:
        self.feed_serve(self.now, serve.EngineAccepted())

    def engine_declines(self) -> None:
        self.feed_serve(self.now, serve.EngineDeclined(Failure(Reason.refused, "no")))

    def engine_fails(self) -> None:
        self.feed_serve(self.random.choice(self.served), serve.Failed(Failure(Reason.engine, "it gave up")))

    def engine_preempts(self) -> None:
        self.feed_serve(self.random.choice(self.answered), serve.Preempted(PREEMPTED))

    def rows_are_posted(self) -> None:
        num = self.random.randint(1, ROWS - self.now.posted)
        self.now.posted += num
        if not self.fenced:
            self.now.in_air += num

    def writes_complete(self) -> None:
        one = self.random.choice([one for one in self.tries if one.completed < one.posted])
        one.completed += self.random.randint(1, one.posted - one.completed)
        self.check_completed(one)

    def lose_decoder(self) -> None:
        self.prefiller_lost = True
        for one in self.served:
            self.feed_serve(one, serve.PeerEnded(LOST))

    # The walk

    def possible(self) -> list[tuple[Callable[[], None], float]]:
        """What can happen now, and how likely it is beside the rest. Trouble is rare, so that most runs get far."""
        now = self.now
        offered = now.serve_state is serve.ServeState.offered
        accepted = now.serve_state is serve.ServeState.accepted
        undecided = now.attempt.state in (AttemptState.pending, AttemptState.restarting)
        every = [
            (self.peer_becomes_live, 1, not self.live and not self.decoder_lost),
            (self.decoder_hears, 1, bool(self.to_decoder) and not self.decoder_lost),
            (self.prefiller_hears, 1, bool(self.to_prefiller) and not self.prefiller_lost),
            (self.engine_accepts, 1, offered),
            (self.engine_declines, 0.1, offered),
            (self.rows_are_posted, 1, accepted and now.posted < ROWS),
            (self.writes_complete, 1, any(one.completed < one.posted for one in self.tries)),
            (self.rows_land, 1, any(one.in_air for one in self.tries)),
            (self.fence, 1, self.decoder_lost and not self.fenced),
            (self.decoder_cancels, 0.1, True),
            (self.time_runs_out, 0.1, undecided),
            (self.engine_fails, 0.1, bool(self.served)),
            (self.engine_preempts, 0.3, bool(self.answered)),
            (self.lose_prefiller, 0.1, not self.decoder_lost),
            (self.lose_decoder, 0.1, not self.prefiller_lost),
        ]
        return [(happens, weight) for happens, weight, now in every if now]

    def walk(self) -> None:
        for _ in range(self.random.randint(0, 60)):
            events, weights = zip(*self.possible(), strict=True)
            self.take(self.random.choices(events, weights)[0])

    def take(self, event: Callable[[], None]) -> None:
        self.story.append(event.__name__)
        event()

    def take_if_possible(self, event: Callable[[BothSides], None]) -> None:
        for possible, _ in self.possible():
            if possible.__name__ == event.__name__:
                self.take(possible)

    def settle(self, *more: Callable[[], None]) -> None:
        """Let everything that is under way arrive."""
        settling = {self.peer_becomes_live, self.decoder_hears, self.prefiller_hears, self.writes_complete, self.fence}
        settling |= {self.rows_land, *more}
        while events := [event for event, _ in self.possible() if event in settling]:
            self.take(self.random.choice(events))

    def come_to_an_end(self) -> None:
        if self.prefiller_lost and not self.decoder_lost:
            self.take(self.lose_prefiller)  # the other end of the same connection
        if self.decoder_lost and not self.prefiller_lost:
            self.take(self.lose_decoder)
        self.take(self.decoder_cancels)
        self.settle()

    def check_end(self) -> None:
        """Nothing may be stranded, undecided, or decided twice."""
        assert len(self.decided) == 1, f"decided {len(self.decided)} times: {self.decided}"
        assert self.released, (
            f"the pages are stranded: leg {self.now.leg.state}, {self.now.landed} of {self.now.posted} rows landed"
        )
        for one in self.tries:
            if one.serve is not None:
                assert one.serve.state is serve.ServeState.ended, f"the prefiller is stuck in {one.serve.state}"
                assert one.source_released
                assert len(one.settled) == 1


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
    BothSides.engine_preempts,
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


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("at", range(len(LIFE) + 1))
def test_t14_a_preempted_request_arrives_by_another_attempt(at: int, restarts: int) -> None:
    """The pages are taken back at each point of a life; then it is let run to its end."""
    for seed in range(50):
        both = BothSides(seed)
        for _ in range(restarts):
            for event in LIFE[:at]:
                both.take_if_possible(event)
            both.take_if_possible(BothSides.engine_preempts)
        both.settle(both.engine_accepts, both.rows_are_posted)
        both.check_end()
        assert both.decided == [attempt.ResolveArrival(ROWS)]
        assert [one.attempt.state for one in both.tries] == [
            *[AttemptState.replaced] * (len(both.tries) - 1),
            AttemptState.ready,
        ]


def test_t14_the_walk_comes_by_every_end_of_a_preemption() -> None:
    """Else it would prove nothing about them."""
    seen: set[AttemptState] = set()
    for seed in range(2000):
        both = BothSides(seed)
        both.walk()
        both.come_to_an_end()
        if len(both.tries) > 1:
            seen.add(both.now.attempt.state)
    assert seen == {AttemptState.ready, AttemptState.released}


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
