"""Drives one epoch with one peer: greeting, endpoints, plans between the two layouts, and its end."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import structlog

from kvmsgr.core import peer as core
from kvmsgr.core.failure import Failure
from kvmsgr.core.peer import PeerState
from kvmsgr.errors import KvmsgrError, LayoutError, LocalProtocolError, MismatchError
from kvmsgr_protocol import (
    PROTOCOL_VERSIONS,
    Attach,
    Beat,
    Drained,
    Endpoint,
    Goodbye,
    Hello,
    Identity,
    Message,
    RankAttach,
    RankFabric,
    Reason,
    Region,
    Resume,
    Rotate,
    Rotated,
    Sent,
    VersionMismatch,
    WireError,
    negotiate,
)

from .connection import Connection
from .routes import Routes
from .version import software

if TYPE_CHECKING:
    from kvmsgr.fabric.records import LinkFailure

    from .attempt import Attempt
    from .node import Node

log = structlog.get_logger("kvmsgr")
SOFTWARE = software()
CAN_ROTATE = "rotate"
GRACE_S = 0.05
DISCONNECTED = frozenset(
    {errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.ECANCELED, errno.EPIPE, errno.ESHUTDOWN}
)
MAX_UNREAD_BYTES = 64 << 20
MAX_ENDPOINTS = 1024  # of a peer


class PeerDriver:
    """One epoch.

    `links` has one for each network interface of ours, None once it is closed. `routes` say how our ranks' caches are
    written into theirs; they are there once its Attach has come. `waiting` are the attempts that could not be
    dispatched yet.
    """

    def __init__(self, node: Node, name: str, incarnation: str | None) -> None:
        self.node = node
        self.name = name
        self.machine = core.Peer(name)
        self.failure: Failure | None = None
        self.links: list[int | None] = []
        self.links_closing = False
        self.link_failure: str | None = None
        self._num_opened = 0
        self._num_held = 0
        self.can_rotate = False
        self._held: asyncio.TimerHandle | None = None  # our writes are held back, and until when
        self._has_window = False
        self._beats: list[tuple[int, int]] = []  # (slot, generation) of its heartbeats, a link each
        self.routes: Routes | None = None
        self.waiting: list[Attempt] = []
        self._incarnation = incarnation
        self._connection: Connection | None = None
        self._deadline = node.loop.call_later(node.config.connect_timeout_s, self._timed_out)

    # What comes in

    def connection_made(self, connection: Connection) -> None:
        """The control connection is up: greet, unless it came too late."""
        if self.machine.state is PeerState.gone:
            connection.close()
            return
        self._connection = connection
        connection.attach(self)
        config = self.node.config
        connection.send(
            Hello(
                versions=PROTOCOL_VERSIONS,
                capabilities=[CAN_ROTATE],
                incarnation=self.node.incarnation,
                name=config.name,
                software=SOFTWARE,
                identity=Identity(model=config.model, roles=["prefiller", "decoder"]),
            )
        )

    def message_received(self, message: Message) -> None:
        try:
            match message:
                case Hello():
                    self._hello(message)
                case Attach():
                    self._attach(message)
                case Goodbye(code=code, reason=reason):
                    self.lose(Failure(code, f'{self.name} said goodbye: "{reason}"'))
                case Rotate() | Rotated() | Resume() if self.machine.state is PeerState.live:
                    self._rotation(message)
                case _ if self.machine.state is PeerState.live:
                    self.node.inbox.message_received(self, message)
                case _:
                    kind = type(message).__name__
                    self.lose(Failure(Reason.protocol, f"{kind} before Hello and Attach ({self.machine.state})"))
        except LocalProtocolError as error:  # the machine knows no such event now: the peer broke the order
            self.lose(Failure(Reason.protocol, str(error)))

    def frame_broken(self, error: WireError) -> None:
        self.lose(Failure(Reason.protocol, str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        detail = f": {error}" if error else ""
        self.lose(Failure(Reason.peer_lost, f"the control connection to {self.name} ended{detail}"))

    def dial_failed(self, error: Exception) -> None:
        self.lose(Failure(Reason.peer_lost, f"cannot reach {self.name}: {error}"))

    @property
    def open_links(self) -> list[int]:
        """The links that are not closed."""
        return [link for link in self.links if link is not None]

    def link_opened(self) -> None:
        self._num_opened += 1
        if self._num_opened == len(self.node.memory.interfaces):
            self.feed(core.LinksOpened())

    def link_failed(self, link: int, failed: LinkFailure) -> None:
        """Nothing more is posted on it. Where the peer only went away, its last message may still tell why."""
        interface = self.links.index(link)
        rank, _ = self.node.memory.interfaces[interface]
        where = f"rank {rank}, interface {interface}, over {self.node.fabric.choice.provider}"
        detail = f"the link of {where}, to {self.name}: {failed.text}"
        log.error("link failed", peer=self.name, detail=detail)
        self.link_failure = detail
        if failed.silent:
            self.lose(Failure(Reason.peer_lost, detail))
        elif failed.errno in DISCONNECTED:
            self.node.loop.call_later(GRACE_S, self.lose, Failure(Reason.peer_lost, detail))
        else:
            self.lose(Failure(Reason.fabric, detail))

    def link_closed(self, link: int) -> None:
        """The last one is the fence: nothing of the peer can land any more, and nothing of ours is read for it."""
        self.links[self.links.index(link)] = None
        if not self.open_links:
            self.node.outbox.peer_fenced(self)
            self.feed(core.LinksClosed())

    def link_held(self) -> None:
        """Once all are: nothing of ours is in flight to the peer's old endpoints, and it must count what was."""
        self._num_held += 1
        if self._num_held == len(self.links):
            self._num_held = 0
            self.send(Rotated(posted=self.node.inbox.posted_to(self)))

    def resume(self) -> None:
        """The peer has moved to our new endpoint."""
        self.send(Resume())

    def lose(self, failure: Failure) -> None:
        """End the epoch. The first failure is the one that counts."""
        self.failure = self.failure or failure
        self.feed(core.Lost(failure))

    def send(self, message: Message) -> None:
        """Send a control message; to a peer that is gone nothing is sent."""
        if self._connection is None:
            return
        if self.link_failure is not None and isinstance(message, Sent | Drained):
            return  # rows that were posted may be lost: no count of ours proves anything any more
        try:
            self._connection.send(message)
        except ValueError as error:  # what cannot be sent must not leave the rest of an effect undone
            detail = f"{type(message).__name__} cannot be sent: {error}"
            self.node.loop.call_soon(self.lose, Failure(Reason.protocol, detail))
        if self._connection.num_unsent_bytes > MAX_UNREAD_BYTES and self.failure is None:
            detail = f"{self.name} does not read what is sent to it: {self._connection.num_unsent_bytes} bytes wait"
            self.failure = Failure(Reason.protocol, detail)
            self.node.loop.call_soon(self.lose, self.failure)

    # What follows from it

    def feed(self, event: object) -> None:
        for effect in self.machine.feed(event):
            self._carry_out(effect)

    def _carry_out(self, effect: object) -> None:
        match effect:
            case core.OpenLinks():
                try:
                    self.node.open_links(self)
                except KvmsgrError as error:
                    self.node.loop.call_soon(self.lose, Failure(Reason.fabric, f"no endpoint for {self.name}: {error}"))
            case core.SendAttach():
                self._send_attach()
            case core.ConnectLinks():
                self._connect()
            case core.AnnounceLive() if self.machine.state is PeerState.live:
                self._deadline.cancel()
                log.info("peer live", peer=self.name, provider=self.node.fabric.choice.provider)
                self.node.rotation.peer_live(self)
                for attempt in self.waiting:
                    attempt.peer_live(self)
                self.waiting.clear()
            case core.AnnounceLost(failure):
                self._deadline.cancel()
                log.info("peer lost", peer=self.name, reason=str(failure.reason), detail=failure.detail)
                self.node.peer_lost(self, failure)
            case core.Disconnect(failure):
                self.send(Goodbye(code=failure.reason, reason=failure.detail))
                if self._connection is not None:
                    self._connection.close()
            case core.CloseLinks() if not self.open_links:
                self.feed(core.LinksClosed())
            case core.CloseLinks():
                self.node.close_links(self)
            case core.Forget():
                if self._held is not None:
                    self._held.cancel()
                if self._has_window:
                    self.node.return_window()
                for beat in self._beats:
                    self.node.return_beat(*beat)
                self.node.forget_peer(self)

    def _timed_out(self, late: bool = False) -> None:
        if not late:  # a loop that was busy elsewhere runs its timers before it reads what has come in
            self._deadline = self.node.loop.call_later(GRACE_S, self._timed_out, True)
            return
        seconds = self.node.config.connect_timeout_s
        self.lose(Failure(Reason.timeout, f"{self.name} was not ready within {seconds:g} s ({self.machine.state})"))

    def _hello(self, hello: Hello) -> None:
        ours = self.node.config.model
        if self.machine.state is not PeerState.greeting:
            raise LocalProtocolError(f"a second Hello in state {self.machine.state!s}")
        try:
            negotiate(PROTOCOL_VERSIONS, hello.versions)
        except VersionMismatch as error:
            self.lose(Failure(Reason.identity_mismatch, str(error)))
            return
        if hello.identity.model != ours:
            mismatch = MismatchError("model", ours, hello.identity.model, "both sides must serve the same weights")
            self.lose(Failure(Reason.identity_mismatch, str(mismatch)))
            return
        if self._incarnation not in (None, hello.incarnation):
            detail = (
                f"{self.name} has restarted: incarnation {self._incarnation} was expected, {hello.incarnation} answers"
            )
            self.lose(Failure(Reason.peer_lost, detail))
            return
        self._has_window = self.node.grant_window()
        if not self._has_window:
            self.lose(Failure(Reason.busy, "the completion queue has no room for one more peer"))
            return
        for _ in self.node.memory.interfaces:
            beat = self.node.take_beat()
            if beat is None:
                self.lose(Failure(Reason.busy, "no immediate slot is free for its heartbeats"))
                return
            self._beats.append(beat)
        self.name = hello.name or self.name
        self.can_rotate = CAN_ROTATE in hello.capabilities
        self.feed(core.Greeted())

    def _send_attach(self) -> None:
        node = self.node
        for beat, link in zip(self._beats, self.open_links, strict=True):
            node.fabric.state.link_beat(*beat, link)
        fabric = self.rank_fabric()
        ranks = [
            RankAttach(
                rank=number,
                groups=list(rank.groups),
                region_bytes=[region.num_bytes for region in rank.regions],
                endpoints=fabric[number].endpoints,
                context=list(rank.context),
            )
            for number, rank in enumerate(node.memory.ranks)
        ]
        self.send(Attach(ranks=ranks, heartbeat_s=node.config.heartbeat_s, lease_s=node.config.lease_s))

    def rank_fabric(self) -> list[RankFabric]:
        """Where the peer writes to: an endpoint for each network interface of each rank."""
        endpoints: list[list[Endpoint]] = [[] for _ in self.node.memory.ranks]
        for (rank, _), link, beat in zip(self.node.memory.interfaces, self.open_links, self._beats, strict=True):
            endpoints[rank].append(self._endpoint(link, beat))
        return [RankFabric(rank=rank, endpoints=own) for rank, own in enumerate(endpoints)]

    def _endpoint(self, link: int, beat: tuple[int, int]) -> Endpoint:
        node, poller = self.node, self.node.fabric.poller
        base, _, key = poller.link_cell(link)
        return Endpoint(
            provider=node.fabric.choice.provider,
            address=poller.link_address(link),
            regions=[Region(base, key) for base, _, key in poller.link_regions(link)],
            window=node.config.window,
            beat=Beat(base, key, *beat),
        )

    def _attach(self, attach: Attach) -> None:
        if self.machine.state not in (PeerState.opening, PeerState.attaching):
            raise LocalProtocolError(f"Attach in state {self.machine.state!s}")
        try:
            self._check_lease(attach)
            self._check_endpoints(attach)
            self.routes = Routes(self.node.memory, attach.ranks, self.node.fabric.choice.provider)
        except MismatchError as error:
            self.lose(Failure(Reason.layout_mismatch, str(error)))
            return
        except LayoutError as error:
            self.lose(Failure(Reason.protocol, f"{self.name} describes memory that it does not have: {error}"))
            return
        self.feed(core.Attached())

    def _check_endpoints(self, attach: Attach) -> None:
        """There may be only so many, for their pairs with ours are looked at one by one. And a peer that sends our own
        Attach back would have us write to ourselves, and hear ourselves alive."""
        theirs = {endpoint.address for rank in attach.ranks for endpoint in rank.endpoints}
        num = sum(len(rank.endpoints) for rank in attach.ranks)
        if num > MAX_ENDPOINTS:
            raise LocalProtocolError(f"{self.name} has {num} endpoints; at most {MAX_ENDPOINTS} are taken")
        if self.machine.state is not PeerState.attaching or self.node.fabric.rotates:
            return  # it does not know ours yet, or all know the same
        if not theirs.isdisjoint(self.node.fabric.poller.link_address(link) for link in self.open_links):
            raise LocalProtocolError(f"{self.name} names an endpoint of ours as its own")

    def _check_lease(self, attach: Attach) -> None:
        config = self.node.config
        if attach.heartbeat_s * 2 > config.lease_s or config.heartbeat_s * 2 > attach.lease_s:
            ours = f"heartbeat_s {config.heartbeat_s:g}, lease_s {config.lease_s:g}"
            theirs = f"heartbeat_s {attach.heartbeat_s:g}, lease_s {attach.lease_s:g}"
            advice = "the lease of each side must outlast two heartbeats of the other"
            raise MismatchError("lease", ours, theirs, advice)

    def _connect(self) -> None:
        assert self.routes is not None
        try:
            self.routes.connect(self.node.fabric.poller, self.open_links, self.node.config.window)
        except MismatchError as error:
            self.lose(Failure(Reason.layout_mismatch, str(error)))
        except (ValueError, OverflowError) as error:
            self.lose(Failure(Reason.protocol, f"{self.name} cannot be connected to: {error}"))

    def _rotation(self, message: Rotate | Rotated | Resume) -> None:
        match message:
            case Rotate():
                self._retarget(message)
            case Rotated():
                self.node.rotation.rotated(self, message)
            case Resume() if self._held is None:
                raise LocalProtocolError("Resume, and no Rotate came before")
            case Resume():
                self._held.cancel()
                self._held = None
                for link in self.open_links:
                    self.node.fabric.poller.resume_link(link)

    def _retarget(self, message: Rotate) -> None:
        """The peer has other endpoints: our writes go there once it has counted all that went to the old ones."""
        assert self.routes is not None
        if self._held is not None:  # each of our links says once that it is held, and they are counted
            raise LocalProtocolError("a second Rotate before Resume of the first")
        endpoints = self.routes.moved(message.ranks)
        patience_s = 2 * self.node.config.lease_s
        self._held = self.node.loop.call_later(patience_s, self._never_resumed, patience_s)
        try:
            for interface, link in enumerate(self.open_links):
                reach = self.routes.reach(interface, endpoints)
                self.node.fabric.poller.retarget_link(link, reach.targets, reach.regions, reach.beats)
        except (ValueError, OverflowError) as error:
            self.lose(Failure(Reason.protocol, f"{self.name} cannot be moved with: {error}"))

    def _never_resumed(self, seconds: float) -> None:
        detail = f"{self.name} has moved to another endpoint, and has not let us go on within {seconds:g} s"
        self.lose(Failure(Reason.timeout, detail))
