"""Examples of every event, and a walker over tables."""

from __future__ import annotations

from enum import StrEnum

from kvmsgr.core import attempt, leg, peer, rotation, serve
from kvmsgr.core.failure import Failure
from kvmsgr.core.machine import Machine
from kvmsgr_protocol import Reason

FAILURE = Failure(Reason.engine, "the engine said so", 3, 10)
OTHER = Failure(Reason.timeout, "too late", 4, 10)
PREEMPTED = Failure(Reason.preempted, "the pages are needed", 2, 10)
BUSY = Failure(Reason.busy, "no room")

EXAMPLES: dict[type, object] = {
    leg.PeerLive: leg.PeerLive(),
    leg.Accepted: leg.Accepted(),
    leg.Declined: leg.Declined(BUSY),
    leg.AllPosted: leg.AllPosted(10),
    leg.Drained: leg.Drained(5),
    leg.PeerGaveUp: leg.PeerGaveUp(FAILURE),
    leg.PeerRestarted: leg.PeerRestarted(PREEMPTED),
    leg.PutOff: leg.PutOff(BUSY),
    leg.PeerLost: leg.PeerLost(FAILURE),
    leg.CountEqual: leg.CountEqual(),
    leg.Fenced: leg.Fenced(),
    leg.AttemptReady: leg.AttemptReady(),
    leg.AttemptFailed: leg.AttemptFailed(OTHER),
    attempt.RowsCounted: attempt.RowsCounted(10),
    attempt.CountOverflowed: attempt.CountOverflowed(11),
    attempt.CountStalled: attempt.CountStalled(9, 10),
    attempt.LegFailed: attempt.LegFailed(FAILURE),
    attempt.LegRestarted: attempt.LegRestarted(PREEMPTED),
    attempt.TimeExpired: attempt.TimeExpired(9, 1.5, "p has posted all"),
    attempt.Cancelled: attempt.Cancelled(9, "nobody waits for it"),
    attempt.Closed: attempt.Closed(9),
    attempt.LegsClean: attempt.LegsClean(),
    serve.EngineAccepted: serve.EngineAccepted(),
    serve.EngineDeclined: serve.EngineDeclined(Failure(Reason.refused, "no")),
    serve.WritesCompleted: serve.WritesCompleted(10),
    serve.ReadsEnded: serve.ReadsEnded(5),
    serve.Failed: serve.Failed(FAILURE),
    serve.Preempted: serve.Preempted(PREEMPTED),
    serve.NeverAnswered: serve.NeverAnswered(OTHER),
    serve.PeerEnded: serve.PeerEnded(OTHER),
    serve.DecoderFinished: serve.DecoderFinished(),
    serve.DecoderFailed: serve.DecoderFailed(OTHER),
    peer.Greeted: peer.Greeted(),
    peer.LinksOpened: peer.LinksOpened(),
    peer.Attached: peer.Attached(),
    peer.Lost: peer.Lost(FAILURE),
    peer.LinksClosed: peer.LinksClosed(),
    rotation.FenceWanted: rotation.FenceWanted(),
    rotation.PortOpened: rotation.PortOpened(),
    rotation.PortFailed: rotation.PortFailed(12),
    rotation.AllMoved: rotation.AllMoved(),
    rotation.PortClosed: rotation.PortClosed(),
}


def new_machines() -> dict[type[Machine], Machine]:
    return {
        leg.Leg: leg.Leg("r1 at p"),
        attempt.Attempt: attempt.Attempt("r1", 10),
        serve.Serve: serve.Serve("r1"),
        peer.Peer: peer.Peer("p"),
        rotation.Rotation: rotation.Rotation("n"),
    }


def states_of(kind: type[Machine]) -> set[StrEnum]:
    return {state for state, _ in kind.table} | {row.to for row in kind.table.values()}


def events_of(kind: type[Machine], state: StrEnum) -> list[type]:
    return [event for at, event in kind.table if at == state]
