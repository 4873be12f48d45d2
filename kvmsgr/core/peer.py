"""A peer: one epoch, from the greeting to its end. The same machine on both sides of the control connection."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from .failure import Failure
from .machine import Machine, go


class PeerState(StrEnum):
    greeting = "greeting"  # our Hello is out
    opening = "opening"  # theirs is in and fits; our endpoint for this peer is being opened
    opening_attached = "opening_attached"  # so is it, and their Attach is already here
    attaching = "attaching"  # our Attach is out
    live = "live"
    closing = "closing"  # over; our endpoint is being closed
    gone = "gone"


# Events
@dataclass(frozen=True, slots=True)
class Greeted:
    """Their Hello came and fits ours."""


@dataclass(frozen=True, slots=True)
class LinksOpened:
    """Our endpoint for this peer is open: Attach can name it."""


@dataclass(frozen=True, slots=True)
class Attached:
    """Their Attach came and fits ours."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The epoch is over: connection closed, fabric error, broken protocol, mismatch, time, or our own wish."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class LinksClosed:
    """Our endpoint for this peer is closed."""


# Effects
@dataclass(frozen=True, slots=True)
class OpenLinks:
    """Open an endpoint for this peer."""


@dataclass(frozen=True, slots=True)
class SendAttach:
    """Name our endpoint, regions, layouts and window."""


@dataclass(frozen=True, slots=True)
class ConnectLinks:
    """Point our endpoint at theirs, and plan between the layouts."""


@dataclass(frozen=True, slots=True)
class AnnounceLive:
    """Requests may go."""


@dataclass(frozen=True, slots=True)
class AnnounceLost:
    """Every request of this peer fails, for this reason."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Say Goodbye if possible, and close the control connection."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class CloseLinks:
    """Close our endpoint: nothing of ours is read by it any more, nothing of theirs lands through it."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing is left of the peer."""


def _open_links(peer: Peer, event: object) -> OpenLinks:
    return OpenLinks()


def _send_attach(peer: Peer, event: object) -> SendAttach:
    return SendAttach()


def _connect(peer: Peer, event: object) -> ConnectLinks:
    return ConnectLinks()


def _live(peer: Peer, event: object) -> AnnounceLive:
    return AnnounceLive()


def _lost(peer: Peer, event: Lost) -> AnnounceLost:
    return AnnounceLost(event.failure)


def _disconnect(peer: Peer, event: Lost) -> Disconnect:
    return Disconnect(event.failure)


def _close_links(peer: Peer, event: Lost) -> CloseLinks:
    return CloseLinks()


def _forget(peer: Peer, event: object) -> Forget:
    return Forget()


_S = PeerState
_end = go(_S.closing, _lost, _disconnect, _close_links)


class Peer(Machine):
    """One epoch with one messenger."""

    table: ClassVar = {
        (_S.greeting, Greeted): go(_S.opening, _open_links),
        (_S.opening, LinksOpened): go(_S.attaching, _send_attach),
        (_S.opening, Attached): go(_S.opening_attached),
        (_S.opening_attached, LinksOpened): go(_S.live, _send_attach, _connect, _live),
        (_S.attaching, Attached): go(_S.live, _connect, _live),
        (_S.greeting, Lost): go(_S.gone, _lost, _disconnect, _forget),
        (_S.opening, Lost): _end,
        (_S.opening_attached, Lost): _end,
        (_S.attaching, Lost): _end,
        (_S.live, Lost): _end,
        (_S.closing, LinksOpened): go(_S.closing),
        (_S.closing, LinksClosed): go(_S.gone, _forget),
        (_S.closing, Lost): go(_S.closing),
        (_S.gone, Lost): go(_S.gone),
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state: PeerState = PeerState.greeting
