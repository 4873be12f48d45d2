"""A leg: one attempt at one peer, as the decoder sees it.

A leg is *clean* while nothing of it can ever land: its Dispatch was never sent, or the peer did not take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from .failure import Failure
from .machine import Machine, go


class LegState(StrEnum):
    waiting = "waiting"  # the peer is not live yet
    owing = "owing"  # ready without it (no rows): the peer only needs to be told
    dispatched = "dispatched"
    accepted = "accepted"
    sent = "sent"  # the peer has posted all it will post
    declined = "declined"  # busy or refused: clean
    unsent = "unsent"  # ended before Dispatch was sent: clean
    finished = "finished"
    failed = "failed"  # writes may still land


CLEAN = frozenset({LegState.declined, LegState.unsent})


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
    """The peer has posted its last write."""

    rows: int


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The peer gave up, or its epoch ended."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class AttemptReady:
    """Every row of the attempt was counted."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt failed, here or on another leg."""

    failure: Failure


# Effects
@dataclass(frozen=True, slots=True)
class SendDispatch:
    """Arm the slot, then send Dispatch."""


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Tell the peer that everything landed."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Tell the peer that the attempt is over."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class CheckCount:
    """Compare the rows the peer posted with those expected, and watch for rows that never land."""

    rows: int


@dataclass(frozen=True, slots=True)
class FailAttempt:
    """This leg failed, so the attempt does."""

    failure: Failure


def _fail_attempt(leg: Leg, event: Declined | PeerFailed) -> FailAttempt:
    return FailAttempt(event.failure)


def _send_failed(leg: Leg, event: AttemptFailed) -> SendFailed:
    return SendFailed(event.failure)


def _send_finished(leg: Leg, event: object) -> SendFinished:
    return SendFinished()


def _send_dispatch(leg: Leg, event: object) -> SendDispatch:
    return SendDispatch()


def _check_count(leg: Leg, event: AllPosted) -> CheckCount:
    return CheckCount(event.rows)


class Leg(Machine):
    """One leg. `state in CLEAN` after the end means that none of its writes can land."""

    table: ClassVar = {
        (LegState.waiting, PeerLive): go(LegState.dispatched, _send_dispatch),
        (LegState.waiting, PeerFailed): go(LegState.unsent, _fail_attempt),
        (LegState.waiting, AttemptFailed): go(LegState.unsent),
        (LegState.waiting, AttemptReady): go(LegState.owing),
        (LegState.owing, PeerLive): go(LegState.finished, _send_dispatch, _send_finished),
        (LegState.owing, PeerFailed): go(LegState.unsent),
        (LegState.dispatched, Accepted): go(LegState.accepted),
        (LegState.dispatched, Declined): go(LegState.declined, _fail_attempt),
        (LegState.dispatched, PeerFailed): go(LegState.failed, _fail_attempt),
        (LegState.dispatched, AttemptFailed): go(LegState.failed, _send_failed),
        (LegState.dispatched, AttemptReady): go(LegState.finished, _send_finished),
        (LegState.accepted, AllPosted): go(LegState.sent, _check_count),
        (LegState.accepted, PeerFailed): go(LegState.failed, _fail_attempt),
        (LegState.accepted, AttemptFailed): go(LegState.failed, _send_failed),
        (LegState.accepted, AttemptReady): go(LegState.finished, _send_finished),
        (LegState.sent, PeerFailed): go(LegState.failed, _fail_attempt),
        (LegState.sent, AttemptFailed): go(LegState.failed, _send_failed),
        (LegState.sent, AttemptReady): go(LegState.finished, _send_finished),
        # The answers of a peer to a leg that is over say nothing new, but for one: a leg that was declined was clean.
        (LegState.failed, Accepted): go(LegState.failed),
        (LegState.failed, Declined): go(LegState.declined),
        (LegState.failed, AllPosted): go(LegState.failed),
        (LegState.failed, PeerFailed): go(LegState.failed),
        (LegState.failed, AttemptFailed): go(LegState.failed),
        (LegState.declined, AttemptFailed): go(LegState.declined),
        (LegState.unsent, AttemptFailed): go(LegState.unsent),
        # With several legs, one may be over before the others.
        (LegState.declined, PeerFailed): go(LegState.declined),
        (LegState.unsent, PeerFailed): go(LegState.unsent),
        (LegState.unsent, PeerLive): go(LegState.unsent),
        (LegState.finished, Accepted): go(LegState.finished),
        (LegState.finished, AllPosted): go(LegState.finished),
        (LegState.finished, PeerFailed): go(LegState.finished),
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state: LegState = LegState.waiting
