"""What one messenger shares among its peers and requests: fabric, slots, counters, and the way of every record."""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, ClassVar

import structlog
from msgspec.structs import replace

from kvmsgr.address import Tcp, Unix, parse
from kvmsgr.core.failure import Failure
from kvmsgr.core.slots import AttemptNumbers, IndexPool, SlotPool
from kvmsgr.device.counters import LayerCounter
from kvmsgr.errors import BusyError, ConfigError, FabricStuckError, LayoutError, MessengerClosedError, RefusedError
from kvmsgr.fabric import records
from kvmsgr.types import Descriptor, Span
from kvmsgr_protocol import (
    NUM_GENERATIONS,
    NUM_SLOTS,
    Dispatch,
    RankSpans,
    Reason,
    encode,
    expected_rows,
    immediate,
    pack_tokens,
)
from kvmsgr_protocol import Span as WireSpan

from .connection import dial
from .fetch import Fetch
from .inbox import Inbox
from .ledger import Ledger
from .pages import PageGuard, check_cover, hold_all, page_indices, release_all
from .peer import PeerDriver
from .rotation import RotationDriver
from .serve import PrefillRequest

if TYPE_CHECKING:
    from kvmsgr.config import Config
    from kvmsgr.device.cache import Memory
    from kvmsgr.fabric.libfabric import Fabric

    from .connection import Connection
    from .steps import Step

log = structlog.get_logger("kvmsgr")

NUM_COUNTERS = 1
MAX_ATTEMPTS = 16384
RECORDS_A_BATCH = 256
CLOSE_LINKS_S = 5.0
WATCH_S = 1.0
STUCK_TICKS = 5
NO_PORT = 0  # of a PORT_FAILED record: the port that was to be opened


