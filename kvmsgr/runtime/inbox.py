"""Requests that decoders send here, and the way of every control message about a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from kvmsgr.core.failure import Failure
from kvmsgr.errors import LayoutError, LocalProtocolError
from kvmsgr_protocol import (
    Attach,
    Cancel,
    Dispatch,
    Goodbye,
    Hello,
    Message,
    Reason,
    Resume,
    Rotate,
    Rotated,
    SlotRows,
    Unknown,
)

from .answers import declined
from .delivery import Delivery, leg_rows
from .serve import PrefillRequest

if TYPE_CHECKING:
    from .node import Node
    from .peer import PeerDriver
    from .routes import Routes

log = structlog.get_logger("kvmsgr")


class Inbox:
    """The prefill side of a node. `next_request` gives each request once, in the order they came, unless it has
    failed before."""

    def __init__(self, node: Node) -> None:
        self.by_tag: dict[int, PrefillRequest] = {}
        self._node = node
        self._serves: dict[tuple[PeerDriver, str, int], PrefillRequest] = {}
        self._offered: dict[PrefillRequest, None] = {}  # that the engine has not seen, in order
        self._news = asyncio.Event()
        self._closed = False

    async def next_request(self) -> PrefillRequest | None:
        """The next request, or None when the messenger is closed."""
        while not self._offered and not self._closed:
            self._news.clear()
            await self._news.wait()
        request = next(iter(self._offered), None)
        if request is not None:
            del self._offered[request]
        return request

    def message_received(self, peer: PeerDriver, message: Message) -> None:
        """A message about a request, from a live peer."""
        if isinstance(message, Dispatch):
            self._dispatched(peer, message)
            return
        assert not isinstance(message, Hello | Attach | Goodbye | Rotate | Rotated | Resume)
        attempt = self._node.outbox.attempt_of(peer, message.request_id, message.attempt)
        if attempt is not None:
            attempt.message_received(peer, message)
            return
        request = self._serves.get((peer, message.request_id, message.attempt))
        if request is not None:
            request.message_received(message)
        elif isinstance(message, Cancel):  # the others are late, and nobody waits for an answer to them
            peer.send(Unknown(request_id=message.request_id, attempt=message.attempt))

    def _no_context_slot(self) -> str:
        alive = sum(request.context_slot >= 0 and not request.ended for request in self._serves.values())
        return (
            f"every context slot is in use ({self._node.memory.num_context_slots}; {alive} by requests to prefill). "
            "What is over keeps its own until its step has shown all its signals or is abandoned, and while a "
            "send_context is due"
        )

    def _dispatched(self, peer: PeerDriver, dispatch: Dispatch) -> None:
        """Admit a request, or say why not."""
        key = (peer, dispatch.request_id, dispatch.attempt)
        if key in self._serves:
            raise LocalProtocolError(f"request {dispatch.request_id!r}, attempt {dispatch.attempt}, came twice")
        assert peer.routes is not None
        refusal = self._flaw(peer.routes, dispatch)
        delivery: Delivery | None = None
        if refusal is None:
            try:
                delivery = Delivery(self._node.memory, peer.routes, dispatch)
            except LayoutError as error:
                refusal = Failure(Reason.protocol, str(error))
        context_slot = -1
        if refusal is None and dispatch.context_slot >= 0:
            taken = self._node.take_context_slot()
            if taken is None:
                refusal = Failure(Reason.busy, self._no_context_slot())
            else:
                context_slot = taken
        number = self._node.ledger.take() if refusal is None else None
        if refusal is None and number is None:
            refusal = Failure(Reason.busy, "too many requests are alive")
            if context_slot >= 0:
                self._node.context_slots.give(context_slot)
        if refusal is not None or number is None or delivery is None:
            assert refusal is not None
            log.warning("request declined", request_id=dispatch.request_id, peer=peer.name, detail=refusal.detail)
            peer.send(declined(dispatch, refusal))
            return
        num_layers = max(self._node.memory.num_signals)
        self._node.ledger.open(number, "serve", "offered", peer.name, dispatch, num_layers)
        request = PrefillRequest(self._node, peer, dispatch, delivery, number, context_slot)
        self._serves[key] = self.by_tag[request.tag] = request
        log.info("request offered", request_id=request.request_id, peer=peer.name, num_tokens=request.num_tokens)
        self._offered[request] = None
        self._news.set()

    def _flaw(self, routes: Routes, dispatch: Dispatch) -> Failure | None:
        """What is wrong with a request, found before any of it is planned."""
        if self._closed:
            return Failure(Reason.closed, "the messenger is closing")
        num_held = max(len(self._serves), len(self._offered))
        if num_held >= self._node.config.max_requests:
            return Failure(Reason.busy, f"{num_held} requests are being served, which is the limit")
        room = max(
            (group.num_pages * group.page_tokens for group in self._node.memory.groups if not group.recurrent),
            default=dispatch.num_tokens,
        )
        if dispatch.num_tokens - 1 > room:
            return Failure(Reason.refused, f"a prompt of {dispatch.num_tokens} tokens; the cache has room for {room}")
        numbers = [target.rank for target in dispatch.ranks]
        if not numbers or not set(numbers) <= set(routes.ranks):
            return Failure(Reason.protocol, f"pages for ranks {numbers}; Attach named {sorted(routes.ranks)}")
        for number in numbers if dispatch.context_slot >= 0 else []:
            for layout in routes.ranks[number].context:
                if not routes.holders(layout.name, number):
                    detail = f"rank {number} wants context {layout.name!r}, and no rank here has it"
                    return Failure(Reason.layout_mismatch, detail)
                if dispatch.context_slot >= layout.num_slots:
                    return Failure(Reason.protocol, f"context slot {dispatch.context_slot} does not exist")
        try:
            rows = leg_rows(routes, dispatch)
        except ValueError as error:
            return Failure(Reason.protocol, str(error))
        if rows != dispatch.expected_rows:
            detail = f"our ranks have {rows} rows of the request, its decoder expects {dispatch.expected_rows}"
            return Failure(Reason.protocol, detail)
        return None

    def forget(self, request: PrefillRequest) -> None:
        """The record of a request has served."""
        del self._serves[(request.peer, request.request_id, request.dispatch.attempt)]
        del self.by_tag[request.tag]
        if request.unwanted:
            self._offered.pop(request, None)  # an engine that is slow to look is not made to hold what is over
        self._node.ledger.close(request.tag)
        self._node.settled(request.peer)

    def serves(self, peer: PeerDriver) -> bool:
        """Whether a request of that peer is alive here."""
        return any(request.peer is peer for request in self._serves.values())

    def posted_to(self, peer: PeerDriver) -> list[SlotRows]:
        """Rows posted so far for each request of a peer, as the poller counts them."""
        return [
            SlotRows(
                slot=request.dispatch.slot,
                generation=request.dispatch.generation,
                rows=self._node.fabric.state.leg_rows_posted(request.tag),
            )
            for request in self._serves.values()
            if request.peer is peer
        ]

    def peer_lost(self, peer: PeerDriver, failure: Failure) -> None:
        for request in list(self._serves.values()):
            if request.peer is peer:
                request.peer_lost(failure)

    def rank_lost(self, rank: int, failure: Failure) -> None:
        """Those that the rank holds fail."""
        for request in list(self._serves.values()):
            if rank in request.ranks:
                request.rank_lost(failure)

    def close(self) -> None:
        """Take no more requests; those that are alive fail."""
        self._closed = True
        self._news.set()
        for request in list(self._serves.values()):
            request.failed(Reason.closed, "the messenger is closing")
