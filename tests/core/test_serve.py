"""A serve ends its reads and its request each exactly once, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr.core.failure import Failure
from kvmsgr.core.serve import (
    DecoderFailed,
    DecoderFinished,
    EngineAccepted,
    EngineDeclined,
    Failed,
    Forget,
    NeverAnswered,
    PeerEnded,
    Preempted,
    ReadsEnded,
    ReleasePages,
    SendAccept,
    SendDecline,
    SendDrained,
    SendFailure,
    SendRestarted,
    SendSent,
    Serve,
    ServeState,
    SettleOutcome,
    StopWrites,
    WritesCompleted,
)
from kvmsgr_protocol import Reason

from .machines import EXAMPLES, FAILURE, OTHER, PREEMPTED, events_of


def test_a_whole_life() -> None:
    serve = Serve("r")
    assert serve.feed(EngineAccepted()) == [SendAccept()]
    assert serve.feed(WritesCompleted(10)) == [SendSent(10), ReleasePages(10)]
    assert serve.feed(DecoderFinished()) == [SettleOutcome(None), Forget()]


def test_the_decoder_may_be_ready_before_our_own_completions_are_read() -> None:
    serve = Serve("r")
    serve.feed(EngineAccepted())
    assert serve.feed(DecoderFinished()) == [SettleOutcome(None)]
    assert serve.feed(WritesCompleted(10)) == [ReleasePages(10), Forget()]


def test_sent_is_not_the_outcome() -> None:
    for event in (DecoderFailed(OTHER), PeerEnded(OTHER), NeverAnswered(OTHER)):
        serve = Serve("r")
        serve.feed(EngineAccepted())
        serve.feed(WritesCompleted(10))
        assert serve.feed(event) == [SettleOutcome(OTHER), Forget()]


@pytest.mark.parametrize(
    ("event", "told"), [(Failed(FAILURE), True), (PeerEnded(FAILURE), False), (DecoderFailed(FAILURE), False)]
)
def test_pages_are_held_until_the_last_read_of_them_ends(event: object, told: bool) -> None:
    serve = Serve("r")
    serve.feed(EngineAccepted())
    effects = serve.feed(event)
    assert (SendFailure(FAILURE) in effects) is told
    assert SettleOutcome(FAILURE) in effects
    assert StopWrites() in effects
    assert not any(isinstance(effect, ReleasePages) for effect in effects)
    assert serve.feed(ReadsEnded(5)) == [SendDrained(5), ReleasePages(5), Forget()]


def test_a_preempted_request_is_told_as_such_and_its_reads_are_waited_for() -> None:
    serve = Serve("r")
    serve.feed(EngineAccepted())
    assert serve.feed(Preempted(PREEMPTED)) == [SendRestarted(), SettleOutcome(PREEMPTED), StopWrites()]
    assert serve.feed(Preempted(PREEMPTED)) == []
    assert serve.feed(ReadsEnded(5)) == [SendDrained(5), ReleasePages(5), Forget()]
    assert serve.feed(Preempted(PREEMPTED)) == []


@pytest.mark.parametrize("event", [WritesCompleted(10), DecoderFinished()])
def test_what_the_decoder_has_is_not_preempted(event: object) -> None:
    serve = Serve("r")
    serve.feed(EngineAccepted())
    serve.feed(event)
    state = serve.state
    assert serve.feed(Preempted(PREEMPTED)) == []
    assert serve.state is state


def test_an_engine_that_declines_reads_nothing() -> None:
    busy = Failure(Reason.busy, "no room")
    serve = Serve("r")
    effects = serve.feed(EngineDeclined(busy))
    assert effects == [SendDecline(busy), SettleOutcome(busy), ReleasePages(0), Forget()]


@pytest.mark.parametrize("event", [Failed(FAILURE), DecoderFailed(FAILURE)])
def test_a_request_that_ends_before_the_engine_answered_was_never_taken_up(event: object) -> None:
    effects = Serve("r").feed(event)
    assert effects == [SendDecline(FAILURE), SettleOutcome(FAILURE), ReleasePages(0), Forget()]


def test_a_request_without_rows_is_over_before_the_engine_answers() -> None:
    serve = Serve("r")
    assert serve.feed(DecoderFinished()) == [SettleOutcome(None), ReleasePages(0), Forget()]
    assert serve.feed(EngineAccepted()) == []


@given(st.lists(st.sampled_from([kind for kind in EXAMPLES if kind.__module__ == Serve.__module__]), max_size=12))
def test_in_any_order_each_end_comes_once_and_a_stop_before_a_release(events: list[type]) -> None:
    serve = Serve("r")
    seen: list[object] = []
    for event in events:
        if event in events_of(Serve, serve.state):
            seen += serve.feed(EXAMPLES[event])
    settled = [effect for effect in seen if isinstance(effect, SettleOutcome)]
    released = [effect for effect in seen if isinstance(effect, ReleasePages)]
    assert len(settled) <= 1
    assert len(released) <= 1
    assert seen.count(Forget()) == (serve.state is ServeState.ended)
    if serve.state is ServeState.ended:
        assert len(settled) == len(released) == 1
        assert seen[-1] == Forget()
    if serve.state is ServeState.stopping:
        assert not released
        assert seen.count(StopWrites()) == 1
