"""An attempt is decided once; its pages are free only by proof."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr.core.attempt import (
    Attempt,
    AttemptState,
    Cancelled,
    Closed,
    CountOverflowed,
    CountStalled,
    EndAttempt,
    FailPeers,
    LegFailed,
    LegRestarted,
    LegsClean,
    ReleasePages,
    ResolveArrival,
    ResolveFailure,
    RowsCounted,
    StartOver,
    TimeExpired,
)
from kvmsgr.core.failure import Failure
from kvmsgr_protocol import Reason

from .machines import EXAMPLES, FAILURE, PREEMPTED, events_of

STAND = "p has posted all"
DECIDERS = [RowsCounted, CountOverflowed, CountStalled, LegFailed, TimeExpired, Cancelled, Closed, LegRestarted]


def test_all_rows_make_it_ready_and_free_its_pages() -> None:
    attempt = Attempt("r", 10)
    assert attempt.feed(RowsCounted(10)) == [EndAttempt(None), ResolveArrival(10), ReleasePages()]
    assert attempt.state is AttemptState.ready


@pytest.mark.parametrize(
    ("event", "reason", "said"),
    [
        (CountStalled(9, 10), Reason.short_count, "9 of 10 rows landed, the peer posted 10"),
        (TimeExpired(9, 1.5, STAND), Reason.timeout, f"9 of 10 rows landed in the 1.5 s allowed; {STAND}"),
        (CountOverflowed(11), Reason.overflow, "11 rows landed where 10 were expected"),
        (LegFailed(FAILURE), Reason.engine, "the engine said so"),
        (Cancelled(4, "the client left"), Reason.cancelled, "cancelled after 4 of 10 rows: the client left"),
        (Closed(4), Reason.closed, "closed"),
    ],
)
def test_a_failure_is_told_with_its_numbers_and_frees_nothing(event: object, reason: Reason, said: str) -> None:
    attempt = Attempt("r", 10)
    effects = attempt.feed(event)
    failure = next(effect.failure for effect in effects if isinstance(effect, ResolveFailure))
    assert failure.reason is reason
    assert said in failure.detail
    assert failure.rows_expected == 10
    assert EndAttempt(failure) in effects
    assert ReleasePages() not in effects
    assert attempt.state is AttemptState.quarantined


def test_too_many_rows_end_the_epoch_of_the_peers_whatever_the_attempt_came_to() -> None:
    for first in ([], [CountStalled(9, 10)], [TimeExpired(9, 1.0, STAND)]):
        attempt = Attempt("r", 10)
        for event in first:
            attempt.feed(event)
        effects = attempt.feed(CountOverflowed(11))
        assert [effect.failure.reason for effect in effects if isinstance(effect, FailPeers)] == [Reason.overflow]


def test_rows_that_are_lost_end_the_epoch_of_the_peers() -> None:
    effects = Attempt("r", 10).feed(CountStalled(9, 10))
    assert [effect.failure.reason for effect in effects if isinstance(effect, FailPeers)] == [Reason.short_count]


def test_the_full_count_frees_the_pages_of_a_failed_attempt() -> None:
    attempt = Attempt("r", 10)
    attempt.feed(TimeExpired(9, 1.0, STAND))
    assert attempt.feed(RowsCounted(10)) == [ReleasePages()]
    assert attempt.state is AttemptState.released


def test_an_attempt_of_which_nothing_can_land_any_more_frees_its_pages() -> None:
    attempt = Attempt("r", 10)
    attempt.feed(LegFailed(Failure(Reason.busy, "no room")))
    assert attempt.feed(LegsClean()) == [ReleasePages()]


@pytest.mark.parametrize("proof", [LegsClean(), RowsCounted(10)])
def test_a_preempted_attempt_is_followed_by_another_once_nothing_can_land(proof: object) -> None:
    attempt = Attempt("r", 10)
    assert attempt.feed(LegRestarted(PREEMPTED)) == [EndAttempt(PREEMPTED)]
    assert attempt.feed(LegRestarted(PREEMPTED)) == []
    assert attempt.feed(proof) == [StartOver()]
    assert attempt.state is AttemptState.replaced


@pytest.mark.parametrize(
    "event", [LegFailed(FAILURE), TimeExpired(4, 1.5, STAND), Cancelled(4, "the client left"), Closed(4)]
)
def test_a_request_may_fail_before_its_next_attempt(event: object) -> None:
    attempt = Attempt("r", 10)
    attempt.feed(LegRestarted(PREEMPTED))
    assert [type(effect) for effect in attempt.feed(event)] == [ResolveFailure]
    assert attempt.state is AttemptState.quarantined
    assert attempt.feed(LegsClean()) == [ReleasePages()]


def test_too_many_rows_of_a_preempted_attempt_end_the_epoch_of_the_peers() -> None:
    attempt = Attempt("r", 10)
    attempt.feed(LegRestarted(PREEMPTED))
    assert [type(effect) for effect in attempt.feed(CountOverflowed(11))] == [ResolveFailure, FailPeers]


@given(st.lists(st.sampled_from([*DECIDERS, LegsClean]), max_size=12))
def test_in_any_order_it_is_decided_once_and_freed_at_most_once(events: list[type]) -> None:
    attempt = Attempt("r", 10)
    seen: list[object] = []
    for event in events:
        if event in events_of(Attempt, attempt.state):
            seen += attempt.feed(EXAMPLES[event])
    decided = [effect for effect in seen if isinstance(effect, ResolveArrival | ResolveFailure)]
    released = [effect for effect in seen if isinstance(effect, ReleasePages)]
    open_states = AttemptState.pending, AttemptState.restarting, AttemptState.replaced
    assert len(decided) == (attempt.state not in open_states)
    assert len(released) == (attempt.state in (AttemptState.ready, AttemptState.released))
    if any(isinstance(effect, ResolveFailure) for effect in decided):
        assert attempt.state in (AttemptState.quarantined, AttemptState.released)
