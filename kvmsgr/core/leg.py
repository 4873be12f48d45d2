"""A leg: one attempt at one peer, as the decoder sees it.

A leg is *clean* when nothing of it can land any more. There are four proofs, and no other: its Dispatch was never sent
(`unsent`); the peer did not take it (`declined`); the peer said how many rows it has posted in all, and exactly as many
were counted (`drained`); the endpoint it wrote to is closed (`fenced`). That a leg is over proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kvmsgr_protocol import Reason

from .failure import Failure
from .machine import Machine, go


class LegState(StrEnum):
    waiting = "waiting"  # the peer is not live yet
    owing = "owing"  # ready without it (no rows): the peer only needs to be told
    dispatched = "dispatched"
    accepted = "accepted"
    sent = "sent"  # the peer has posted all it will post
    draining = "draining"  # over; the peer has not said yet how many rows it has posted
    counting = "counting"  # over; the peer has said it, and that many have not been counted yet
    lost = "lost"  # over with its epoch: only the fence, or the count that was owed, proves anything
    declined = "declined"
    unsent = "unsent"
    drained = "drained"
    fenced = "fenced"
    finished = "finished"  # every row of the attempt was counted


CLEAN = frozenset({LegState.declined, LegState.unsent, LegState.drained, LegState.fenced, LegState.finished})


# Events
@dataclass(frozen=True, slots=True)
class PeerLive:
    """The peer can be written to."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The peer took the request."""


@dataclass(frozen=True, slots=True)
class Declined:
    """The peer is busy or refused; it never posts for this leg."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class AllPosted:
    """The peer has posted its last write: that makes so many rows."""

    rows: int


@dataclass(frozen=True, slots=True)
class Drained:
    """The peer has stopped early, after so many rows."""

    rows: int


@dataclass(frozen=True, slots=True)
class PeerGaveUp:
    """The peer failed the request; how much it has posted it will say by Drained."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class PeerRestarted:
    """The peer took its pages back: as if it had failed, but the request may be tried again."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class PutOff:
    """The peer is busy, and took its pages back before: it is asked again, and the engine need not hear of it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer's epoch has ended."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class AttemptReady:
    """Every row of the attempt was counted."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt failed, here or on another leg."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class CountEqual:
    """The leg's slot has counted exactly the rows that the peer says it has posted."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The endpoint that the peer wrote to is closed, and all that came through it has been counted."""


# Effects
@dataclass(frozen=True, slots=True)
class SendDispatch:
    """Arm the slot, then send Dispatch."""


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Tell the peer that everything landed."""


@dataclass(frozen=True, slots=True)
class SendEnd:
    """Tell the peer that the attempt is over: it must stop."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class AwaitDrained:
    """The peer owes how many rows it has posted; one that never says it is lost."""


@dataclass(frozen=True, slots=True)
class CheckCount:
    """Compare the rows the peer posted with those expected, and watch for rows that never land."""

    rows: int


@dataclass(frozen=True, slots=True)
class AwaitCount:
    """Compare the rows the peer posted with those counted for this leg: when they are equal, CountEqual follows."""

    rows: int


