"""A fetch: one attempt at one request, as the decoder sees it. Its legs are machines of their own (`leg.py`).

The attempt is decided by the first of: every row counted, a failure of any leg, the count itself, the time allowed, the
engine that no longer wants it. Whatever comes later changes nothing. What frees the destination pages is never the end
of the attempt but a proof that no write can land: every row was counted, or every leg is clean. Until then they are in
quarantine. A fetch whose pages are free is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kvmsgr_protocol import Reason

from .failure import Failure
from .machine import Machine, go


class FetchState(StrEnum):
    pending = "pending"
    ready = "ready"
    quarantined = "quarantined"  # failed, and writes may still land: the pages are held
    released = "released"  # failed, and no write can land


# Events
@dataclass(frozen=True, slots=True)
class RowsCounted:
    """Every expected row landed."""

    rows: int


@dataclass(frozen=True, slots=True)
class CountOverflowed:
    """More rows landed than were expected."""

    rows: int


@dataclass(frozen=True, slots=True)
class CountStalled:
    """All writes were posted, and for a set time no row has landed."""

    rows: int
    rows_posted: int


@dataclass(frozen=True, slots=True)
class LegFailed:
    """A leg cannot go on."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class TimeExpired:
    """The time allowed ran out."""

    rows: int
    time_allowed_s: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The engine no longer wants it."""

    rows: int
    why: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The messenger is closing."""

    rows: int


@dataclass(frozen=True, slots=True)
class LegsClean:
    """It is proven of every leg that nothing of it can land."""


# Effects
@dataclass(frozen=True, slots=True)
class EndAttempt:
    """Stop expecting rows; tell the legs how the attempt ended (`failure` None: ready)."""

    failure: Failure | None


@dataclass(frozen=True, slots=True)
class ResolveArrival:
    """The engine may decode."""

    rows: int


@dataclass(frozen=True, slots=True)
class ResolveFailure:
    """The engine gets a typed error."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class FailPeers:
    """A peer broke the count: its epoch ends."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """No write can land in the destination pages any more."""


def _failure(fetch: Fetch, event: object) -> Failure:
    expected = fetch.rows_expected
    match event:
        case LegFailed(failure):
            return failure
        case CountOverflowed(rows):
            detail = f"{rows} rows landed where {expected} were expected"
            return Failure(Reason.overflow, detail, rows, expected)
        case CountStalled(rows, posted):
            detail = f"{rows} of {expected} rows landed, the peer posted {posted}, and no more are landing"
            return Failure(Reason.short_count, detail, rows, expected)
        case TimeExpired(rows, time_allowed_s):
            detail = f"{rows} of {expected} rows landed in the {time_allowed_s:g} s allowed"
            return Failure(Reason.timeout, detail, rows, expected)
        case Cancelled(rows, why):
            return Failure(Reason.cancelled, f"cancelled after {rows} of {expected} rows: {why}", rows, expected)
    assert isinstance(event, Closed)
    return Failure(Reason.closed, "the messenger closed", event.rows, expected)


def _end_ready(fetch: Fetch, event: object) -> EndAttempt:
    return EndAttempt(None)


def _end_failed(fetch: Fetch, event: object) -> EndAttempt:
    return EndAttempt(_failure(fetch, event))


def _resolve(fetch: Fetch, event: RowsCounted) -> ResolveArrival:
    return ResolveArrival(event.rows)


def _resolve_failure(fetch: Fetch, event: object) -> ResolveFailure:
    return ResolveFailure(_failure(fetch, event))


def _fail_peers(fetch: Fetch, event: CountOverflowed | CountStalled) -> FailPeers:
    return FailPeers(_failure(fetch, event))


def _release(fetch: Fetch, event: object) -> ReleasePages:
    return ReleasePages()


_fail = go(FetchState.quarantined, _end_failed, _resolve_failure)
_fail_loudly = go(
    FetchState.quarantined, _end_failed, _resolve_failure, _fail_peers
)  # a fabric that loses or invents rows


class Fetch(Machine):
    """One attempt.

    Args:
        name: The request id.
        rows_expected: From the destination alone.
    """

    table: ClassVar = {
        (FetchState.pending, RowsCounted): go(FetchState.ready, _end_ready, _resolve, _release),
        (FetchState.pending, LegFailed): _fail,
        (FetchState.pending, TimeExpired): _fail,
        (FetchState.pending, Cancelled): _fail,
        (FetchState.pending, Closed): _fail,
        (FetchState.pending, CountStalled): _fail_loudly,
        (FetchState.pending, CountOverflowed): _fail_loudly,
        # The count kept running: all rows are in, so none can follow.
        (FetchState.quarantined, RowsCounted): go(FetchState.released, _release),
        (FetchState.quarantined, LegsClean): go(FetchState.released, _release),
        (FetchState.quarantined, CountOverflowed): go(FetchState.quarantined, _fail_peers),
        (FetchState.quarantined, LegFailed): go(FetchState.quarantined),
        (FetchState.quarantined, Cancelled): go(FetchState.quarantined),
        (FetchState.quarantined, Closed): go(FetchState.quarantined),
        # An engine may cancel what is over: the race is normal.
        (FetchState.ready, Cancelled): go(FetchState.ready),
        (FetchState.released, Cancelled): go(FetchState.released),
        (FetchState.released, Closed): go(FetchState.released),
    }

    def __init__(self, name: str, rows_expected: int) -> None:
        super().__init__(name)
        self.state: FetchState = FetchState.pending
        self.rows_expected = rows_expected
