"""A rotation: the fence of a messenger whose peers all write to one endpoint, because its fabric has few queue pairs.

A second endpoint is opened beside the first, the peers that live are moved to it, and then the first is closed: what a
lost peer can still write goes nowhere. A peer has moved when it holds its writes back and everything it posted before
has been counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from .machine import Machine, go


class RotationState(StrEnum):
    idle = "idle"
    opening = "opening"  # the second endpoint
    opening_again = "opening_again"  # so; and a peer was lost that may know the second endpoint already
    moving = "moving"  # the peers that live
    moving_again = "moving_again"  # so; and a peer was lost that may have moved already
    closing = "closing"  # the first endpoint
    closing_again = "closing_again"


# Events
@dataclass(frozen=True, slots=True)
class FenceWanted:
    """A peer is lost, and something of it may be under way."""


@dataclass(frozen=True, slots=True)
class PortOpened:
    """The second endpoint is open."""


@dataclass(frozen=True, slots=True)
class PortFailed:
    """It cannot be opened."""

    errno: int


@dataclass(frozen=True, slots=True)
class AllMoved:
    """Every peer that lives writes to the second endpoint, and what it wrote to the first has been counted."""


@dataclass(frozen=True, slots=True)
class PortClosed:
    """The first endpoint is closed, and its completion queue has been read to the end."""


# Effects
@dataclass(frozen=True, slots=True)
class OpenPort:
    """Open another endpoint."""


@dataclass(frozen=True, slots=True)
class MovePeers:
    """Tell every live peer to write there; AllMoved follows."""


@dataclass(frozen=True, slots=True)
class LosePeers:
    """Give all peers up: without a second endpoint there is no fence but closing the only one."""

    errno: int


@dataclass(frozen=True, slots=True)
class ClosePort:
    """Close the endpoint that is left behind."""


def _open(rotation: Rotation, event: object) -> OpenPort:
    return OpenPort()


def _move(rotation: Rotation, event: object) -> MovePeers:
    return MovePeers()


def _lose(rotation: Rotation, event: PortFailed) -> LosePeers:
    return LosePeers(event.errno)


def _close(rotation: Rotation, event: object) -> ClosePort:
    return ClosePort()


_S = RotationState


class Rotation(Machine):
    """The rotations of one messenger, one at a time. Losses during one are fenced by it, or by the next."""

    table: ClassVar = {
        (_S.idle, FenceWanted): go(_S.opening, _open),
        (_S.opening, FenceWanted): go(_S.opening_again),
        (_S.opening_again, FenceWanted): go(_S.opening_again),
        (_S.opening_again, PortOpened): go(_S.moving_again, _move),
        (_S.opening_again, PortFailed): go(_S.closing, _lose, _close),
        (_S.opening, PortOpened): go(_S.moving, _move),
        (_S.opening, PortFailed): go(_S.closing, _lose, _close),
        (_S.moving, FenceWanted): go(_S.moving_again),
        (_S.moving, AllMoved): go(_S.closing, _close),
        (_S.moving_again, FenceWanted): go(_S.moving_again),
        (_S.moving_again, AllMoved): go(_S.closing_again, _close),
        (_S.closing, FenceWanted): go(_S.closing_again),
        (_S.closing, PortClosed): go(_S.idle),
        (_S.closing_again, FenceWanted): go(_S.closing_again),
        (_S.closing_again, PortClosed): go(_S.opening, _open),
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state: RotationState = RotationState.idle
