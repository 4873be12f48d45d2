"""What one messenger shares among its peers and requests: fabric, slots, counters, and the way of every record."""

from __future__ import annotations

import asyncio
import operator
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, ClassVar

import structlog

from kvmsgr.address import Tcp, Unix, parse
from kvmsgr.core.failure import Failure
from kvmsgr.core.slots import IndexPool, SlotPool
from kvmsgr.errors import ConfigError, FabricStuckError
from kvmsgr.fabric import records
from kvmsgr.layout import Balance
from kvmsgr.types import Descriptor
from kvmsgr_protocol import NUM_GENERATIONS, NUM_SLOTS, Reason

from .answers import as_text
from .connection import dial
from .inbox import Inbox
from .ledger import Ledger
from .outbox import Outbox
from .pages import PageGuard
from .peer import PeerDriver
from .rotation import RotationDriver
from .serve import PrefillRequest

if TYPE_CHECKING:
    from kvmsgr.config import Config
    from kvmsgr.device.cache import Memory
    from kvmsgr.device.counters import LayerCounter
    from kvmsgr.fabric.libfabric import Fabric

    from .connection import Connection
    from .steps import Step

log = structlog.get_logger("kvmsgr")

RECORDS_A_BATCH = 256
CLOSE_LINKS_S = 5.0
WATCH_S = 1.0
STUCK_TICKS = 5
NO_PORT = 0  # of a PORT_FAILED record: the port that was to be opened


