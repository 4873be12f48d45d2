"""T01, T22: both sides of a request, with everything under way between them, in any order.

Messages travel in order, rows in any; a local completion says nothing about landing. Whatever happens first - a cancel,
a failure, the end of an epoch, time - each side ends once, and destination pages come back only when no row can land.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvmsgr.core import fetch, leg, serve
from kvmsgr.core.failure import Failure
from kvmsgr_protocol import Reason

ROWS = 6


class BothSides(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fetch, self.leg = fetch.Fetch("r", ROWS), leg.Leg("r at p")
        self.serve: serve.Serve | None = None
        self.to_prefiller: deque[object] = deque()
        self.to_decoder: deque[object] = deque()
        self.posted = self.completed = self.in_air = self.landed = 0
        self.awaited: int | None = None
        self.writing = self.stopped = False
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

    @rule()
    @precondition(lambda self: self.leg.state in (leg.LegState.waiting, leg.LegState.unsent) and not self.decoder_lost)
    def peer_becomes_live(self) -> None:
        self.feed_leg(leg.PeerLive())

    @rule(why=st.sampled_from(["cancel", "time"]))
    def decoder_ends_it(self, why: str) -> None:
        if why == "cancel":
            self.feed_fetch(fetch.Cancelled(self.landed, "the client left"))
        elif self.fetch.state is fetch.FetchState.pending:
            self.feed_fetch(fetch.TimeExpired(self.landed, 1.0))

    @rule()
    @precondition(lambda self: not self.decoder_lost)
    def lose_prefiller(self) -> None:
        self.decoder_lost = True
        if self.pages_held:
            self.feed_leg(leg.PeerLost(Failure(Reason.peer_lost, "the connection ended")))

    @rule()
    @precondition(lambda self: self.decoder_lost and not self.fenced)
    def fence(self) -> None:
        self.fenced = True
        self.in_air = 0
        if self.pages_held:
            self.feed_leg(leg.Fenced())

    @rule(num=st.integers(1, ROWS))
    @precondition(lambda self: self.in_air)
    def rows_land(self, num: int) -> None:
        for _ in range(min(num, self.in_air)):
            assert self.pages_held, "a row landed in a page that is free"
            self.in_air -= 1
            self.landed += 1
            if self.landed == ROWS:
                self.feed_fetch(fetch.RowsCounted(ROWS))
            if self.landed == self.awaited and self.pages_held:
                self.feed_leg(leg.CountEqual())

    @rule()
    @precondition(lambda self: self.to_decoder and not self.decoder_lost)
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
                    self.stopped = True
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

    @rule()
    @precondition(lambda self: self.to_prefiller and not self.prefiller_lost)
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

    @rule(answer=st.sampled_from(["accept", "decline", "fail"]))
    @precondition(lambda self: self.is_served)
    def engine_says(self, answer: str) -> None:
        assert self.serve is not None
        if answer == "fail":
            self.feed_serve(serve.Failed(Failure(Reason.engine, "it gave up")))
        elif self.serve.state is serve.ServeState.offered:
            declined = serve.EngineDeclined(Failure(Reason.refused, "no"))
            self.feed_serve(serve.EngineAccepted() if answer == "accept" else declined)

    @rule(num=st.integers(1, ROWS))
    @precondition(lambda self: self.is_served and self.serve.state is serve.ServeState.accepted and self.posted < ROWS)
    def rows_are_posted(self, num: int) -> None:
        num = min(num, ROWS - self.posted)
        self.posted += num
        if not self.fenced:
            self.in_air += num

    @rule(num=st.integers(1, ROWS))
    @precondition(lambda self: self.completed < self.posted)
    def writes_complete(self, num: int) -> None:
        self.completed = min(self.posted, self.completed + num)
        self.check_completed()

    @rule()
    @precondition(lambda self: not self.prefiller_lost)
    def lose_decoder(self) -> None:
        self.prefiller_lost = True
        if self.is_served:
            self.feed_serve(serve.PeerEnded(Failure(Reason.peer_lost, "the connection ended")))

    def teardown(self) -> None:
        """Let everything that is under way arrive; nothing may be stranded, undecided, or decided twice."""
        if self.prefiller_lost and not self.decoder_lost:
            self.lose_prefiller()  # the other end of the same connection
        if self.decoder_lost and not self.prefiller_lost:
            self.lose_decoder()
        if self.leg.state is leg.LegState.waiting and not self.decoder_lost:
            self.peer_becomes_live()
        self.feed_fetch(fetch.Cancelled(self.landed, "the test is over"))
        while self.to_prefiller or self.to_decoder or self.completed < self.posted:
            if self.to_prefiller and not self.prefiller_lost:
                self.prefiller_hears()
            elif self.to_decoder and not self.decoder_lost:
                self.decoder_hears()
            elif self.completed < self.posted:
                self.writes_complete(ROWS)
            else:
                break  # what was said on a connection that has ended
        if self.decoder_lost and not self.fenced:
            self.fence()
        if self.in_air:
            self.rows_land(ROWS)
        assert len(self.decided) == 1, f"decided {len(self.decided)} times: {self.decided}"
        assert self.released, (
            f"the pages are stranded: leg {self.leg.state}, {self.landed} of {self.posted} rows landed"
        )
        if self.serve is not None:
            assert self.serve.state is serve.ServeState.ended, f"the prefiller is stuck in {self.serve.state}"
            assert self.source_released
            assert len(self.settled) == 1


TestBothSides = BothSides.TestCase
TestBothSides.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
