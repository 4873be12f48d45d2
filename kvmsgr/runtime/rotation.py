"""Moves every peer to another endpoint, so that the one a lost peer writes to can be closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from kvmsgr.core import rotation as core
from kvmsgr.core.failure import Failure
from kvmsgr.core.peer import PeerState
from kvmsgr.fabric import records
from kvmsgr_protocol import NUM_GENERATIONS, Reason, Rotate, Rotated, immediate

if TYPE_CHECKING:
    from .node import Node
    from .peer import PeerDriver

log = structlog.get_logger("kvmsgr")


class RotationDriver:
    """The rotations of one messenger. `_moving` are the peers that have not moved yet, each with the counters of its
    slots that have not reached what it posted before it moved; None: it has not said how much that is."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._machine = core.Rotation(node.config.name)
        self._moving: dict[PeerDriver, set[int] | None] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._stopped = False

    # What comes in

    def want_fence(self) -> None:
        """A peer is lost, and something of it may be under way."""
        self._feed(core.FenceWanted())

    def port_opened(self) -> None:
        self._feed(core.PortOpened())

    def port_failed(self, errno: int) -> None:
        self._feed(core.PortFailed(errno))

    def port_closed(self) -> None:
        self._feed(core.PortClosed())

    def peer_live(self, peer: PeerDriver) -> None:
        """A peer that greeted us when the move began is ready to be told of it."""
        if peer in self._moving:
            self._send_rotate(peer)

    def peer_lost(self, peer: PeerDriver) -> None:
        """It needs not be waited for any more."""
        if self._moving.pop(peer, self) is not self:
            self._check_moved()

    def rotated(self, peer: PeerDriver, message: Rotated) -> None:
        """The peer holds its writes back; what it posted before must be counted before it may go on."""
        if self._moving.get(peer, self) is not None:
            peer.lose(Failure(Reason.protocol, f"{peer.name} says that it has rotated, and was not asked to"))
            return
        owed = self._node.outbox.rows_owed(peer)
        owed |= {immediate.counter_index(posted.slot, posted.generation): posted.rows for posted in message.posted}
        missing: set[int] = set()
        for index, rows in owed.items():
            if not self._node.outbox.is_slot_of(peer, index):
                continue  # a request that we have done with: all of it was counted
            landed = self._node.fabric.state.await_slot(*divmod(index, NUM_GENERATIONS), rows)
            if landed > rows:
                detail = f"{landed} rows landed in a slot for which {peer.name} says it posted {rows}"
                peer.lose(Failure(Reason.overflow, detail, landed, rows))
                return
            if landed < rows:
                missing.add(index)
        self._moving[peer] = missing
        self._check_counted(peer)

    def slot_reached(self, counter_index: int) -> None:
        """As many rows as its peer had posted were counted in that slot."""
        for peer, missing in list(self._moving.items()):
            if missing is not None and counter_index in missing:
                missing.discard(counter_index)
                self._check_counted(peer)

    # What follows from it

    def _feed(self, event: object) -> None:
        if self._stopped:
            return
        for effect in self._machine.feed(event):
            match effect:
                case core.OpenPort():
                    self._node.fabric.rotate()
                case core.MovePeers():
                    self._move()
                case core.LosePeers(errno):
                    detail = f"no second endpoint could be opened to fence a lost peer: {records.error_text(errno)}"
                    for peer in list(self._node.peers):
                        peer.lose(Failure(Reason.fabric, detail))
                case core.ClosePort():
                    self._node.fabric.close_old_port()

    def _move(self) -> None:
        log.info("rotating", peers=[peer.name for peer in self._node.peers])
        self._moving = {peer: None for peer in self._node.peers if peer.failure is None and peer.open_links}
        lease_s = self._node.config.lease_s
        self._deadline = self._node.loop.call_later(lease_s, self._lose_laggards)
        for peer in list(self._moving):
            if peer.machine.state is PeerState.live:
                self._send_rotate(peer)
        self._check_moved()

    def _send_rotate(self, peer: PeerDriver) -> None:
        if not peer.can_rotate:
            peer.lose(Failure(Reason.fabric, f"{peer.name} cannot move to another endpoint, and this one is closed"))
            return
        peer.send(Rotate(ranks=peer.rank_fabric()))

    def _check_counted(self, peer: PeerDriver) -> None:
        if self._moving.get(peer) == set():
            peer.resume()
            del self._moving[peer]
            self._check_moved()

    def _check_moved(self) -> None:
        moving = core.RotationState.moving, core.RotationState.moving_again
        if not self._moving and self._machine.state in moving:
            if self._deadline is not None:
                self._deadline.cancel()
            self._feed(core.AllMoved())

    def _lose_laggards(self) -> None:
        seconds = self._node.config.lease_s
        for peer in list(self._moving):
            detail = f"{peer.name} did not move to our new endpoint within {seconds:g} s"
            peer.lose(Failure(Reason.timeout, detail))

    def stop(self) -> None:
        """The messenger closes, and with it every endpoint: no rotation goes on."""
        self._stopped = True
        if self._deadline is not None:
            self._deadline.cancel()