class Node:
    """The state of one messenger. All of it belongs to the event loop, but for what `lock` guards: the plans and
    tallies of requests that are being prefilled, which `begin_step` changes from the engine's thread."""

    def __init__(
        self, config: Config, memory: Memory, counters: Sequence[LayerCounter], fabric: Fabric, incarnation: str
    ) -> None:
        self.config = config
        self.memory = memory
        self.fabric = fabric
        self.incarnation = incarnation
        self.loop = asyncio.get_running_loop()
        self.lock = threading.Lock()
        self.counters = counters  # of a stream as many as `memory.num_signals` has, stream after stream
        for number, counter in enumerate(self.counters):
            fabric.add_counter(counter, memory.interfaces_of_counter(number))
        self.steps: dict[tuple[int, int], Step] = {}  # by each of its counters and tickets
        self.context_slots = IndexPool(memory.num_context_slots)
        self.balance = Balance(len(memory.ranks))
        self.lost_ranks: dict[int, str] = {}  # and why
        self.inbox = Inbox(self)
        self.slots = SlotPool(secrets.randbelow(NUM_SLOTS), secrets.randbelow(NUM_GENERATIONS))
        pages = [[PageGuard(group.name, group.num_pages) for group in rank.groups] for rank in memory.ranks]
        self.ledger = Ledger(fabric.state, pages, config.quarantine_limit)
        self.outbox = Outbox(self, pages)
        self.connections: set[Connection] = set()
        self.peers: set[PeerDriver] = set()
        self.rotation = RotationDriver(self)
        self._dialled: dict[Descriptor, PeerDriver] = {}
        self._links: dict[int, PeerDriver] = {}
        self._dials: set[asyncio.Task[None]] = set()
        self._windows_granted = 0
        self._turns = 0
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

    def open_links(self, peer: PeerDriver) -> None:
        """One on each network interface.

        Raises:
            FabricUnavailableError: One cannot be opened; those before it are.
        """
        for interface in range(len(self.memory.interfaces)):
            link = self.fabric.open_link(interface)
            peer.links.append(link)
            self._links[link] = peer

    def take_beat(self) -> tuple[int, int] | None:
        """A slot for the heartbeats of one peer; None when there is none."""
        return self.slots.take()

    def return_beat(self, slot: int, generation: int) -> None:
        self.fabric.state.unlink_slot(slot, generation)
        self.slots.give(slot)

    def close_links(self, peer: PeerDriver) -> None:
        """Close the endpoints of a peer that is lost, where that is known to be a fence. Elsewhere closing one under
        traffic can crash the process: they stay open until nothing can be under way any more. May be called again."""
        if not peer.open_links or peer.links_closing or self.stuck:
            return
        if not self.fabric.poller.fence_proven and self._may_move(peer):
            return
        peer.links_closing = True
        for link in peer.open_links:
            self.fabric.poller.close_link(link)
        if self.fabric.rotates:
            self.rotation.want_fence()

    def _may_move(self, peer: PeerDriver) -> bool:
        """Whether something of the peer may still land here, or something of ours be read for it."""
        return self.inbox.serves(peer) or self.outbox.may_land_from(peer)

    def peer_lost(self, peer: PeerDriver, failure: Failure) -> None:
        """Every request of the peer fails; the next request to that messenger starts a new epoch."""
        self._dialled = {descriptor: other for descriptor, other in self._dialled.items() if other is not peer}
        self.rotation.peer_lost(peer)
        self.outbox.peer_lost(peer, failure)
        self.inbox.peer_lost(peer, failure)

    def forget_peer(self, peer: PeerDriver) -> None:
        self.peers.discard(peer)
        self.outbox.forget_peer(peer)
        if self._idle is not None and not self.peers and not self._idle.done():
            self._idle.set_result(None)

    def settled(self, *peers: PeerDriver) -> None:
        """A request of these peers has left nothing behind: one that is lost may be all done with."""
        for peer in peers:
            if peer.failure is not None:
                self.close_links(peer)

    def rank_lost(self, rank: int, why: str) -> None:
        """A process that holds a rank has died: what needs the rank fails. Its memory stays mapped here, so that what
        is under way harms nobody."""
        if operator.index(rank) not in range(len(self.memory.ranks)):
            raise ConfigError(f"rank {rank} does not exist; there are {len(self.memory.ranks)}")
        if rank in self.lost_ranks:
            return
        log.error("rank lost", rank=rank, why=why)
        with self.lock:
            self.lost_ranks[rank] = as_text(why)
            over = self._drop_parts(rank)
        for step in over:
            step.over()
        failure = self.rank_failure(rank)
        self.outbox.rank_lost(rank, failure)
        self.inbox.rank_lost(rank, failure)

    def _drop_parts(self, rank: int) -> list[Step]:
        """Nobody bumps the layer counter of a lost rank any more, and nothing waits for it. Returns the steps that are
        over now. Under the lock."""
        over: list[Step] = []
        if len(self.memory.num_signals) == 1 or self.closing:  # one counter for all ranks, or no poller to watch any
            return over
        for step in dict.fromkeys(self.steps.values()):
            step.forget(rank)
            if not step.running:
                over.append(step)
        return over

    def rank_failure(self, rank: int) -> Failure:
        """Why what needs a lost rank fails."""
        return Failure(Reason.rank_lost, f"rank {rank} of {self.config.name} is lost: {self.lost_ranks[rank]}")

    # Prefill

    def turn(self) -> int:
        """Which of several rails gets the odd page; another one each time. Under the lock."""
        self._turns += 1
        return self._turns

    def take_context_slot(self) -> int | None:
        """None when there is none. Some may be kept for steps that have shown all their signals since: nobody tells
        when they do."""
        if (slot := self.context_slots.take()) is None:
            with self.lock:
                steps = dict.fromkeys(self.steps.values())
            for step in steps:
                step.release_context_slots()
            slot = self.context_slots.take()
        return slot

    def stop_writes(self, request: PrefillRequest) -> None:
        """Drop what is not posted. Under the lock: no step may arm more of the request behind our back."""
        with self.lock:
            self.drop_writes(request)

    def drop_writes(self, request: PrefillRequest) -> None:
        """As `stop_writes`, for who has the lock."""
        if request.num_transfers and not self.stuck:
            for link in request.peer.open_links:
                self.fabric.poller.stop(link, request.tag)

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
        self._links[link].link_failed(link, records.link_failure(errno, call))

    def _link_closed(self, link: int, value: int, extra: int) -> None:
        self._links.pop(link).link_closed(link)

    def _step_ended(self, counter: int, ticket: int, extra: int) -> None:
        with self.lock:
            step = self.steps.pop((counter, ticket), None)
            if step is None or step.running:
                return
        step.over()

    def _step_failed(self, counter: int, ticket: int, extra: int) -> None:
        """Until the poller hears of it again, it releases nothing that later steps of the counter show."""
        with self.lock:
            step = self.steps.get((counter, ticket))
            if step is not None:
                step.broke(counter, ticket)
                step.spoil(step.part_of(counter))
                over = not step.running
            if not (self.closing or self.stuck):
                self.fabric.poller.resume_counter(counter, ticket)
        if step is None:  # it was abandoned, or its rank is lost: what goes with it was stopped then
            return
        detail = records.step_fault(counter, ticket, extra, step.num_bumps_of(counter))
        if len(step.signals) > 1:
            detail = f"rank {step.part_of(counter)}: {detail}"
        say = log.info if step.unwanted else log.error
        say("step failed", counter=counter, ticket=ticket, detail=detail)
        step.fail(detail, step.part_of(counter))
        if over:
            step.over()

    def _join_lost(self, tag: int, ticket: int, extra: int) -> None:
        request = self.inbox.by_tag.get(tag)
        if request is not None:
            request.failed(Reason.step_fault, records.join_lost(ticket))

    _handlers: ClassVar[dict[int, Callable[[Node, int, int, int], None]]] = {
        records.REACHED: lambda node, *values: node.outbox.reached(*values),
        records.OVERFLOW: lambda node, *values: node.outbox.overflowed(*values),
        records.STRAY: lambda node, *values: node.outbox.strayed(*values),
        records.SLOT_REACHED: lambda node, *values: node.outbox.slot_reached(*values),
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
        records.JOIN_LOST: _join_lost,
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
            for attempt in self.outbox.attempts:
                last_first.callback(attempt.close)

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
            for attempt in self.outbox.attempts:
                attempt.never_released(error)
            for request in list(self.inbox.by_tag.values()):
                request.never_released(error)
            raise
        finally:
            self.loop.remove_reader(self.fabric.poller.fd)
        try:
            while self._read_records():  # the end of whatever was still under way
                pass
        finally:
            for attempt in self.outbox.attempts:
                attempt.release_by_fence()
