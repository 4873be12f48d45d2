"""A serve: one request as the prefiller sees it.

Two things end independently: the reads of the source pages (which frees the pages) and the request (which the decoder
decides). The record stays until both are over, because "sent" is not yet "arrived".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from .failure import Failure
from .machine import Machine, go


class ServeState(StrEnum):
    offered = "offered"  # the engine has not answered yet
    accepted = "accepted"  # chunks may be armed
    sent = "sent"  # every write is locally complete; the decoder has not answered yet
    arrived = "arrived"  # the decoder counted every row before our own completions were read
    stopping = "stopping"  # failed or preempted, but posted writes still read the source pages
    ended = "ended"


# Events
@dataclass(frozen=True, slots=True)
class EngineAccepted:
    """The engine takes the request."""


@dataclass(frozen=True, slots=True)
class EngineDeclined:
    """The engine refuses, or is busy (`failure.reason` says which)."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class WritesCompleted:
    """The last chunk was armed, and every write is locally complete."""

    rows: int


@dataclass(frozen=True, slots=True)
class ReadsEnded:
    """Stopped: nothing posted reads the source pages any more."""

    rows: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Something on this side failed: the engine gave up, a step went wrong, the time allowed ran out."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Preempted:
    """The engine takes the pages back."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class NeverAnswered:
    """Long after the time allowed the decoder has not said what became of it, though its poller runs."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """The decoder's epoch is over; there is nobody to tell."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class DecoderFinished:
    """The decoder counted every row."""


@dataclass(frozen=True, slots=True)
class DecoderFailed:
    """The decoder gave the attempt up."""

    failure: Failure


# Effects
@dataclass(frozen=True, slots=True)
class SendAccept:
    """Tell the decoder."""


@dataclass(frozen=True, slots=True)
class SendDecline:
    """Answer Busy or Refuse."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class SendSent:
    """Tell the decoder how many rows were posted in all."""

    rows: int


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Tell the decoder that no more will come."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class SendRestarted:
    """Tell the decoder that no more will come of this attempt, and that it may ask again."""


@dataclass(frozen=True, slots=True)
class SendDrained:
    """Tell the decoder that posting has ended early, and at how many rows."""

    rows: int


@dataclass(frozen=True, slots=True)
class StopWrites:
    """Drop what is not yet posted; `ReadsEnded` follows when nothing is in flight."""


@dataclass(frozen=True, slots=True)
class SettleOutcome:
    """The engine learns what became of the request (`failure` None: it arrived)."""

    failure: Failure | None


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """Nothing reads the source pages any more."""

    rows: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The record has served."""


def _send_accept(serve: Serve, event: object) -> SendAccept:
    return SendAccept()


def _send_decline(serve: Serve, event: EngineDeclined | Failed | DecoderFailed) -> SendDecline:
    return SendDecline(event.failure)


def _send_sent(serve: Serve, event: WritesCompleted) -> SendSent:
    return SendSent(event.rows)


def _send_failure(serve: Serve, event: Failed) -> SendFailure:
    return SendFailure(event.failure)


def _send_restarted(serve: Serve, event: Preempted) -> SendRestarted:
    return SendRestarted()


def _send_drained(serve: Serve, event: ReadsEnded | WritesCompleted) -> SendDrained:
    return SendDrained(event.rows)


def _stop(serve: Serve, event: object) -> StopWrites:
    return StopWrites()


def _arrived(serve: Serve, event: object) -> SettleOutcome:
    return SettleOutcome(None)


def _failed(
    serve: Serve, event: Failed | Preempted | NeverAnswered | PeerEnded | DecoderFailed | EngineDeclined
) -> SettleOutcome:
    return SettleOutcome(event.failure)


def _release(serve: Serve, event: WritesCompleted | ReadsEnded) -> ReleasePages:
    return ReleasePages(event.rows)


def _release_unread(serve: Serve, event: object) -> ReleasePages:
    return ReleasePages(0)


def _forget(serve: Serve, event: object) -> Forget:
    return Forget()


_S = ServeState


class Serve(Machine):
    """One request. `state` ends in `ended`, with exactly one SettleOutcome and one ReleasePages on the way.

    Args:
        name: The request id.
    """

    table: ClassVar = {
        (_S.offered, EngineAccepted): go(_S.accepted, _send_accept),
        (_S.offered, EngineDeclined): go(_S.ended, _send_decline, _failed, _release_unread, _forget),
        # Nothing was posted, and the decoder may know it: a request that was never taken up leaves its pages clean.
        (_S.offered, Failed): go(_S.ended, _send_decline, _failed, _release_unread, _forget),
        (_S.offered, PeerEnded): go(_S.ended, _failed, _release_unread, _forget),
        (_S.offered, DecoderFailed): go(_S.ended, _send_decline, _failed, _release_unread, _forget),
        # Nothing was to be moved, so the decoder did not wait for the engine.
        (_S.offered, DecoderFinished): go(_S.ended, _arrived, _release_unread, _forget),
        (_S.accepted, WritesCompleted): go(_S.sent, _send_sent, _release),
        (_S.accepted, DecoderFinished): go(_S.arrived, _arrived),
        (_S.accepted, Failed): go(_S.stopping, _send_failure, _failed, _stop),
        (_S.accepted, Preempted): go(_S.stopping, _send_restarted, _failed, _stop),
        (_S.accepted, PeerEnded): go(_S.stopping, _failed, _stop),
        (_S.accepted, DecoderFailed): go(_S.stopping, _failed, _stop),
        (_S.arrived, WritesCompleted): go(_S.ended, _release, _forget),
        (_S.arrived, Failed): go(_S.stopping, _stop),
        (_S.arrived, Preempted): go(_S.arrived),
        (_S.arrived, PeerEnded): go(_S.stopping, _stop),
        (_S.sent, DecoderFinished): go(_S.ended, _arrived, _forget),
        (_S.sent, DecoderFailed): go(_S.ended, _failed, _forget),
        (_S.sent, PeerEnded): go(_S.ended, _failed, _forget),
        (_S.sent, NeverAnswered): go(_S.ended, _failed, _forget),
        (_S.sent, Failed): go(_S.sent),
        (_S.sent, Preempted): go(_S.sent),
        (_S.stopping, ReadsEnded): go(_S.ended, _send_drained, _release, _forget),
        (_S.stopping, WritesCompleted): go(_S.ended, _send_drained, _release, _forget),
        (_S.stopping, Failed): go(_S.stopping),
        (_S.stopping, Preempted): go(_S.stopping),
        (_S.stopping, PeerEnded): go(_S.stopping),
        (_S.stopping, DecoderFailed): go(_S.stopping),
        (_S.stopping, DecoderFinished): go(_S.stopping),
        # An engine may answer after the end: the race is normal, and the outcome says what happened.
        (_S.ended, EngineAccepted): go(_S.ended),
        (_S.ended, EngineDeclined): go(_S.ended),
        (_S.ended, Failed): go(_S.ended),
        (_S.ended, Preempted): go(_S.ended),
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state: ServeState = ServeState.offered
