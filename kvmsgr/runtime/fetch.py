"""Drives one fetch on the decoder: slots and counters armed before Dispatch, then nothing but counting."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from kvmsgr.core import fetch as core
from kvmsgr.core import leg as legs
from kvmsgr.core.failure import Failure
from kvmsgr.core.leg import CLEAN, Leg
from kvmsgr.core.peer import PeerState
from kvmsgr.errors import (
    FabricStuckError,
    LocalProtocolError,
    MismatchError,
    PagesQuarantined,
    TransferError,
    transfer_error,
)
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

from .answers import as_text, ended, log_failure
from .arrival import Arrival
from .division import divide_legs

if TYPE_CHECKING:
    from .node import Node
    from .peer import PeerDriver

log = structlog.get_logger("kvmsgr")
RECORD_S = 0.05
FENCE_S = 1.0  # that a fence takes, at most, once the lease is over


class Fetch:
    """One request on its way here. Await it for its `Arrival`; `released` tells when its pages are free."""

    def __init__(
        self,
        node: Node,
        slots: Mapping[PeerDriver, tuple[int, int]],
        numbers: Mapping[PeerDriver, int],
        dispatch: Dispatch,
    ) -> None:
        self.request_id = dispatch.request_id
        self.attempt = dispatch.attempt
        self.targets = dispatch.ranks
        self._node = node
        self._context_slot = dispatch.context_slot
        self._dispatch = dispatch  # of all legs together: each has its own slot, rows, and maybe no context
        self._machine = core.Fetch(self.request_id, dispatch.expected_rows)
        self._slots = slots
        self._numbers = numbers  # of its legs in the ledger
        self._num_pages = sum(span.num_pages for target in self.targets for span in target.spans)
        self._leg_rows = dict.fromkeys(slots, dispatch.expected_rows)  # known when all the peers are live
        self._context_from: PeerDriver | None = None
        self._failure: Failure | None = None
        self._watches: dict[PeerDriver, asyncio.TimerHandle] = {}
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

    def cancel(self, why: str = "the engine no longer wants it") -> None:
        """Stop it: awaiting it raises `RequestCancelledError`, and its peers are told to stop. Idempotent, and without
        effect once the request is decided. The pages stay in quarantine until `released()`."""
        self._feed(core.Cancelled(self.rows_landed, as_text(why)))

    async def released(self) -> None:
        """Wait until it is proven that no write can land in the destination pages any more. Does not raise because the
        transfer failed.

        The proof: every row was counted; or each peer has said how many rows it posted and as many were counted; or the
        endpoint it wrote to is closed. A silent peer is lost after `Config.lease_s`, and its endpoint closed then.

        Raises:
            FabricStuckError: The messenger was closed, and its endpoints could not be: never use these pages again.
        """
        await asyncio.shield(self._released)

    @property
    def quarantine(self) -> str | None:
        """Why the pages of a request that is over are still held; None when they are not."""
        if self._machine.state is not core.FetchState.quarantined:
            return None
        return "; ".join(self._why_held(peer, leg) for peer, leg in self._legs.items() if leg.state not in CLEAN)

    async def __aenter__(self) -> Fetch:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Cancel it if it is under way, and wait for its pages, as long as any proof can take: a peer may need
        `drain_timeout_s` to answer, and is lost then; a silent one is when its lease ends.

        Raises:
            PagesQuarantined: No proof has come; the messenger holds the pages on, and `released()` says when they are
                free. A cancelled task is not kept from ending: then this is only logged.
        """
        self.cancel("its block was left")
        config = self._node.config
        leases_s = config.lease_s * (2 if self._node.fabric.rotates else 1)  # one to lose it, one for others to move
        await asyncio.wait([self._released], timeout=max(leases_s, config.drain_timeout_s) + FENCE_S)
        if self._released.done():
            return
        quarantined = PagesQuarantined(self.request_id, self.quarantine or "")
        log.warning("pages quarantined", request_id=self.request_id, detail=str(quarantined))
        if kind is not asyncio.CancelledError:
            raise quarantined

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

    def may_land_from(self, peer: PeerDriver) -> bool:
        """Whether writes of the peer may still land in these pages."""
        return peer in self._legs and self._legs[peer].state not in CLEAN

    def rows_posted_by(self, peer: PeerDriver) -> int:
        """Rows that the peer says it posted in all; 0 until it has said it."""
        return self._legs[peer].rows_posted

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
            self._open_in_ledger(peer)
        for peer in self._legs:
            if peer.machine.state is not PeerState.live:
                peer.waiting.append(self)
        if self._machine.rows_expected == 0:
            self.rows_counted(0)
        self._dispatch_if_live()

    def peer_live(self, peer: PeerDriver) -> None:
        self._dispatch_if_live()

    def _dispatch_if_live(self) -> None:
        """Only when all the peers are there is it known that they hold everything, and who brings what. One that is
        over by then has nothing to divide, and its numbers may be others' already."""
        if any(peer.machine.state is not PeerState.live for peer in self._legs):
            return
        try:
            if not self.done:
                self._divide()
        except MismatchError as error:
            self._feed(core.LegFailed(self._counted(Failure(Reason.layout_mismatch, str(error)))))
            return
        for peer in self._legs:
            self._feed_leg(peer, legs.PeerLive())

    def _divide(self) -> None:
        """Raises MismatchError: together the peers do not hold everything exactly once."""
        routes = {peer: peer.routes for peer in self._legs if peer.routes is not None}
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
        leg = self._legs[peer]
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
            case Drained(rows_posted=rows):
                self._feed_leg(peer, legs.Drained(rows))
            case Failed(code=code, reason=detail):
                failure = Failure(code, f"{peer.name} failed: {detail}")
                self._feed_leg(peer, legs.PeerGaveUp(self._counted(failure)))
            case Restarted():
                failure = Failure(Reason.engine, f"{peer.name} restarted the request")
                self._feed_leg(peer, legs.PeerGaveUp(self._counted(failure)))
            case Unknown():
                self._unknown(peer)
            case _:
                kind = type(message).__name__
                raise LocalProtocolError(f"{kind} is no answer to a Dispatch (request {self.request_id!r})")

    def _unknown(self, peer: PeerDriver) -> None:
        """Never a proof. A peer may have ended the leg, and told us, before our Cancel reached it; else it has lost
        track of what it writes, and only the fence helps."""
        if self._legs[peer].state not in (*CLEAN, legs.LegState.counting):
            detail = f"{peer.name} does not know request {self.request_id!r}, which was dispatched to it"
            peer.lose(Failure(Reason.unknown_request, detail))

    def _counted(self, failure: Failure) -> Failure:
        return Failure(failure.reason, failure.detail, self.rows_landed, self._machine.rows_expected)

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
        if rows == rows_before:
            self._feed(core.CountStalled(rows, self._rows_posted))
        else:
            self._stall = self._node.loop.call_later(self._node.config.stall_s, self._check_stall, rows)

    def _posted_wrongly(self, peer: PeerDriver, rows: int) -> None:
        """The peer has posted all it will, and that is not what its leg needs: waiting for the others is of no use."""
        expected = self._leg_rows[peer]
        landed = self._node.fabric.state.slot_rows(*self._slots[peer])
        detail = f"{landed} of {expected} rows landed, {peer.name} posted {rows}, and no more are landing"
        failure = Failure(Reason.short_count, detail, landed, expected)
        self._feed(core.LegFailed(failure))
        peer.lose(failure)

    # What follows from it

    def _dispatch_of(self, peer: PeerDriver) -> Dispatch:
        """What travels to one peer."""
        slot, generation = self._slots[peer]
        return replace(
            self._dispatch,
            slot=slot,
            generation=generation,
            expected_rows=self._leg_rows[peer],
            context_slot=self._context_slot if peer is self._context_from else -1,
        )

    def _open_in_ledger(self, peer: PeerDriver) -> None:
        state, ledger = str(self._legs[peer].state), self._node.ledger
        ledger.open(self._numbers[peer], "fetch", state, peer.name, self._dispatch_of(peer), self._num_layers)

    @property
    def _num_layers(self) -> int:
        return max(self._node.memory.num_signals)

    def _feed_leg(self, peer: PeerDriver, event: object) -> None:
        for effect in self._legs[peer].feed(event):
            match effect:
                case legs.SendDispatch():
                    log.info("request dispatched", request_id=self.request_id, peer=peer.name)
                    peer.send(self._dispatch_of(peer))
                case legs.SendFinished():
                    rows = self._leg_rows[peer]
                    peer.send(Finished(request_id=self.request_id, attempt=self.attempt, rows=rows))
                case legs.SendEnd(failure):
                    peer.send(ended(self.request_id, self.attempt, failure))
                    self._watch(peer, legs.LegState.draining, self._node.config.drain_timeout_s, 0)
                case legs.CheckCount(rows):
                    self._rows_posted += rows
                    if rows != self._leg_rows[peer] and not self._all_landed:
                        self._posted_wrongly(peer, rows)
                    elif all(leg.state is legs.LegState.sent for leg in self._legs.values()):
                        self._check_stall(None)
                case legs.AwaitCount(rows):
                    self._await_count(peer, rows)
                case legs.FailAttempt(failure):
                    self._feed(core.LegFailed(failure))
        self._show(peer)
        self._release_if_clean()

    def _show(self, peer: PeerDriver) -> None:
        if self._released.done():
            return
        leg, over = self._legs[peer], self._machine.state is core.FetchState.quarantined
        held = over and leg.state not in CLEAN
        self._node.ledger.update(
            self._numbers[peer],
            str(leg.state),
            self._num_pages,
            str(self._failure.reason) if self._failure else "",
            self._why_held(peer, leg) if held else "",
            quarantined=self.attempt if held else None,
        )

    def _await_count(self, peer: PeerDriver, rows: int) -> None:
        """What the peer says it has posted is believed when as many rows were counted, and not before: until then
        writes of it may be anywhere between its memory and ours."""
        landed = self._node.fabric.state.await_slot(*self._slots[peer], rows)
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
        leg = self._legs[peer]
        if self._released.done() or leg.state is not state:
            return
        landed = self._node.fabric.state.slot_rows(*self._slots[peer])
        if landed != slot_rows:
            self._watch(peer, state, seconds, landed)
        elif state is legs.LegState.counting:
            detail = f"{landed} of the {leg.rows_posted} rows that {peer.name} posted landed, and no more are landing"
            peer.lose(Failure(Reason.short_count, detail, landed, leg.rows_posted))
        else:
            detail = f"{peer.name} has not said within {seconds:g} s how many rows it posted for {self.request_id!r}"
            peer.lose(Failure(Reason.timeout, detail, landed))

    def _why_held(self, peer: PeerDriver, leg: Leg) -> str:
        slot_rows = self._node.fabric.state.slot_rows(*self._slots[peer])
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
                    if not self._arrival.done():
                        self._arrival.set_result(self._make_arrival(rows))
                case core.ResolveFailure(failure):
                    log_failure(self.request_id, failure)
                    if not self._arrival.done():
                        self._arrival.set_exception(self._error(failure))
                        self._arrival.exception()  # it may never be awaited; the log has said it
                case core.FailPeers(failure):
                    for peer in self._to_blame(failure):
                        peer.lose(failure)
                case core.ReleasePages():
                    self._release_pages()

    def _to_blame(self, failure: Failure) -> list[PeerDriver]:
        """The peers that broke the count. Of too many rows those that brought them: others may still be at it."""
        wrong = self._wrong_legs()
        if failure.reason is Reason.overflow:
            wrong = {peer: rows for peer, rows in wrong.items() if rows > self._leg_rows[peer]}
        return list(wrong or self._legs)

    def _wrong_legs(self) -> dict[PeerDriver, int]:
        """The legs of which other than the expected rows have landed, and how many."""
        landed = {peer: self._node.fabric.state.slot_rows(*slot) for peer, slot in self._slots.items()}
        return {peer: rows for peer, rows in landed.items() if rows != self._leg_rows[peer]}

    def _end(self, failure: Failure | None) -> None:
        self._failure = failure
        self._expiry.cancel()
        if self._stall is not None:
            self._stall.cancel()
        self._node.fabric.state.end_attempt(self.attempt)
        event = legs.AttemptReady() if failure is None else legs.AttemptFailed(failure)
        for peer in self._legs:
            self._feed_leg(peer, event)

    def _release_if_clean(self) -> None:
        clean = all(leg.state in CLEAN for leg in self._legs.values())
        if clean and self._machine.state is core.FetchState.quarantined:
            self._feed(core.LegsClean())

    def _release_pages(self) -> None:
        self._rows = self.rows_landed
        for watch in self._watches.values():
            watch.cancel()
        for number in self._numbers.values():
            self._node.ledger.close(number)
        self._node.outbox.release_fetch(self)
        if self._machine.state is not core.FetchState.ready:
            self.release_context()
        if not self._released.done():
            self._released.set_result(None)

    def release_by_fence(self) -> None:
        """Every endpoint is closed: whatever the state, nothing can land."""
        if not self._released.done():
            self._release_pages()

    def never_released(self, error: FabricStuckError) -> None:
        """The fabric cannot be closed: no proof will ever come."""
        for watch in self._watches.values():
            watch.cancel()
        if not self._released.done():
            self._released.set_exception(error)
            self._released.exception()  # it may never be awaited; closing the messenger has said it

    def release_context(self) -> None:
        slot, self._context_slot = self._context_slot, -1
        if slot >= 0:
            self._node.context_slots.give(slot)

    def _make_arrival(self, rows: int) -> Arrival:
        ranks, slot = self._node.memory.ranks, self._context_slot
        contexts = {target.rank: ranks[target.rank].context_views(slot) for target in self.targets} if slot >= 0 else {}
        return Arrival(self._dispatch.num_tokens - 1, rows, contexts, slot, self)

    def _error(self, failure: Failure) -> TransferError:
        return transfer_error(
            self.request_id, failure.reason, failure.detail, failure.rows, failure.rows_expected, failure.retry_after_s
        )
