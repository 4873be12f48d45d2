"""Drives one fetch on the decoder: slots and counters armed before Dispatch, then nothing but counting."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog
from msgspec.structs import replace

from kvmsgr.core import fetch as core
from kvmsgr.core import leg as legs
from kvmsgr.core.failure import Failure
from kvmsgr.core.leg import CLEAN, Leg
from kvmsgr.core.peer import PeerState
from kvmsgr.errors import LocalProtocolError, TransferError, transfer_error
from kvmsgr_protocol import (
    Accept,
    Busy,
    Dispatch,
    Drained,
    Failed,
    Finished,
    Message,
    Reason,
    Refuse,
    Restarted,
    Sent,
    Unknown,
)

from .answers import failed

if TYPE_CHECKING:
    from .node import Node
    from .peer import PeerDriver

log = structlog.get_logger("kvmsgr")
RECORD_S = 0.05


class Arrival:
    """A prompt's KV has arrived.

    Attributes:
        num_tokens: Positions that are in the cache now: all but the prompt's last, which the decoder runs itself. Those
            before the first span were there already.
        rows: Rows that landed.
        context: Name of each context buffer to its bytes, shape (slot bytes,), valid until `release`.
    """

    def __init__(self, num_tokens: int, rows: int, context: Mapping[str, npt.NDArray[np.uint8]], fetch: Fetch) -> None:
        self.num_tokens = num_tokens
        self.rows = rows
        self.context = context
        self._fetch = fetch

    def release(self) -> None:
        """Give the context slot back. Idempotent."""
        self.context = {}
        self._fetch.release_context()


class Fetch:
    """One request on its way here. Await it for its `Arrival`; `released` tells when its pages are free."""

    def __init__(
        self,
        node: Node,
        slots: Mapping[PeerDriver, tuple[int, int]],
        dispatch: Dispatch,
    ) -> None:
        self.request_id = dispatch.request_id
        self.attempt = dispatch.attempt
        self.spans = dispatch.ranks[0].spans
        self._node = node
        self._context_slot = dispatch.context_slot
        self._dispatch = dispatch  # of one leg; the others differ in their slot
        self._machine = core.Fetch(self.request_id, dispatch.expected_rows)
        self._slots = slots
        self._legs = {peer: Leg(f"{self.request_id} at {peer.name}") for peer in slots}
        self._arrival: asyncio.Future[Arrival] = node.loop.create_future()
        self._released: asyncio.Future[None] = node.loop.create_future()
        self._expiry = node.loop.call_later(dispatch.time_allowed_s, self._expire)
        self._stall: asyncio.TimerHandle | None = None
        self._rows_posted = 0
        self._rows = 0  # that had landed when the pages were released

    # The engine's side

    def __await__(self) -> Generator[object, None, Arrival]:
        return asyncio.shield(self._arrival).__await__()

    async def released(self) -> None:
        """Wait until no write can land in the destination pages any more. Never raises for a failed transfer.

        After a failure this may be long: until all rows have landed after all, or the messenger closes.
        """
        await asyncio.shield(self._released)

    @property
    def rows_landed(self) -> int:
        """Rows that have landed so far."""
        if self._released.done():
            return self._rows
        return self._node.fabric.state.attempt_rows(self.attempt)

    @property
    def _all_landed(self) -> bool:
        return self.rows_landed == self._machine.rows_expected

    # What comes in

    def has_leg(self, peer: PeerDriver) -> bool:
        return peer in self._legs

    @property
    def done(self) -> bool:
        """Whether the attempt is decided; its pages may still be held."""
        return self._machine.state is not core.FetchState.pending

    @property
    def slots(self) -> Mapping[PeerDriver, tuple[int, int]]:
        """(slot, generation) of each leg."""
        return self._slots

    def start(self) -> None:
        """Everything is armed: tell the peers that are live, and resolve at once what has no rows."""
        for peer in self._legs:
            if peer.machine.state is PeerState.live:
                self.peer_live(peer)
            else:
                peer.waiting.append(self)
        if self._machine.rows_expected == 0:
            self.rows_counted(0)

    def peer_live(self, peer: PeerDriver) -> None:
        self._feed_leg(peer, legs.PeerLive())

    def peer_lost(self, peer: PeerDriver, failure: Failure) -> None:
        expected = self._machine.rows_expected
        self._feed_leg(peer, legs.PeerFailed(Failure(failure.reason, failure.detail, self.rows_landed, expected)))

    def rows_counted(self, rows: int) -> None:
        self._feed(core.RowsCounted(rows))

    def count_overflowed(self, rows: int) -> None:
        self._feed(core.CountOverflowed(rows))

    def close(self) -> None:
        self._feed(core.Closed(self.rows_landed))

    def message_received(self, peer: PeerDriver, message: Message) -> None:
        match message:
            case Accept():
                self._feed_leg(peer, legs.Accepted())
            case Busy(reason=detail, retry_after_s=retry_after_s):
                failure = Failure(Reason.busy, f"{peer.name} is busy: {detail}", retry_after_s=retry_after_s)
                self._feed_leg(peer, legs.Declined(failure))
            case Refuse(code=code, reason=detail):
                self._feed_leg(peer, legs.Declined(Failure(code, f"{peer.name} refused: {detail}")))
            case Sent(rows_posted=rows):
                self._feed_leg(peer, legs.AllPosted(rows))
            case Failed(code=code, reason=detail):
                self._peer_failed(peer, Failure(code, f"{peer.name} failed: {detail}"))
            case Restarted():
                self._peer_failed(peer, Failure(Reason.engine, f"{peer.name} restarted the request"))
            case Unknown():
                self._peer_failed(peer, Failure(Reason.unknown_request, f"{peer.name} does not know the request"))
            case Drained(rows_posted=rows):
                log.info("peer drained", request_id=self.request_id, peer=peer.name, rows_posted=rows)
            case _:
                kind = type(message).__name__
                raise LocalProtocolError(f"{kind} is no answer to a Dispatch (request {self.request_id!r})")

    def _peer_failed(self, peer: PeerDriver, failure: Failure) -> None:
        counted = Failure(failure.reason, failure.detail, self.rows_landed, self._machine.rows_expected)
        self._feed_leg(peer, legs.PeerFailed(counted))

    def _expire(self) -> None:
        if self._all_landed:  # and the record that says so is on its way
            self._expiry = self._node.loop.call_later(RECORD_S, self._expire)
        else:
            self._feed(core.TimeExpired(self.rows_landed, self._dispatch.time_allowed_s))

    def _check_stall(self, rows_before: int | None) -> None:
        """Called once all is posted, and again each `stall_s`: rows must be landing, or be all there."""
        rows = self.rows_landed
        if self._all_landed:
            return  # the record that says so is on its way
        if rows == rows_before or self._rows_posted != self._machine.rows_expected:
            self._feed(core.CountStalled(rows, self._rows_posted))
        else:
            self._stall = self._node.loop.call_later(self._node.config.stall_s, self._check_stall, rows)

    # What follows from it

    def _feed_leg(self, peer: PeerDriver, event: object) -> None:
        slot, generation = self._slots[peer]
        for effect in self._legs[peer].feed(event):
            match effect:
                case legs.SendDispatch():
                    log.info("request dispatched", request_id=self.request_id, peer=peer.name)
                    peer.send(replace(self._dispatch, slot=slot, generation=generation))
                case legs.SendFinished():
                    rows = self._machine.rows_expected
                    peer.send(Finished(request_id=self.request_id, attempt=self.attempt, rows=rows))
                case legs.SendFailed(failure):
                    peer.send(failed(self.request_id, self.attempt, failure))
                case legs.CheckCount(rows):
                    self._rows_posted += rows
                    if all(leg.state is legs.LegState.sent for leg in self._legs.values()):
                        self._check_stall(None)
                case legs.FailAttempt(failure):
                    self._feed(core.LegFailed(failure))
        self._release_if_clean()

    def _feed(self, event: object) -> None:
        for effect in self._machine.feed(event):
            match effect:
                case core.EndAttempt(failure):
                    self._end(failure)
                case core.ResolveArrival(rows):
                    log.info("request ready", request_id=self.request_id, rows=rows)
                    if not self._arrival.done():
                        self._arrival.set_result(self._make_arrival(rows))
                case core.ResolveFailure(failure):
                    log.warning(
                        "request failed", request_id=self.request_id, reason=str(failure.reason), detail=failure.detail
                    )
                    if not self._arrival.done():
                        self._arrival.set_exception(self._error(failure))
                        self._arrival.exception()  # it may never be awaited; the log has said it
                case core.FailPeers(failure):
                    for peer in list(self._legs):
                        peer.lose(failure)
                case core.ReleasePages():
                    self._release_pages()

    def _end(self, failure: Failure | None) -> None:
        self._expiry.cancel()
        if self._stall is not None:
            self._stall.cancel()
        self._node.fabric.state.end_attempt(self.attempt)
        event = legs.AttemptReady() if failure is None else legs.AttemptFailed(failure)
        for peer in self._legs:
            self._feed_leg(peer, event)

    def _release_if_clean(self) -> None:
        clean = all(leg.state in CLEAN for leg in self._legs.values())
        if clean and self._machine.state is core.FetchState.failed:
            self._feed(core.LegsClean())

    def _release_pages(self) -> None:
        self._rows = self.rows_landed
        self._node.release_fetch(self)
        if self._machine.state is not core.FetchState.ready:
            self.release_context()
        if not self._released.done():
            self._released.set_result(None)

    def release_by_fence(self) -> None:
        """The endpoints are closed: whatever the state, nothing can land."""
        if not self._released.done():
            self._release_pages()

    def release_context(self) -> None:
        slot, self._context_slot = self._context_slot, -1
        if slot >= 0:
            self._node.context_slots.give(slot)

    def _make_arrival(self, rows: int) -> Arrival:
        memory, slot = self._node.memory, self._context_slot
        context = (
            {layout.name: memory.context_view(index, slot) for index, layout in enumerate(memory.context)}
            if slot >= 0
            else {}
        )
        return Arrival(self._dispatch.num_tokens - 1, rows, context, self)

    def _error(self, failure: Failure) -> TransferError:
        return transfer_error(
            self.request_id, failure.reason, failure.detail, failure.rows, failure.rows_expected, failure.retry_after_s
        )