@dataclass(frozen=True, slots=True)
class FailAttempt:
    """This leg failed, so the attempt does."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class RestartAttempt:
    """This leg ended, so the attempt does; the request may be tried again."""

    failure: Failure


_DRAINED_UNASKED = "the prefiller stopped before everything was posted"


def _fail_attempt(leg: Leg, event: Declined | PeerGaveUp | PeerLost) -> FailAttempt:
    return FailAttempt(event.failure)


def _fail_unasked(leg: Leg, event: Drained) -> FailAttempt:
    return FailAttempt(Failure(Reason.engine, _DRAINED_UNASKED, event.rows))


def _restart_attempt(leg: Leg, event: PeerRestarted | PutOff) -> RestartAttempt:
    return RestartAttempt(event.failure)


def _send_end(leg: Leg, event: AttemptFailed) -> SendEnd:
    return SendEnd(event.failure)


def _send_finished(leg: Leg, event: object) -> SendFinished:
    return SendFinished()


def _send_dispatch(leg: Leg, event: object) -> SendDispatch:
    return SendDispatch()


def _await_drained(leg: Leg, event: object) -> AwaitDrained:
    return AwaitDrained()


def _check_count(leg: Leg, event: AllPosted) -> CheckCount:
    leg.rows_posted = event.rows
    return CheckCount(event.rows)


def _await_told(leg: Leg, event: AllPosted | Drained) -> AwaitCount:
    leg.rows_posted = event.rows
    return AwaitCount(event.rows)


def _await_sent(leg: Leg, event: object) -> AwaitCount:
    return AwaitCount(leg.rows_posted)


_S = LegState


class Leg(Machine):
    """One leg. `state in CLEAN` means that none of its writes can land.

    Attributes:
        rows_posted: What the peer has said it posted in all; 0 until it has.
    """

    table: ClassVar = {
        (_S.waiting, PeerLive): go(_S.dispatched, _send_dispatch),
        (_S.waiting, PeerLost): go(_S.unsent, _fail_attempt),
        (_S.waiting, AttemptFailed): go(_S.unsent),
        (_S.waiting, AttemptReady): go(_S.owing),
        (_S.owing, PeerLive): go(_S.finished, _send_dispatch, _send_finished),
        (_S.owing, PeerLost): go(_S.unsent),
        (_S.dispatched, Accepted): go(_S.accepted),
        (_S.dispatched, Declined): go(_S.declined, _fail_attempt),
        (_S.dispatched, PutOff): go(_S.declined, _restart_attempt),
        (_S.dispatched, PeerLost): go(_S.lost, _fail_attempt),
        (_S.dispatched, AttemptFailed): go(_S.draining, _send_end, _await_drained),
        (_S.dispatched, AttemptReady): go(_S.finished, _send_finished),
        (_S.accepted, AllPosted): go(_S.sent, _check_count),
        (_S.accepted, Drained): go(_S.counting, _fail_unasked, _await_told),
        (_S.accepted, PeerGaveUp): go(_S.draining, _fail_attempt, _await_drained),
        (_S.accepted, PeerRestarted): go(_S.draining, _restart_attempt, _await_drained),
        (_S.accepted, PeerLost): go(_S.lost, _fail_attempt),
        (_S.accepted, AttemptFailed): go(_S.draining, _send_end, _await_drained),
        (_S.accepted, AttemptReady): go(_S.finished, _send_finished),
        (_S.sent, PeerLost): go(_S.lost, _fail_attempt),
        (_S.sent, AttemptFailed): go(_S.counting, _send_end, _await_sent),
        (_S.sent, AttemptReady): go(_S.finished, _send_finished),
        # The attempt is over, and what it wrote may still be under way. A peer that is lost cannot be asked again.
        (_S.draining, Accepted): go(_S.draining),
        (_S.draining, Declined): go(_S.declined),
        (_S.draining, AllPosted): go(_S.counting, _await_told),
        (_S.draining, Drained): go(_S.counting, _await_told),
        (_S.draining, PeerGaveUp): go(_S.draining),
        (_S.draining, PeerRestarted): go(_S.draining),
        (_S.draining, PeerLost): go(_S.lost, _fail_attempt),
        (_S.draining, AttemptFailed): go(_S.draining),
        (_S.counting, CountEqual): go(_S.drained),
        (_S.counting, PeerLost): go(_S.lost, _fail_attempt),
        (_S.counting, AttemptFailed): go(_S.counting),
        (_S.lost, CountEqual): go(_S.drained),
        (_S.lost, Fenced): go(_S.fenced),
        (_S.lost, AttemptFailed): go(_S.lost),
        # What is clean stays clean. With several legs, one may be over before the others.
        (_S.declined, AttemptFailed): go(_S.declined),
        (_S.declined, PeerLost): go(_S.declined, _fail_attempt),
        (_S.declined, Fenced): go(_S.declined),
        (_S.unsent, AttemptFailed): go(_S.unsent),
        (_S.unsent, PeerLive): go(_S.unsent),
        (_S.unsent, PeerLost): go(_S.unsent),
        (_S.unsent, Fenced): go(_S.unsent),
        (_S.drained, AttemptFailed): go(_S.drained),
        (_S.drained, CountEqual): go(_S.drained),
        (_S.drained, PeerLost): go(_S.drained, _fail_attempt),
        (_S.drained, Fenced): go(_S.drained),
        (_S.fenced, AttemptFailed): go(_S.fenced),
        (_S.fenced, CountEqual): go(_S.fenced),
        (_S.finished, Accepted): go(_S.finished),
        (_S.finished, Declined): go(_S.finished),
        (_S.finished, AllPosted): go(_S.finished),
        (_S.finished, Drained): go(_S.finished),
        (_S.finished, PeerGaveUp): go(_S.finished),
        (_S.finished, PeerRestarted): go(_S.finished),
        (_S.finished, PeerLost): go(_S.finished),
        (_S.finished, Fenced): go(_S.finished),
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state: LegState = LegState.waiting
        self.rows_posted = 0
