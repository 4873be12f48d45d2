"""A fetch is decided once; its pages are free only by proof."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr.core.failure import Failure
from kvmsgr.core.fetch import (
    Cancelled,
    Closed,
    CountOverflowed,
    CountStalled,
    EndAttempt,
    FailPeers,
    Fetch,
    FetchState,
    LegFailed,
    LegsClean,
    ReleasePages,
    ResolveArrival,
    ResolveFailure,
    RowsCounted,
    TimeExpired,
)
from kvmsgr_protocol import Reason

from .machines import EXAMPLES, FAILURE, events_of

DECIDERS = [RowsCounted, CountOverflowed, CountStalled, LegFailed, TimeExpired, Cancelled, Closed]


def test_all_rows_make_it_ready_and_free_its_pages() -> None:
    fetch = Fetch("r", 10)
    assert fetch.feed(RowsCounted(10)) == [EndAttempt(None), ResolveArrival(10), ReleasePages()]
    assert fetch.state is FetchState.ready


@pytest.mark.parametrize(
    ("event", "reason", "said"),
    [
        (CountStalled(9, 10), Reason.short_count, "9 of 10 rows landed, the peer posted 10"),
        (TimeExpired(9, 1.5), Reason.timeout, "9 of 10 rows landed in the 1.5 s allowed"),
        (CountOverflowed(11), Reason.overflow, "11 rows landed where 10 were expected"),
        (LegFailed(FAILURE), Reason.engine, "the engine said so"),
        (Cancelled(4, "the client left"), Reason.cancelled, "cancelled after 4 of 10 rows: the client left"),
        (Closed(4), Reason.closed, "closed"),
    ],
)
def test_a_failure_is_told_with_its_numbers_and_frees_nothing(event: object, reason: Reason, said: str) -> None:
    fetch = Fetch("r", 10)
    effects = fetch.feed(event)
    failure = next(effect.failure for effect in effects if isinstance(effect, ResolveFailure))
    assert failure.reason is reason
    assert said in failure.detail
    assert failure.rows_expected == 10
    assert EndAttempt(failure) in effects
    assert ReleasePages() not in effects
    assert fetch.state is FetchState.quarantined


def test_too_many_rows_end_the_epoch_of_the_peers_whatever_the_attempt_came_to() -> None:
    for first in ([], [CountStalled(9, 10)], [TimeExpired(9, 1.0)]):
        fetch = Fetch("r", 10)
        for event in first:
            fetch.feed(event)
        effects = fetch.feed(CountOverflowed(11))
        assert [effect.failure.reason for effect in effects if isinstance(effect, FailPeers)] == [Reason.overflow]


def test_rows_that_are_lost_end_the_epoch_of_the_peers() -> None:
    effects = Fetch("r", 10).feed(CountStalled(9, 10))
    assert [effect.failure.reason for effect in effects if isinstance(effect, FailPeers)] == [Reason.short_count]


def test_the_full_count_frees_the_pages_of_a_failed_attempt() -> None:
    fetch = Fetch("r", 10)
    fetch.feed(TimeExpired(9, 1.0))
    assert fetch.feed(RowsCounted(10)) == [ReleasePages()]
    assert fetch.state is FetchState.released


def test_an_attempt_of_which_nothing_can_land_any_more_frees_its_pages() -> None:
    fetch = Fetch("r", 10)
    fetch.feed(LegFailed(Failure(Reason.busy, "no room")))
    assert fetch.feed(LegsClean()) == [ReleasePages()]


@given(st.lists(st.sampled_from([*DECIDERS, LegsClean]), max_size=12))
def test_in_any_order_it_is_decided_once_and_freed_at_most_once(events: list[type]) -> None:
    fetch = Fetch("r", 10)
    seen: list[object] = []
    for event in events:
        if event in events_of(Fetch, fetch.state):
            seen += fetch.feed(EXAMPLES[event])
    decided = [effect for effect in seen if isinstance(effect, ResolveArrival | ResolveFailure)]
    released = [effect for effect in seen if isinstance(effect, ReleasePages)]
    assert len(decided) == (fetch.state is not FetchState.pending)
    assert len(released) == (fetch.state in (FetchState.ready, FetchState.released))
    if any(isinstance(effect, ResolveFailure) for effect in decided):
        assert fetch.state in (FetchState.quarantined, FetchState.released)
