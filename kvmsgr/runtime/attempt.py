"""Drives one attempt on the decoder: slots and counters armed before Dispatch, then nothing but counting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from kvmsgr.core import attempt as core
from kvmsgr.core import leg as legs
from kvmsgr.core.attempt import AttemptState
from kvmsgr.core.failure import Failure
from kvmsgr.core.leg import CLEAN, Leg
from kvmsgr.core.peer import PeerState
from kvmsgr.errors import FabricStuckError, LocalProtocolError, MismatchError
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

from .answers import ended, log_failure
from .division import divide_legs

if TYPE_CHECKING:
    from .fetch import Fetch
    from .node import Node
    from .peer import PeerDriver

log = structlog.get_logger("kvmsgr")
FAR = {
    legs.LegState.waiting: "is not connected yet, or was busy",
    legs.LegState.dispatched: "has not answered",
    legs.LegState.accepted: "has accepted it, and not posted all",
    legs.LegState.sent: "has posted all",
    legs.LegState.draining: "was to stop, and has not said what it posted",
}
HELD = frozenset({AttemptState.quarantined, AttemptState.restarting})


class Attempt:
    """One attempt of a fetch, with a slot at each peer.

    Args:
        node: The node.
        fetch: What it is an attempt of: it is told how the attempt ends, and when its pages are free.
        slots: (slot, generation) of each leg.
        numbers: Of each leg in the state file.
        dispatch: Of all legs together: each has its own slot and rows, and maybe no context.
    """

    def __init__(
        self,
        node: Node,
        fetch: Fetch,
        slots: Mapping[PeerDriver, tuple[int, int]],
        numbers: Mapping[PeerDriver, int],
        dispatch: Dispatch,
    ) -> None:
        self.request_id = dispatch.request_id
        self.number = dispatch.attempt
        self.targets = dispatch.ranks
        self.slots = slots
        self.legs = {peer: Leg(f"{self.request_id} at {peer.name}") for peer in slots}
        self._node = node
        self._fetch = fetch
        self._dispatch = dispatch
        self._machine = core.Attempt(self.request_id, dispatch.expected_rows)
        self._numbers = numbers
        self._num_pages = sum(span.num_pages for target in self.targets for span in target.spans)
        self._leg_rows = dict.fromkeys(slots, dispatch.expected_rows)  # known when all the peers are live
        self._context_from: PeerDriver | None = None
        self._failure: Failure | None = None
        self._watches: dict[PeerDriver, asyncio.TimerHandle] = {}
        self._stall: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None  # before it is sent
        self._rows_posted = 0
        self._rows: int | None = None  # that had landed when it had left nothing behind

    # What it has come to

    @property
    def state(self) -> AttemptState:
        return self._machine.state

    @property
    def done(self) -> bool:
        """Whether its request is decided; the pages may still be held."""
        return self.state not in (AttemptState.pending, AttemptState.restarting)

    @property
    def rows_landed(self) -> int:
        return self._node.fabric.state.attempt_rows(self.number) if self._rows is None else self._rows

    @property
    def is_complete(self) -> bool:
        """Whether all rows have landed, and the record that says so is on its way."""
        return self.state is AttemptState.pending and self._all_landed

    @property
    def _all_landed(self) -> bool:
        return self.rows_landed == self._machine.rows_expected

    @property
    def quarantine(self) -> str | None:
        """Why its pages are held although the request is over; None when they are not."""
        if self.state is not AttemptState.quarantined:
            return None
        return "; ".join(self._why_held(peer, leg) for peer, leg in self.legs.items() if leg.state not in CLEAN)

    # What comes in

    def has_leg(self, peer: PeerDriver) -> bool:
        return peer in self.legs

    def may_land_from(self, peer: PeerDriver) -> bool:
        """Whether writes of the peer may still land in these pages."""
        return peer in self.legs and self.legs[peer].state not in CLEAN

    def rows_posted_by(self, peer: PeerDriver) -> int:
        """Rows that the peer says it posted in all; 0 until it has said it."""
        return self.legs[peer].rows_posted

    def start(self, pause_s: float = 0.0) -> None:
        """Everything is armed: tell the peers that are live, after a pause, and resolve at once what has no rows."""
        if pause_s:
            self._pause = self._node.loop.call_later(pause_s, self._pause_over)
        for peer in self.legs:
            self._open_in_ledger(peer)
        for peer in self.legs:
            if peer.machine.state is not PeerState.live:
                peer.waiting.append(self)
        if self._machine.rows_expected == 0:
            self.rows_counted(0)
        self._dispatch_if_live()

    def _pause_over(self) -> None:
        self._pause = None
        self._dispatch_if_live()

    def peer_live(self, peer: PeerDriver) -> None:
        self._dispatch_if_live()

    def _dispatch_if_live(self) -> None:
        """Only when all the peers are there is it known that they hold everything, and who brings what. One that is
        over by then has nothing to divide, and its numbers may be others' already."""
        if self._pause is not None or any(peer.machine.state is not PeerState.live for peer in self.legs):
            return
        try:
            if not self.done:
                self._divide()
        except MismatchError as error:
            self._feed(core.LegFailed(self._counted(Failure(Reason.layout_mismatch, str(error)))))
            return
        for peer in self.legs:
            self._feed_leg(peer, legs.PeerLive())

    def _divide(self) -> None:
        """Raises MismatchError: together the peers do not hold everything exactly once."""
        routes = {peer: peer.routes for peer in self.legs if peer.routes is not None}
        self._leg_rows, self._context_from = divide_legs(self._node, routes, self._dispatch)
        for peer in routes:
            self._open_in_ledger(peer)

    def rank_lost(self, failure: Failure) -> None:
        """A destination rank is lost. What is on its way still lands in memory that is mapped here."""
        if not self.done:  # another one of the rank may have ended the epoch that it was waiting for
            self._feed(core.LegFailed(self._counted(failure)))

    def peer_lost(self, peer: PeerDriver, failure: Failure) -> None:
        self._feed_leg(peer, legs.PeerLost(self._counted(failure)))

    def peer_fenced(self, peer: PeerDriver) -> None:
        """The endpoint that the peer wrote to is closed, and its completion queue read to the end."""
        self._feed_leg(peer, legs.Fenced())

    def slot_reached(self, peer: PeerDriver, rows: int) -> None:
        """That many rows were counted, which is what was waited for."""
        leg = self.legs[peer]
        if leg.rows_posted == rows and leg.state in (legs.LegState.counting, legs.LegState.lost):
            self._feed_leg(peer, legs.CountEqual())

    def rows_counted(self, rows: int) -> None:
        """As many rows as the attempt expects: the legs together, and so each of them."""
        wrong = self._wrong_legs()
        if not wrong:
            self._feed(core.RowsCounted(rows))
            return
        found = ", ".join(f"{landed} of {self._leg_rows[peer]} from {peer.name}" for peer, landed in wrong.items())
        failure = Failure(Reason.overflow, f"the rows of the legs do not add up: {found} landed", rows, rows)
        self._feed(core.LegFailed(failure))
        for peer in self._to_blame(failure):
            peer.lose(failure)

    def count_overflowed(self, rows: int) -> None:
        self._feed(core.CountOverflowed(rows))

    def cancel(self, why: str) -> None:
        self._feed(core.Cancelled(self.rows_landed, why))

    def expire(self, time_allowed_s: float) -> None:
        """The time is over that the request was allowed."""
        stand = "; ".join(f"{peer.name} {FAR.get(leg.state, leg.state)}" for peer, leg in self.legs.items())
        self._feed(core.TimeExpired(self.rows_landed, time_allowed_s, stand))

    def close(self) -> None:
        self._feed(core.Closed(self.rows_landed))

    def message_received(self, peer: PeerDriver, message: Message) -> None:
        match message:
            case Accept():
                self._feed_leg(peer, legs.Accepted())
            case Busy(reason=detail, retry_after_s=retry_after_s):
                self._busy(peer, Failure(Reason.busy, f"{peer.name} is busy: {detail}", retry_after_s=retry_after_s))
            case Refuse(code=code, reason=detail):
                self._feed_leg(peer, legs.Declined(Failure(code, f"{peer.name} refused: {detail}")))
            case Sent(rows_posted=rows):
                self._feed_leg(peer, legs.AllPosted(rows))
            case Drained(rows_posted=rows):
                self._feed_leg(peer, legs.Drained(rows))
            case Failed(code=code, reason=detail):
                failure = Failure(code, f"{peer.name} failed: {detail}")
                self._feed_leg(peer, legs.PeerGaveUp(self._counted(failure)))
            case Restarted():
                failure = Failure(Reason.preempted, f"{peer.name} took its pages back")
                self._feed_leg(peer, legs.PeerRestarted(self._counted(failure)))
            case Unknown():
                self._unknown(peer)
            case _:
                kind = type(message).__name__
                raise LocalProtocolError(f"{kind} is no answer to a Dispatch (request {self.request_id!r})")

    def _busy(self, peer: PeerDriver, failure: Failure) -> None:
        """The engine hears of it, unless it was told long ago that the request is under way."""
        again = self._fetch.num_restarts and self.legs[peer].state is legs.LegState.dispatched
        self._feed_leg(peer, legs.PutOff(failure) if again else legs.Declined(failure))

    def _unknown(self, peer: PeerDriver) -> None:
        """Never a proof. A peer may have ended the leg, and told us, before our Cancel reached it; else it has lost
        track of what it writes, and only the fence helps."""
        if self.legs[peer].state not in (*CLEAN, legs.LegState.counting):
            detail = f"{peer.name} does not know request {self.request_id!r}, which was dispatched to it"
            peer.lose(Failure(Reason.unknown_request, detail))

    def _counted(self, failure: Failure) -> Failure:
        return Failure(failure.reason, failure.detail, self.rows_landed, self._machine.rows_expected)

    def _check_stall(self, rows_before: int | None) -> None:
        """Called once all is posted, and again each `stall_s`: rows must be landing, or be all there."""
        rows = self.rows_landed
        if self._all_landed:
            return  # the record that says so is on its way
        if rows == rows_before:
            self._feed(core.CountStalled(rows, self._rows_posted))
        else:
            self._stall = self._node.loop.call_later(self._node.config.stall_s, self._check_stall, rows)

    def _posted_wrongly(self, peer: PeerDriver, rows: int) -> None:
        """The peer has posted all it will, and that is not what its leg needs: waiting for the others is of no use."""
        expected = self._leg_rows[peer]
        landed = self._node.fabric.state.slot_rows(*self.slots[peer])
        detail = f"{landed} of {expected} rows landed, {peer.name} posted {rows}, and no more are landing"
        failure = Failure(Reason.short_count, detail, landed, expected)
        self._feed(core.LegFailed(failure))
        peer.lose(failure)

    # What follows from it

    def _dispatch_of(self, peer: PeerDriver) -> Dispatch:
        """What travels to one peer."""
        slot, generation = self.slots[peer]
        return replace(
            self._dispatch,
            slot=slot,
            generation=generation,
            expected_rows=self._leg_rows[peer],
            context_slot=self._dispatch.context_slot if peer is self._context_from else -1,
        )

    def _open_in_ledger(self, peer: PeerDriver) -> None:
        state, ledger = str(self.legs[peer].state), self._node.ledger
        ledger.open(self._numbers[peer], "fetch", state, peer.name, self._dispatch_of(peer), self._num_layers)

    @property
    def _num_layers(self) -> int:
        return max(self._node.memory.num_signals)

    def _feed_leg(self, peer: PeerDriver, event: object) -> None:
        for effect in self.legs[peer].feed(event):
            match effect:
                case legs.SendDispatch():
                    log.info("request dispatched", request_id=self.request_id, peer=peer.name)
                    peer.send(self._dispatch_of(peer))
                case legs.SendFinished():
                    rows = self._leg_rows[peer]
                    peer.send(Finished(request_id=self.request_id, attempt=self.number, rows=rows))
                case legs.SendEnd(failure):
                    peer.send(ended(self.request_id, self.number, failure))
                case legs.AwaitDrained():
                    self._watch(peer, legs.LegState.draining, self._node.config.drain_timeout_s, 0)
                case legs.CheckCount(rows):
                    self._rows_posted += rows
                    if rows != self._leg_rows[peer] and not self._all_landed:
                        self._posted_wrongly(peer, rows)
                    elif all(leg.state is legs.LegState.sent for leg in self.legs.values()):
                        self._check_stall(None)
                case legs.AwaitCount(rows):
                    self._await_count(peer, rows)
                case legs.FailAttempt(failure):
                    self._feed(core.LegFailed(failure))
                case legs.RestartAttempt(failure):
                    self._feed(core.LegRestarted(failure))
        self._show(peer)
        self._release_if_clean()

    def _show(self, peer: PeerDriver) -> None:
        if self._rows is not None:
            return  # its numbers may be others' already
        leg = self.legs[peer]
        held = self.state in HELD and leg.state not in CLEAN
        self._node.ledger.update(
            self._numbers[peer],
            str(leg.state),
            self._num_pages,
            str(self._failure.reason) if self._failure else "",
            self._why_held(peer, leg) if held else "",
            quarantined=self.number if held and self.done else None,
        )

    def _await_count(self, peer: PeerDriver, rows: int) -> None:
        """What the peer says it has posted is believed when as many rows were counted, and not before: until then
        writes of it may be anywhere between its memory and ours."""
        landed = self._node.fabric.state.await_slot(*self.slots[peer], rows)
        if landed == rows:
            self._feed_leg(peer, legs.CountEqual())
        elif landed < rows:
            self._watch(peer, legs.LegState.counting, self._node.config.stall_s, landed)
        else:
            detail = f"{landed} rows landed for request {self.request_id!r}, of which {peer.name} says it posted {rows}"
            peer.lose(Failure(Reason.overflow, detail, landed, rows))

    def _watch(self, peer: PeerDriver, state: legs.LegState, seconds: float, slot_rows: int) -> None:
        """A leg may stay in `state` while rows of it land. Then its peer is lost, and the fence is the proof."""
        if (running := self._watches.pop(peer, None)) is not None:
            running.cancel()
        self._watches[peer] = self._node.loop.call_later(seconds, self._check_watch, peer, state, seconds, slot_rows)

    def _check_watch(self, peer: PeerDriver, state: legs.LegState, seconds: float, slot_rows: int) -> None:
        leg = self.legs[peer]
        if leg.state is not state:
            return
        landed = self._node.fabric.state.slot_rows(*self.slots[peer])
        if landed != slot_rows:
            self._watch(peer, state, seconds, landed)
        elif state is legs.LegState.counting:
            detail = f"{landed} of the {leg.rows_posted} rows that {peer.name} posted landed, and no more are landing"
            peer.lose(Failure(Reason.short_count, detail, landed, leg.rows_posted))
        else:
            detail = f"{peer.name} has not said within {seconds:g} s how many rows it posted for {self.request_id!r}"
            peer.lose(Failure(Reason.timeout, detail, landed))

    def _why_held(self, peer: PeerDriver, leg: Leg) -> str:
        slot_rows = self._node.fabric.state.slot_rows(*self.slots[peer])
        match leg.state:
            case legs.LegState.counting:
                return f"{slot_rows} of the {leg.rows_posted} rows that {peer.name} posted have landed"
            case legs.LegState.lost:
                return f"{peer.name} is lost, and what it wrote to is not closed ({peer.link_failure or 'no error'})"
        return f"{peer.name} has not said how many rows it posted; {slot_rows} have landed"

    def _feed(self, event: object) -> None:
        for effect in self._machine.feed(event):
            match effect:
                case core.EndAttempt(failure):
                    self._end(failure)
                case core.ResolveArrival(rows):
                    log.info("request ready", request_id=self.request_id, rows=rows)
                    self._fetch.arrived(rows)
                case core.ResolveFailure(failure):
                    self._failure = failure
                    log_failure(self.request_id, failure)
                    for peer in self.legs:
                        self._show(peer)
                    self._fetch.failed(failure)
                case core.FailPeers(failure):
                    for peer in self._to_blame(failure):
                        peer.lose(failure)
                case core.StartOver():
                    self._leave()
                    assert self._failure is not None
                    self._fetch.start_over(list(self.legs), self._failure)
                case core.ReleasePages():
                    self._release_pages()

    def _to_blame(self, failure: Failure) -> list[PeerDriver]:
        """The peers that broke the count. Of too many rows those that brought them: others may still be at it."""
        wrong = self._wrong_legs()
        if failure.reason is Reason.overflow:
            wrong = {peer: rows for peer, rows in wrong.items() if rows > self._leg_rows[peer]}
        return list(wrong or self.legs)

    def _wrong_legs(self) -> dict[PeerDriver, int]:
        """The legs of which other than the expected rows have landed, and how many."""
        landed = {peer: self._node.fabric.state.slot_rows(*slot) for peer, slot in self.slots.items()}
        return {peer: rows for peer, rows in landed.items() if rows != self._leg_rows[peer]}

    def _end(self, failure: Failure | None) -> None:
        self._failure = failure
        if self._stall is not None:
            self._stall.cancel()
        self._node.fabric.state.end_attempt(self.number)
        event = legs.AttemptReady() if failure is None else legs.AttemptFailed(failure)
        for peer in self.legs:
            self._feed_leg(peer, event)

    def _release_if_clean(self) -> None:
        if self.state in HELD and all(leg.state in CLEAN for leg in self.legs.values()):
            self._feed(core.LegsClean())

    def _release_pages(self) -> None:
        self._leave()
        self._fetch.pages_free()

    def _leave(self) -> None:
        """Nothing of it can land any more: leave nothing behind."""
        self._rows = self.rows_landed
        self._cancel_watches()
        for number in self._numbers.values():
            self._node.ledger.close(number)
        self._node.outbox.forget(self)

    def _cancel_watches(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        if self._pause is not None:
            self._pause.cancel()

    def release_by_fence(self) -> None:
        """Every endpoint is closed: whatever the state, nothing can land."""
        if self._rows is None:
            self._release_pages()

    def never_released(self, error: FabricStuckError) -> None:
        """The fabric cannot be closed: no proof will ever come."""
        self._cancel_watches()
        self._fetch.never_released(error)
