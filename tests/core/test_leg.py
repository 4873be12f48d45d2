"""A leg tells its peer exactly what the peer needs to know, and says when none of its writes can land."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr.core.failure import Failure
from kvmsgr.core.leg import (
    CLEAN,
    Accepted,
    AllPosted,
    AttemptFailed,
    AttemptReady,
    AwaitCount,
    AwaitDrained,
    CheckCount,
    CountEqual,
    Declined,
    Drained,
    FailAttempt,
    Fenced,
    Leg,
    LegState,
    PeerGaveUp,
    PeerLive,
    PeerLost,
    PeerRestarted,
    PutOff,
    RestartAttempt,
    SendDispatch,
    SendEnd,
    SendFinished,
)
from kvmsgr_protocol import Reason

from .machines import BUSY, EXAMPLES, FAILURE, PREEMPTED, events_of


def fed(*events: object) -> tuple[Leg, list[object]]:
    leg = Leg("r at p")
    effects: list[object] = []
    for event in events:
        effects = leg.feed(event)
    return leg, effects


def test_a_whole_life() -> None:
    leg = Leg("r at p")
    assert leg.feed(PeerLive()) == [SendDispatch()]
    assert leg.feed(Accepted()) == []
    assert leg.feed(AllPosted(10)) == [CheckCount(10)]
    assert leg.feed(AttemptReady()) == [SendFinished()]
    assert leg.state is LegState.finished


def test_the_count_may_be_complete_before_the_peer_has_said_anything() -> None:
    leg, effects = fed(PeerLive(), AttemptReady())
    assert effects == [SendFinished()]
    assert leg.feed(Accepted()) == leg.feed(AllPosted(10)) == []


def test_a_request_without_rows_still_releases_its_prefiller() -> None:
    leg, effects = fed(AttemptReady())
    assert effects == []
    assert leg.feed(PeerLive()) == [SendDispatch(), SendFinished()]


def test_a_peer_that_declined_leaves_a_clean_leg() -> None:
    busy = Failure(Reason.busy, "no room")
    leg, effects = fed(PeerLive(), Declined(busy))
    assert effects == [FailAttempt(busy)]
    assert leg.state in CLEAN


def test_a_decline_that_arrives_after_the_failure_still_proves_the_leg_clean() -> None:
    leg, _ = fed(PeerLive(), AttemptFailed(FAILURE))
    assert leg.state not in CLEAN
    leg.feed(Declined(Failure(Reason.refused, "no")))
    assert leg.state in CLEAN


def test_a_peer_that_was_never_reached_leaves_a_clean_leg() -> None:
    leg, effects = fed(PeerLost(FAILURE))
    assert effects == [FailAttempt(FAILURE)]
    assert leg.state in CLEAN


def test_a_failure_elsewhere_is_told_to_a_peer_that_works_on_it() -> None:
    for taken in ([], [Accepted()], [Accepted(), AllPosted(10)]):
        leg, effects = fed(PeerLive(), *taken, AttemptFailed(FAILURE))
        assert effects[0] == SendEnd(FAILURE)
        assert leg.state not in CLEAN


def test_a_peer_that_failed_is_not_told_so_again() -> None:
    for gone, owed in ((PeerGaveUp(FAILURE), [AwaitDrained()]), (PeerLost(FAILURE), [])):
        leg, effects = fed(PeerLive(), Accepted(), gone)
        assert effects == [FailAttempt(FAILURE), *owed]
        assert leg.feed(AttemptFailed(FAILURE)) == []
        assert leg.state not in CLEAN


def test_a_peer_that_took_its_pages_back_ends_the_attempt_and_must_say_what_it_posted() -> None:
    leg, effects = fed(PeerLive(), Accepted(), PeerRestarted(PREEMPTED))
    assert effects == [RestartAttempt(PREEMPTED), AwaitDrained()]
    assert leg.feed(AttemptFailed(PREEMPTED)) == []
    assert leg.state not in CLEAN
    leg.feed(Drained(5))
    leg.feed(CountEqual())
    assert leg.state is LegState.drained


def test_a_peer_that_is_busy_after_it_took_its_pages_back_ends_the_attempt_alone() -> None:
    leg, effects = fed(PeerLive(), PutOff(BUSY))
    assert effects == [RestartAttempt(BUSY)]
    assert leg.feed(AttemptFailed(BUSY)) == []
    assert leg.state is LegState.declined


@pytest.mark.parametrize(
    "before",
    [
        [Accepted(), PeerRestarted(PREEMPTED)],
        [Accepted(), PeerRestarted(PREEMPTED), Drained(5)],
        [Accepted(), PeerRestarted(PREEMPTED), Drained(5), CountEqual()],
        [AttemptFailed(PREEMPTED), Declined(Failure(Reason.preempted, "not any more"))],
    ],
)
def test_a_peer_that_is_lost_before_the_next_attempt_fails_the_request(before: list[object]) -> None:
    _, effects = fed(PeerLive(), *before, PeerLost(FAILURE))
    assert effects == [FailAttempt(FAILURE)]


def test_drained_alone_proves_nothing() -> None:
    leg, effects = fed(PeerLive(), Accepted(), AttemptFailed(FAILURE), Drained(5))
    assert effects == [AwaitCount(5)]
    assert leg.state is LegState.counting
    leg.feed(CountEqual())
    assert leg.state is LegState.drained


def test_what_the_peer_said_it_sent_is_what_must_be_counted() -> None:
    leg, effects = fed(PeerLive(), Accepted(), AllPosted(10), AttemptFailed(FAILURE))
    assert effects == [SendEnd(FAILURE), AwaitCount(10)]
    leg.feed(CountEqual())
    assert leg.state in CLEAN


def test_a_peer_that_stops_unasked_fails_the_attempt() -> None:
    leg, effects = fed(PeerLive(), Accepted(), Drained(5))
    assert [type(effect) for effect in effects] == [FailAttempt, AwaitCount]
    assert leg.state is LegState.counting


def test_a_lost_peer_leaves_a_clean_leg_only_behind_the_fence_or_with_the_count_it_owed() -> None:
    for proof in (Fenced(), CountEqual()):
        leg, _ = fed(PeerLive(), Accepted(), AttemptFailed(FAILURE), Drained(5), PeerLost(FAILURE))
        assert leg.state not in CLEAN
        leg.feed(proof)
        assert leg.state in CLEAN


@given(st.lists(st.sampled_from([kind for kind in EXAMPLES if kind.__module__ == Leg.__module__]), max_size=12))
def test_in_any_order_dispatch_is_sent_once_and_before_anything_else(events: list[type]) -> None:
    leg = Leg("r at p")
    seen: list[object] = []
    for event in events:
        if event in events_of(Leg, leg.state):
            seen += leg.feed(EXAMPLES[event])
    sends = [effect for effect in seen if isinstance(effect, SendDispatch | SendFinished | SendEnd)]
    assert sends.count(SendDispatch()) <= 1
    assert len(sends) <= 2
    if sends:
        assert sends[0] == SendDispatch()
    if leg.state is LegState.unsent:
        assert not sends