class Node:
    """The state of one messenger. All of it belongs to the event loop, but for what `lock` guards: the plans and
    tallies of requests that are being prefilled, which `begin_step` changes from the engine's thread."""

    def __init__(self, config: Config, memory: Memory, fabric: Fabric, incarnation: str) -> None:
        self.config = config
        self.memory = memory
        self.fabric = fabric
        self.incarnation = incarnation
        self.loop = asyncio.get_running_loop()
        self.lock = threading.Lock()
        self.counters = [LayerCounter() for _ in range(NUM_COUNTERS)]
        for counter in self.counters:
            fabric.poller.add_counter(counter)
        self.steps: dict[tuple[int, int], Step] = {}
        num_slots = min((layout.num_slots for layout in memory.context), default=0)
        self.context_slots = IndexPool(num_slots)
        self.inbox = Inbox(self)
        self._slots = SlotPool(secrets.randbelow(NUM_SLOTS), secrets.randbelow(NUM_GENERATIONS))
        self._attempts = AttemptNumbers(MAX_ATTEMPTS)
        self._pages = [PageGuard(group.name, group.num_pages) for group in memory.groups]
        self.ledger = Ledger(fabric.state, self._pages, config.quarantine_limit)
        self.connections: set[Connection] = set()
        self.peers: set[PeerDriver] = set()
        self.rotation = RotationDriver(self)
        self._dialled: dict[Descriptor, PeerDriver] = {}
        self._links: dict[int, PeerDriver] = {}
        self._dials: set[asyncio.Task[None]] = set()
        self._fetches: dict[int, Fetch] = {}
        self._by_slot: dict[int, tuple[Fetch, PeerDriver]] = {}
        self._past: dict[int, tuple[PeerDriver, str]] = {}  # who wrote last into a slot that is free now
        self._windows_granted = 0
        self._idle: asyncio.Future[None] | None = None
        self.closing = self.stuck = False
        self._records: deque[tuple[int, int, int, int, int]] = deque()
        self._rounds_seen, self._ticks_still = 0, 0
        self._watchdog = self.loop.call_later(WATCH_S, self._watch_poller)
        self.loop.add_reader(fabric.poller.fd, self._read_records)
        fabric.drive(self.loop)

    # Peers

    def peer_at(self, descriptor: Descriptor) -> PeerDriver:
        """The epoch with that messenger; dialled when there is none."""
        peer = self._dialled.get(descriptor)
        if peer is None:
            address = parse(descriptor.address)
            peer = PeerDriver(self, descriptor.name or descriptor.address, descriptor.incarnation)
            self._dialled[descriptor] = peer
            self.peers.add(peer)
            task = self.loop.create_task(self._dial(peer, address))
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)
        return peer

    async def _dial(self, peer: PeerDriver, address: Tcp | Unix) -> None:
        def made(connection: Connection) -> None:
            self.track(connection)
            peer.connection_made(connection)

        try:
            await dial(address, made)
        except (OSError, ValueError) as error:  # a name may be no host name at all
            peer.dial_failed(error)

    def connection_accepted(self, connection: Connection) -> None:
        """Somebody dialled us."""
        self.track(connection)
        if self.closing:
            connection.close()
            return
        peer = PeerDriver(self, "a peer that has not said its name", None)
        self.peers.add(peer)
        peer.connection_made(connection)

    def track(self, connection: Connection) -> None:
        """Have `close` wait for its end."""
        self.connections.add(connection)
        connection.ended.add_done_callback(lambda _: self.connections.discard(connection))

    def grant_window(self) -> bool:
        """Whether one more peer's window fits the completion queue, half of which is for our own writes."""
        num_entries = self.config.window + 1  # and a heartbeat
        if self._windows_granted + num_entries > self.config.cq_entries // 2:
            return False
        self._windows_granted += num_entries
        return True

    def return_window(self) -> None:
        self._windows_granted -= self.config.window + 1

    def open_link(self, peer: PeerDriver) -> int:
        link = self.fabric.open_link()
        self._links[link] = peer
        return link

    def take_beat(self) -> tuple[int, int] | None:
        """A slot for the heartbeats of one peer; None when there is none."""
        return self._slots.take()

    def return_beat(self, slot: int, generation: int) -> None:
        self.fabric.state.unlink_slot(slot, generation)
        self._slots.give(slot)

    def close_link(self, peer: PeerDriver) -> None:
        """Close the endpoint of a peer that is lost, where that is known to be a fence. Elsewhere closing it under
        traffic can crash the process: it stays open until nothing can be under way any more. May be called again."""
        if peer.link is None or peer.link_closing or self.stuck:
            return
        if not self.fabric.poller.fence_proven and self._may_move(peer):
            return
        peer.link_closing = True
        self.fabric.poller.close_link(peer.link)
        if self.fabric.rotates:
            self.rotation.want_fence()

    def _may_move(self, peer: PeerDriver) -> bool:
        """Whether something of the peer may still land here, or something of ours be read for it."""
        return self.inbox.serves(peer) or any(fetch.may_land_from(peer) for fetch in self._fetches.values())

    def peer_fenced(self, peer: PeerDriver) -> None:
        """The endpoint of the peer is closed."""
        for fetch in list(self._fetches.values()):
            if fetch.has_leg(peer):
                fetch.peer_fenced(peer)

    def peer_lost(self, peer: PeerDriver, failure: Failure) -> None:
        """Every request of the peer fails; the next request to that messenger starts a new epoch."""
        self._dialled = {descriptor: other for descriptor, other in self._dialled.items() if other is not peer}
        self.rotation.peer_lost(peer)
        for fetch in dict.fromkeys((*self._fetches.values(), *peer.waiting)):
            if fetch.has_leg(peer):
                fetch.peer_lost(peer, failure)
        self.inbox.peer_lost(peer, failure)

    def forget_peer(self, peer: PeerDriver) -> None:
        self.peers.discard(peer)
        self._past = {index: past for index, past in self._past.items() if past[0] is not peer}
        if self._idle is not None and not self.peers and not self._idle.done():
            self._idle.set_result(None)

    # Fetches

    def fetch(
        self,
        request_id: str,
        source: Descriptor,
        tokens: Sequence[int],
        spans: Sequence[Span],
        payload: bytes,
        trace: dict[str, str],
        time_allowed_s: float | None,
    ) -> Fetch:
        """Arm slot, counter and pages, then ask the peer. See `Messenger.fetch`."""
        if self.closing:
            raise MessengerClosedError("the messenger is closed: no request can be fetched")
        if self.stuck:
            raise FabricStuckError("the polling thread is stuck inside libfabric: close this messenger, open another")
        if any(fetch.request_id == request_id and not fetch.done for fetch in self._fetches.values()):
            raise RefusedError(request_id, "a request of this name is being fetched already", Reason.duplicate)
        peer = self.peer_at(source)
        wire_spans = [self._wire_span(span) for span in spans]
        check_cover(self.memory.groups, wire_spans, len(tokens))
        wants_context = bool(self.memory.context) and len(tokens) > 1
        if time_allowed_s is None:
            time_allowed_s = self.config.time_allowed_s
        dispatch = self._dispatch(request_id, tokens, wire_spans, payload, trace, time_allowed_s, wants_context)
        hold_all(self._pages, wire_spans)
        attempt, slot, leg = self._attempts.take(), self._slots.take(), self.ledger.take()
        context_slot = self.context_slots.take() if wants_context else -1
        if attempt is None or slot is None or leg is None or context_slot is None:
            release_all(self._pages, wire_spans)
            self._give_back(attempt, slot, leg, context_slot)
            free = {"immediate slot": slot, "context slot": context_slot, "attempt or leg of the state file": attempt}
            what = next((name for name, taken in free.items() if taken is None), "leg of the state file")
            raise BusyError(request_id, f"every {what} is held by a request that is alive or not proven ended")
        dispatch = replace(dispatch, attempt=attempt, slot=slot[0], generation=slot[1], context_slot=context_slot)
        state = self.fabric.state
        state.open_attempt(attempt, dispatch.expected_rows, request_id)
        state.link_slot(*slot, attempt)
        self._past.pop(immediate.counter_index(*slot), None)
        self.ledger.open(leg, "fetch", "waiting", peer.name, dispatch, self.memory.num_signals)
        self._show_pages(wire_spans)
        fetch = self._fetches[attempt] = Fetch(self, {peer: slot}, {peer: leg}, dispatch)
        self._by_slot[immediate.counter_index(*slot)] = fetch, peer
        fetch.start()
        return fetch

    def _dispatch(
        self,
        request_id: str,
        tokens: Sequence[int],
        spans: list[WireSpan],
        payload: bytes,
        trace: dict[str, str],
        time_allowed_s: float,
        wants_context: bool,
    ) -> Dispatch:
        """The request as it will travel, but for its slots; whatever is wrong with it is found here."""
        if not 0 < time_allowed_s < math.inf:
            raise ConfigError(f"request {request_id!r}: time_allowed_s is {time_allowed_s}; it must be positive")
        try:
            dispatch = Dispatch(
                request_id=request_id,
                attempt=0,
                num_tokens=len(tokens),
                tokens=pack_tokens(tokens),
                slot=0,
                generation=0,
                ranks=[RankSpans(0, spans)],
                context_slot=0 if wants_context else -1,
                expected_rows=expected_rows(
                    len(tokens), spans, self.memory.groups, self.memory.context if wants_context else ()
                ),
                time_allowed_s=time_allowed_s,
                payload=payload,
                trace=trace,
            )
            encode(dispatch)
        except ValueError as error:
            raise ConfigError(f"request {request_id!r} cannot be sent: {error}") from error
        return dispatch

    def _give_back(
        self, attempt: int | None, slot: tuple[int, int] | None, leg: int | None, context_slot: int | None
    ) -> None:
        if attempt is not None:
            self._attempts.give(attempt)
        if slot is not None:
            self._slots.give(slot[0])
        if leg is not None:
            self.ledger.give(leg)
        if context_slot is not None and context_slot >= 0:
            self.context_slots.give(context_slot)

    def _wire_span(self, span: Span) -> WireSpan:
        if not 0 <= span.group < len(self._pages):
            raise LayoutError(f"a span names cache group {span.group}; there are {len(self._pages)}")
        if span.first_token < 0:
            raise LayoutError(f"a span starts at position {span.first_token}; positions start at 0")
        return WireSpan(span.group, span.first_token, page_indices(span.pages).astype("<i4").tobytes())

    def fetch_of(self, peer: PeerDriver, request_id: str, attempt: int) -> Fetch | None:
        fetch = self._fetches.get(attempt)
        return fetch if fetch is not None and fetch.request_id == request_id and fetch.has_leg(peer) else None

    def release_fetch(self, fetch: Fetch) -> None:
        """Nothing can land for this attempt: its slots and pages are free. Who wrote into a slot last is remembered:
        rows that come all the same are a peer that broke the count."""
        for peer, (slot, generation) in fetch.slots.items():
            index = immediate.counter_index(slot, generation)
            self.rotation.slot_reached(index)
            self.fabric.state.unlink_slot(slot, generation)
            self._past[index] = peer, fetch.request_id
            del self._by_slot[index]
            self._slots.give(slot)
        del self._fetches[fetch.attempt]
        self._attempts.give(fetch.attempt)
        release_all(self._pages, fetch.spans)
        self._show_pages(fetch.spans)
        self.settled(*fetch.slots)

    def _show_pages(self, spans: Sequence[WireSpan]) -> None:
        for group in {span.group for span in spans}:
            self.ledger.show_pages(group)

    def settled(self, *peers: PeerDriver) -> None:
        """A request of these peers has left nothing behind: one that is lost may be all done with."""
        for peer in peers:
            if peer.failure is not None:
                self.close_link(peer)

    # Prefill

    def stop_writes(self, request: PrefillRequest) -> None:
        """Drop what is not posted. Under the lock: no step may arm more of the request behind our back."""
        with self.lock:
            if request.num_transfers and request.peer.link is not None and not self.stuck:
                self.fabric.poller.stop(request.peer.link, request.tag)

    # Records

    def _read_records(self) -> int:
        """Handle what the poller has recorded; returns how much. An error in one record costs none of the others."""
        taken = self.fabric.poller.take(RECORDS_A_BATCH)
        self._records.extend(taken)
        try:
            while self._records:
                kind, ident, value, _, extra = self._records.popleft()
                self._handlers[kind](self, ident, value, extra)
        finally:
            if self._records:
                self.loop.call_soon(self._read_records)
        return len(taken)

    def _reached(self, attempt: int, rows: int, extra: int) -> None:
        if attempt in self._fetches:
            self._fetches[attempt].rows_counted(rows)

    def _overflowed(self, attempt: int, rows: int, counter_index: int) -> None:
        if attempt in self._fetches:
            self._fetches[attempt].count_overflowed(rows)
        else:
            self._strayed(counter_index, rows, 0)

    def _strayed(self, counter_index: int, rows: int, extra: int) -> None:
        slot, generation = divmod(counter_index, NUM_GENERATIONS)
        log.error("rows landed in a slot that is not in use", slot=slot, generation=generation)
        if counter_index in self._past:
            peer, request_id = self._past[counter_index]
            detail = f"rows landed for request {request_id!r} after all of it had landed"
            peer.lose(Failure(Reason.overflow, detail))

    def _slot_reached(self, counter_index: int, rows: int, extra: int) -> None:
        self.rotation.slot_reached(counter_index)
        if counter_index in self._by_slot:
            fetch, peer = self._by_slot[counter_index]
            fetch.slot_reached(peer, rows)

    def is_slot_of(self, peer: PeerDriver, counter_index: int) -> bool:
        """Whether rows in that slot are of a live request at that peer."""
        return counter_index in self._by_slot and self._by_slot[counter_index][1] is peer

    def rows_owed(self, peer: PeerDriver) -> dict[int, int]:
        """By counter: rows that the peer has posted in all for requests it is done with and we are not."""
        return {
            index: fetch.rows_posted_by(peer)
            for index, (fetch, other) in self._by_slot.items()
            if other is peer
            if fetch.may_land_from(peer) and fetch.rows_posted_by(peer)
        }

    def _port_opened(self, port: int, value: int, extra: int) -> None:
        self.rotation.port_opened()

    def _port_failed(self, port: int, errno: int, call: int) -> None:
        if port == NO_PORT:
            self.rotation.port_failed(errno)
        else:  # there is no fence: what waits for it waits until the messenger closes
            log.error("port does not close", port=port, detail=records.link_failure(errno, call).text)

    def _port_closed(self, port: int, value: int, extra: int) -> None:
        self.rotation.port_closed()

    def _link_held(self, link: int, value: int, extra: int) -> None:
        self._links[link].link_held()

    def _transfer_ended(self, tag: int, rows: int, extra: int) -> None:
        request = self.inbox.by_tag.get(tag)
        if request is not None:
            request.transfer_ended(rows)

    def _link_opened(self, link: int, value: int, extra: int) -> None:
        self._links[link].link_opened()

    def _link_failed(self, link: int, errno: int, call: int) -> None:
        self._links[link].link_failed(records.link_failure(errno, call))

    def _link_closed(self, link: int, value: int, extra: int) -> None:
        self._links.pop(link).link_closed()

    def _step_ended(self, counter: int, ticket: int, extra: int) -> None:
        with self.lock:
            step = self.steps.pop((counter, ticket), None)
        if step is not None:
            step.over()

    def _step_failed(self, counter: int, ticket: int, extra: int) -> None:
        with self.lock:
            step = self.steps.pop((counter, ticket), None)
        if step is None:
            return
        detail = records.step_fault(ticket, extra, step.num_bumps)
        say = log.info if all(chunk.request.ended for chunk in step.chunks) else log.error
        say("step failed", counter=counter, ticket=ticket, detail=detail)
        step.fail(detail)

    _handlers: ClassVar[dict[int, Callable[[Node, int, int, int], None]]] = {
        records.REACHED: _reached,
        records.OVERFLOW: _overflowed,
        records.STRAY: _strayed,
        records.SLOT_REACHED: _slot_reached,
        records.SENT: _transfer_ended,
        records.STOPPED: _transfer_ended,
        records.LINK_OPENED: _link_opened,
        records.LINK_FAILED: _link_failed,
        records.LINK_CLOSED: _link_closed,
        records.LINK_HELD: _link_held,
        records.PORT_OPENED: _port_opened,
        records.PORT_FAILED: _port_failed,
        records.PORT_CLOSED: _port_closed,
        records.STEP_ENDED: _step_ended,
        records.STEP_FAULT: _step_failed,
    }

    def _watch_poller(self) -> None:
        """The poller goes round at least every few milliseconds, unless it is stuck inside libfabric."""
        rounds = self.fabric.poller.stats()["rounds"]
        self._ticks_still = self._ticks_still + 1 if rounds and rounds == self._rounds_seen else 0
        self._rounds_seen = rounds
        if self._ticks_still == STUCK_TICKS:
            self.stuck = True
            detail = f"the polling thread has been stuck inside libfabric for {STUCK_TICKS * WATCH_S:g} s"
            log.error("fabric stuck", detail=detail)
            for peer in list(self.peers):
                peer.lose(Failure(Reason.fabric, detail))
        else:
            self._watchdog = self.loop.call_later(WATCH_S, self._watch_poller)

    # The end

    async def close(self) -> None:
        """End every request and every epoch, and close the fabric. What was held is free then: no endpoint is open.

        Each part is done even if one before it fails.
        """
        self._watchdog.cancel()
        self.rotation.stop()
        with self.lock:
            self.closing = True
        async with AsyncExitStack() as last_first:
            last_first.callback(self.fabric.close)
            last_first.push_async_callback(self._stop_poller)
            last_first.push_async_callback(self._say_goodbye)
            last_first.callback(self.inbox.close)
            for fetch in list(self._fetches.values()):
                last_first.callback(fetch.close)

    async def _say_goodbye(self) -> None:
        for task in list(self._dials):
            task.cancel()
        for peer in list(self.peers):
            peer.lose(Failure(Reason.closed, f"{self.config.name} is closing"))
        if self.peers and not self.fabric.rotates:  # what they all share is closed with the poller
            self._idle = self.loop.create_future()
            await asyncio.wait([self._idle], timeout=CLOSE_LINKS_S)
        await asyncio.gather(*(connection.ended for connection in self.connections))

    async def _stop_poller(self) -> None:
        try:
            await self.loop.run_in_executor(None, self.fabric.stop)
        except FabricStuckError as error:  # its endpoints are open: what is under way may land one day
            for fetch in list(self._fetches.values()):
                fetch.never_released(error)
            for request in list(self.inbox.by_tag.values()):
                request.never_released(error)
            raise
        finally:
            self.loop.remove_reader(self.fabric.poller.fd)
        try:
            while self._read_records():  # the end of whatever was still under way
                pass
        finally:
            for fetch in list(self._fetches.values()):
                fetch.release_by_fence()
