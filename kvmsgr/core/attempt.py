"""An attempt: one try at one request, as the decoder sees it. Its legs are machines of their own (`leg.py`).

It is decided by the first of: every row counted, a failure of any leg, the count itself, the time allowed, the engine
that no longer wants it. Whatever comes later changes nothing. Where a prefiller takes its pages back (`Restarted`), the
attempt ends and the request does not: another attempt follows, with the same pages. What frees the destination pages
is never the end of the attempt but a proof that no write can land: every row was counted, or every leg is clean. Until
then they are in quarantine, and nobody has them, not even the next attempt. One whose pages are free is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kvmsgr_protocol import Reason

from .failure import Failure
from .machine import Machine, go


class AttemptState(StrEnum):
    pending = "pending"
    ready = "ready"
    restarting = "restarting"  # ended by a prefiller that wants its pages; writes may still land
    replaced = "replaced"  # so, and no write can land: another attempt has the pages
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
class LegRestarted:
    """A prefiller has taken its pages back; the request may be tried again."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class TimeExpired:
    """The time allowed ran out. `stand` tells how far its legs were."""

    rows: int
    time_allowed_s: float
    stand: str


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


@dataclass(frozen=True, slots=True)
class StartOver:
    """No write of this attempt can land any more: begin the next one, in the same pages."""


def _failure(attempt: Attempt, event: object) -> Failure:
    expected = attempt.rows_expected
    match event:
        case LegFailed(failure) | LegRestarted(failure):
            return failure
        case CountOverflowed(rows):
            detail = f"{rows} rows landed where {expected} were expected"
            return Failure(Reason.overflow, detail, rows, expected)
        case CountStalled(rows, posted):
            detail = f"{rows} of {expected} rows landed, the peer posted {posted}, and no more are landing"
            return Failure(Reason.short_count, detail, rows, expected)
        case TimeExpired(rows, time_allowed_s, stand):
            detail = f"{rows} of {expected} rows landed in the {time_allowed_s:g} s allowed; {stand}"
            return Failure(Reason.timeout, detail, rows, expected)
        case Cancelled(rows, why):
            return Failure(Reason.cancelled, f"cancelled after {rows} of {expected} rows: {why}", rows, expected)
    assert isinstance(event, Closed)
    return Failure(Reason.closed, "the messenger closed", event.rows, expected)


def _end_ready(attempt: Attempt, event: object) -> EndAttempt:
    return EndAttempt(None)


def _end_failed(attempt: Attempt, event: object) -> EndAttempt:
    return EndAttempt(_failure(attempt, event))


def _resolve(attempt: Attempt, event: RowsCounted) -> ResolveArrival:
    return ResolveArrival(event.rows)


def _resolve_failure(attempt: Attempt, event: object) -> ResolveFailure:
    return ResolveFailure(_failure(attempt, event))


def _fail_peers(attempt: Attempt, event: CountOverflowed | CountStalled) -> FailPeers:
    return FailPeers(_failure(attempt, event))


def _release(attempt: Attempt, event: object) -> ReleasePages:
    return ReleasePages()


def _start_over(attempt: Attempt, event: object) -> StartOver:
    return StartOver()


_S = AttemptState

_fail = go(_S.quarantined, _end_failed, _resolve_failure)
_fail_loudly = go(_S.quarantined, _end_failed, _resolve_failure, _fail_peers)  # a fabric that loses or invents rows
_fail_late = go(_S.quarantined, _resolve_failure)  # the legs were told when it ended


class Attempt(Machine):
    """One attempt.

    Args:
        name: The request id.
        rows_expected: From the destination alone.
    """

    table: ClassVar = {
        (_S.pending, RowsCounted): go(_S.ready, _end_ready, _resolve, _release),
        (_S.pending, LegFailed): _fail,
        (_S.pending, LegRestarted): go(_S.restarting, _end_failed),
        (_S.pending, TimeExpired): _fail,
        (_S.pending, Cancelled): _fail,
        (_S.pending, Closed): _fail,
        (_S.pending, CountStalled): _fail_loudly,
        (_S.pending, CountOverflowed): _fail_loudly,
        (_S.restarting, LegsClean): go(_S.replaced, _start_over),
        (_S.restarting, LegRestarted): go(_S.restarting),
        (_S.restarting, LegFailed): _fail_late,
        (_S.restarting, TimeExpired): _fail_late,
        (_S.restarting, Cancelled): _fail_late,
        (_S.restarting, Closed): _fail_late,
        (_S.restarting, CountOverflowed): go(_S.quarantined, _resolve_failure, _fail_peers),
        # The count kept running: all rows are in, so none can follow.
        (_S.restarting, RowsCounted): go(_S.replaced, _start_over),
        (_S.quarantined, RowsCounted): go(_S.released, _release),
        (_S.quarantined, LegsClean): go(_S.released, _release),
        (_S.quarantined, CountOverflowed): go(_S.quarantined, _fail_peers),
        (_S.quarantined, LegFailed): go(_S.quarantined),
        (_S.quarantined, LegRestarted): go(_S.quarantined),
        (_S.quarantined, Cancelled): go(_S.quarantined),
        (_S.quarantined, Closed): go(_S.quarantined),
        # An engine may cancel what is over: the race is normal.
        (_S.ready, Cancelled): go(_S.ready),
        (_S.replaced, Cancelled): go(_S.replaced),
        (_S.released, Cancelled): go(_S.released),
        (_S.released, Closed): go(_S.released),
    }

    def __init__(self, name: str, rows_expected: int) -> None:
        super().__init__(name)
        self.state: AttemptState = _S.pending
        self.rows_expected = rows_expected
