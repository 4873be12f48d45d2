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
from kvmsgr.layout import Template, build_templates, check_bounds, check_contexts, check_groups, context_template
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
    Reason,
    Region,
    Resume,
    Rotate,
    Rotated,
    Sent,
    VersionMismatch,
    WireError,
    immediate,
    negotiate,
)

from .connection import Connection
from .version import software

if TYPE_CHECKING:
    from kvmsgr.fabric.records import LinkFailure

    from .fetch import Fetch
    from .node import Node

log = structlog.get_logger("kvmsgr")
SOFTWARE = software()
CAN_ROTATE = "rotate"
GRACE_S = 0.05
DISCONNECTED = frozenset(
    {errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.ECANCELED, errno.EPIPE, errno.ESHUTDOWN}
)
MAX_UNREAD_BYTES = 64 << 20


class PeerDriver:
    """One epoch.

    `templates[group]` and `context_templates[buffer]` pair the id of a template in the native layer with the template:
    how our cache is written into theirs. They are there while the peer is live. `waiting` are the fetches that could
    not be dispatched yet.
    """

    def __init__(self, node: Node, name: str, incarnation: str | None) -> None:
        self.node = node
        self.name = name
        self.machine = core.Peer(name)
        self.failure: Failure | None = None
        self.link: int | None = None
        self.link_closing = False
        self.link_failure: str | None = None
        self.can_rotate = False
        self._held: asyncio.TimerHandle | None = None  # our writes are held back, and until when
        self._has_window = False
        self._beat: tuple[int, int] | None = None  # (slot, generation) of its heartbeats
        self.remote: RankAttach | None = None
        self.templates: list[list[tuple[int, Template]]] = []
        self.context_templates: list[int] = []
        self.waiting: list[Fetch] = []
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

    def link_opened(self) -> None:
        self.feed(core.LinksOpened())

    def link_failed(self, failed: LinkFailure) -> None:
        """Nothing more is posted on the link. Where the peer only went away, its last message may still tell why."""
        detail = f"the link to {self.name} over {self.node.fabric.choice.provider}: {failed.text}"
        log.error("link failed", peer=self.name, detail=detail)
        self.link_failure = detail
        if failed.silent:
            self.lose(Failure(Reason.peer_lost, detail))
        elif failed.errno in DISCONNECTED:
            self.node.loop.call_later(GRACE_S, self.lose, Failure(Reason.peer_lost, detail))
        else:
            self.lose(Failure(Reason.fabric, detail))

    def link_closed(self) -> None:
        """The fence: nothing of the peer can land any more, and nothing of ours is read for it."""
        self.link = None
        self.node.peer_fenced(self)
        self.feed(core.LinksClosed())

    def link_held(self) -> None:
        """Nothing of ours is in flight to the peer's old endpoint: what it must count before we go on."""
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
                    self.link = self.node.open_link(self)
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
                for fetch in self.waiting:
                    fetch.peer_live(self)
                self.waiting.clear()
            case core.AnnounceLost(failure):
                self._deadline.cancel()
                log.info("peer lost", peer=self.name, reason=str(failure.reason), detail=failure.detail)
                self.node.peer_lost(self, failure)
            case core.Disconnect(failure):
                self.send(Goodbye(code=failure.reason, reason=failure.detail))
                if self._connection is not None:
                    self._connection.close()
            case core.CloseLinks() if self.link is None:
                self.feed(core.LinksClosed())
            case core.CloseLinks():
                self.node.close_link(self)
            case core.Forget():
                if self._held is not None:
                    self._held.cancel()
                if self._has_window:
                    self.node.return_window()
                if self._beat is not None:
                    self.node.return_beat(*self._beat)
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
        self._beat = self.node.take_beat()
        if self._beat is None:
            self.lose(Failure(Reason.busy, "no immediate slot is free for its heartbeats"))
            return
        self.name = hello.name or self.name
        self.can_rotate = CAN_ROTATE in hello.capabilities
        self.feed(core.Greeted())

    def _send_attach(self) -> None:
        assert self.link is not None
        assert self._beat is not None
        node = self.node
        node.fabric.state.link_beat(*self._beat, self.link)
        rank = RankAttach(
            rank=0,
            replica=0,
            groups=list(node.memory.groups),
            regions=self.regions(),
            endpoints=[self.endpoint()],
            context=list(node.memory.context),
        )
        self.send(
            Attach(
                ranks=[rank],
                num_signals=node.memory.num_signals,
                heartbeat_s=node.config.heartbeat_s,
                lease_s=node.config.lease_s,
            )
        )

    def regions(self) -> list[Region]:
        assert self.link is not None
        return [Region(*region) for region in self.node.fabric.poller.link_regions(self.link)]

    def endpoint(self) -> Endpoint:
        """Where the peer writes to."""
        assert self.link is not None
        assert self._beat is not None
        node, poller = self.node, self.node.fabric.poller
        base, _, key = poller.link_cell(self.link)
        return Endpoint(
            provider=node.fabric.choice.provider,
            address=poller.link_address(self.link),
            window=node.config.window,
            beat=Beat(base, key, *self._beat),
        )

    def _attach(self, attach: Attach) -> None:
        if self.machine.state not in (PeerState.opening, PeerState.attaching):
            raise LocalProtocolError(f"Attach in state {self.machine.state!s}")
        try:
            self._check_lease(attach)
            self.remote = _fitting_rank(attach, self.node.fabric.choice.provider)
            self._plan(self.remote)
        except MismatchError as error:
            self.lose(Failure(Reason.layout_mismatch, str(error)))
            return
        except LayoutError as error:
            self.lose(Failure(Reason.protocol, f"{self.name} describes memory that it does not have: {error}"))
            return
        self.feed(core.Attached())

    def _check_lease(self, attach: Attach) -> None:
        config = self.node.config
        if attach.heartbeat_s * 2 > config.lease_s or config.heartbeat_s * 2 > attach.lease_s:
            ours = f"heartbeat_s {config.heartbeat_s:g}, lease_s {config.lease_s:g}"
            theirs = f"heartbeat_s {attach.heartbeat_s:g}, lease_s {attach.lease_s:g}"
            advice = "the lease of each side must outlast two heartbeats of the other"
            raise MismatchError("lease", ours, theirs, advice)

    def _plan(self, remote: RankAttach) -> None:
        """Everything that does not fit is found here, before any page is given to a request."""
        ours = self.node.memory
        check_groups(ours.groups, remote.groups)
        check_contexts(ours.context, remote.context)
        check_bounds(remote.groups, remote.context, [region.num_bytes for region in remote.regions])
        self._plans = [build_templates(*pair) for pair in zip(ours.groups, remote.groups, strict=True)]
        self._context_plans = [
            context_template(*pair, ours.num_signals + 1) for pair in zip(ours.context, remote.context, strict=True)
        ]

    def _connect(self) -> None:
        assert self.link is not None
        assert self.remote is not None
        endpoint, poller = self.remote.endpoints[0], self.node.fabric.poller
        regions = [(region.base, region.num_bytes, region.key) for region in self.remote.regions]
        window = min(endpoint.window, self.node.config.window)
        try:
            poller.connect_link(self.link, endpoint.address, regions, window, _beat_target(endpoint.beat))
        except (ValueError, OverflowError) as error:
            self.lose(Failure(Reason.protocol, f"{self.name} cannot be connected to: {error}"))
            return
        self.templates = [[(self._add(plan), plan) for plan in plans] for plans in self._plans]
        self.context_templates = [self._add(plan) for plan in self._context_plans]

    def _rotation(self, message: Rotate | Rotated | Resume) -> None:
        assert self.link is not None
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
                self.node.fabric.poller.resume_link(self.link)

    def _retarget(self, message: Rotate) -> None:
        """The peer has another endpoint: our writes go there once it has counted all that went to the old one."""
        assert self.link is not None
        provider = self.node.fabric.choice.provider
        rank = message.ranks[0]
        if len(message.ranks) != 1 or len(rank.endpoints) != 1 or rank.endpoints[0].provider != provider:
            raise LocalProtocolError(f"Rotate names other ranks, interfaces or providers than Attach ({provider})")
        if self._held is not None:
            self._held.cancel()
        patience_s = 2 * self.node.config.lease_s
        self._held = self.node.loop.call_later(patience_s, self._never_resumed, patience_s)
        endpoint = rank.endpoints[0]
        regions = [(region.base, region.num_bytes, region.key) for region in rank.regions]
        try:
            self.node.fabric.poller.retarget_link(self.link, endpoint.address, regions, _beat_target(endpoint.beat))
        except (ValueError, OverflowError) as error:
            self.lose(Failure(Reason.protocol, f"{self.name} cannot be moved with: {error}"))

    def _never_resumed(self, seconds: float) -> None:
        detail = f"{self.name} has moved to another endpoint, and has not let us go on within {seconds:g} s"
        self.lose(Failure(Reason.timeout, detail))

    def _add(self, plan: Template) -> int:
        assert self.link is not None
        return self.node.fabric.poller.add_template(
            self.link,
            plan.runs,
            plan.src_page_bytes,
            plan.dst_page_bytes,
            plan.entries,
            plan.row_bytes,
            plan.item_bytes,
        )


def _beat_target(beat: Beat) -> tuple[int, int, int]:
    """Address, key and immediate of a heartbeat."""
    return beat.base, beat.key, immediate.base(beat.slot, beat.generation)


def _fitting_rank(attach: Attach, provider: str) -> RankAttach:
    if len(attach.ranks) != 1:
        raise MismatchError("number of ranks", 1, len(attach.ranks), "one rank to one rank is what can be moved so far")
    rank = attach.ranks[0]
    if len(rank.endpoints) != 1:
        raise MismatchError("number of network interfaces", 1, len(rank.endpoints))
    if rank.endpoints[0].provider != provider:
        raise MismatchError(
            "fabric provider", provider, rank.endpoints[0].provider, "set the same `fabric` on both sides"
        )
    return rank
