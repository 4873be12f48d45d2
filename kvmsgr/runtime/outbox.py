"""Requests that we send to prefillers: their slots, pages and legs, and what the poller says of their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from kvmsgr.core.failure import Failure
from kvmsgr.core.slots import AttemptNumbers
from kvmsgr.errors import (
    BusyError,
    ConfigError,
    FabricStuckError,
    LayoutError,
    MessengerClosedError,
    RankLostError,
    RefusedError,
)
from kvmsgr.types import Descriptor, Span
from kvmsgr_protocol import (
    NUM_GENERATIONS,
    Dispatch,
    RankSpans,
    Reason,
    encode,
    expected_rows,
    immediate,
    pack_tokens,
)
from kvmsgr_protocol import Span as WireSpan

from .attempt import Attempt
from .fetch import Fetch
from .pages import PageGuard, check_cover, hold_all, page_indices, release_all

if TYPE_CHECKING:
    from .node import Node
    from .peer import PeerDriver

log = structlog.get_logger("kvmsgr")
MAX_ATTEMPTS = 16384


class Outbox:
    """The fetch side of a node.

    Args:
        node: The node.
        pages: The destination pages of each rank and cache group.
    """

    def __init__(self, node: Node, pages: Sequence[Sequence[PageGuard]]) -> None:
        self._node = node
        self._pages = pages
        self._numbers = AttemptNumbers(MAX_ATTEMPTS)
        self._attempts: dict[int, Attempt] = {}
        self._by_slot: dict[int, tuple[Attempt, PeerDriver]] = {}
        self._past: dict[int, tuple[PeerDriver, str]] = {}  # who wrote last into a slot that is free now

    @property
    def attempts(self) -> list[Attempt]:
        """Those that have left something behind: undecided, or with pages that are held."""
        return list(self._attempts.values())

    def fetch(
        self,
        request_id: str,
        sources: Sequence[Descriptor],
        tokens: Sequence[int],
        spans: Sequence[Span],
        ranks: Sequence[int] | None,
        context: bool,
        payload: bytes,
        trace: dict[str, str],
        time_allowed_s: float | None,
    ) -> Fetch:
        """Arm slots, counter and pages, then ask the peers. See `Messenger.fetch`."""
        self._check_fetch(request_id)
        if len(set(sources)) < len(sources):
            raise ConfigError(f"request {request_id!r}: a source is named twice")
        numbers = self._living(request_id, ranks)
        wire_spans = [self._wire_span(span) for span in spans]
        check_cover(self._node.memory.groups, wire_spans, len(tokens))
        targets = [RankSpans(number, wire_spans) for number in numbers]
        has_context = any(self._node.memory.ranks[number].context for number in numbers)
        wants_context = context and has_context and len(tokens) > 1
        if time_allowed_s is None:
            time_allowed_s = self._node.config.time_allowed_s
        dispatch = self._dispatch(request_id, tokens, targets, payload, trace, time_allowed_s, wants_context)
        peers = [self._node.peer_at(source) for source in sources]
        self._hold(targets)
        context_slot = self._node.take_context_slot() if wants_context else -1
        try:
            if context_slot is None:
                raise _busy(request_id, "context slot")
            fetch = Fetch(self._node, peers, replace(dispatch, context_slot=context_slot))
        except BusyError:
            self._release(targets)
            if context_slot is not None and context_slot >= 0:
                self._node.context_slots.give(context_slot)
            raise
        self._show_pages(targets)
        fetch.start()
        return fetch

    def new_attempt(self, fetch: Fetch, peers: Sequence[PeerDriver], dispatch: Dispatch) -> Attempt:
        """Arm the slots and the counter of one more attempt of a fetch, which has its pages.

        Raises:
            BusyError: There is no slot for each of its legs, or no number. Nothing was armed.
        """
        slots, legs = self._take_legs(fetch.request_id, peers)
        number = self._numbers.take()
        if number is None:
            self._give_legs(slots, legs)
            raise _busy(fetch.request_id, "attempt of the state file")
        dispatch = replace(dispatch, attempt=number)
        self._node.fabric.state.open_attempt(number, dispatch.expected_rows, fetch.request_id)
        attempt = self._attempts[number] = Attempt(self._node, fetch, slots, legs, dispatch)
        for peer, slot in slots.items():
            index = immediate.counter_index(*slot)
            self._node.fabric.state.link_slot(*slot, number)
            self._past.pop(index, None)
            self._by_slot[index] = attempt, peer
        return attempt

    def _take_legs(
        self, request_id: str, peers: Sequence[PeerDriver]
    ) -> tuple[dict[PeerDriver, tuple[int, int]], dict[PeerDriver, int]]:
        """For each leg a slot, and a number in the state file.

        Raises:
            BusyError: There are not so many. None was taken.
        """
        slots: dict[PeerDriver, tuple[int, int]] = {}
        legs: dict[PeerDriver, int] = {}
        for peer in peers:
            slot, leg = self._node.slots.take(), self._node.ledger.take()
            if slot is not None:
                slots[peer] = slot
            if leg is not None:
                legs[peer] = leg
            if slot is None or leg is None:
                self._give_legs(slots, legs)
                raise _busy(request_id, "immediate slot" if slot is None else "leg of the state file")
        return slots, legs

    def _give_legs(self, slots: Mapping[PeerDriver, tuple[int, int]], legs: Mapping[PeerDriver, int]) -> None:
        for slot, _ in slots.values():
            self._node.slots.give(slot)
        for leg in legs.values():
            self._node.ledger.give(leg)

    def _check_fetch(self, request_id: str) -> None:
        if self._node.closing:
            raise MessengerClosedError("the messenger is closed: no request can be fetched")
        if self._node.stuck:
            raise FabricStuckError("the polling thread is stuck inside libfabric: close this messenger, open another")
        if any(attempt.request_id == request_id and not attempt.done for attempt in self._attempts.values()):
            raise RefusedError(request_id, "a request of this name is being fetched already", Reason.duplicate)

    def _living(self, request_id: str, ranks: Sequence[int] | None) -> list[int]:
        """The destination ranks of a request, checked."""
        known = range(len(self._node.memory.ranks))
        numbers = list(known if ranks is None else ranks)
        if not numbers or len(set(numbers)) < len(numbers) or not set(numbers) <= set(known):
            raise ConfigError(
                f"request {request_id!r} names the ranks {numbers}; needed are different ones out of {list(known)}"
            )
        for number in numbers:
            if number in self._node.lost_ranks:
                raise RankLostError(request_id, f"rank {number} is lost: {self._node.lost_ranks[number]}")
        return numbers

    def _dispatch(
        self,
        request_id: str,
        tokens: Sequence[int],
        targets: list[RankSpans],
        payload: bytes,
        trace: dict[str, str],
        time_allowed_s: float,
        wants_context: bool,
    ) -> Dispatch:
        """The request as it will travel, but for its slots and with the rows of all its legs; whatever is wrong with it
        is found here."""
        if not 0 < time_allowed_s < math.inf:
            raise ConfigError(f"request {request_id!r}: time_allowed_s is {time_allowed_s}; it must be positive")
        if not isinstance(payload, bytes):
            raise ConfigError(f"request {request_id!r}: payload is a {type(payload).__name__}; it must be bytes")
        try:
            dispatch = Dispatch(
                request_id=request_id,
                attempt=0,
                num_tokens=len(tokens),
                tokens=pack_tokens(tokens),
                slot=0,
                generation=0,
                ranks=targets,
                context_slot=0 if wants_context else -1,
                expected_rows=self.rows_at(targets, len(tokens), wants_context),
                time_allowed_s=time_allowed_s,
                payload=payload,
                trace=trace,
            )
            encode(dispatch)
        except ValueError as error:
            raise ConfigError(f"request {request_id!r} cannot be sent: {error}") from error
        return dispatch

    def rows_at(
        self,
        targets: Sequence[RankSpans],
        num_tokens: int,
        with_context: bool,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> int:
        """Rows that land in our ranks for a request. `rows`: of a position, by rank and group, what one leg brings;
        None: everything."""
        total = 0
        for target in targets:
            rank = self._node.memory.ranks[target.rank]
            context = rank.context if with_context else ()
            of_position = None if rows is None else rows[target.rank]
            total += expected_rows(num_tokens, target.spans, rank.groups, context, of_position)
        return total

    def _hold(self, targets: Sequence[RankSpans]) -> None:
        """Hold all the destination pages, or none."""
        held: list[RankSpans] = []
        try:
            for target in targets:
                hold_all(self._pages[target.rank], target.spans)
                held.append(target)
        except LayoutError:
            self._release(held)
            raise

    def _release(self, targets: Sequence[RankSpans]) -> None:
        for target in targets:
            release_all(self._pages[target.rank], target.spans)

    def _wire_span(self, span: Span) -> WireSpan:
        if not 0 <= span.group < len(self._node.memory.groups):
            known = ", ".join(f"{index} {group.name!r}" for index, group in enumerate(self._node.memory.groups))
            raise LayoutError(f"a span names cache group {span.group}; the groups here are {known}")
        if span.first_token < 0:
            raise LayoutError(f"a span starts at position {span.first_token}; positions start at 0")
        return WireSpan(span.group, span.first_token, page_indices(span.pages).astype("<i4").tobytes())

    def attempt_of(self, peer: PeerDriver, request_id: str, number: int) -> Attempt | None:
        """The one that has this leg."""
        attempt = self._attempts.get(number)
        return attempt if attempt is not None and attempt.request_id == request_id and attempt.has_leg(peer) else None

    def forget(self, attempt: Attempt) -> None:
        """Nothing of it can land: its slots are free. Who wrote into a slot last is remembered: rows that come all the
        same are a peer that broke the count."""
        for peer, (slot, generation) in attempt.slots.items():
            index = immediate.counter_index(slot, generation)
            self._node.rotation.slot_reached(index)
            self._node.fabric.state.unlink_slot(slot, generation)
            self._past[index] = peer, attempt.request_id
            del self._by_slot[index]
            self._node.slots.give(slot)
        del self._attempts[attempt.number]
        self._numbers.give(attempt.number)
        self._node.settled(*attempt.slots)

    def release_pages(self, targets: Sequence[RankSpans]) -> None:
        """Nothing can land in these pages any more."""
        self._release(targets)
        self._show_pages(targets)

    def _show_pages(self, targets: Sequence[RankSpans]) -> None:
        for group in {span.group for target in targets for span in target.spans}:
            self._node.ledger.show_pages(group)

    # Peers and ranks

    def may_land_from(self, peer: PeerDriver) -> bool:
        """Whether something of the peer may still land here."""
        return any(attempt.may_land_from(peer) for attempt in self._attempts.values())

    def peer_lost(self, peer: PeerDriver, failure: Failure) -> None:
        for attempt in dict.fromkeys((*self._attempts.values(), *peer.waiting)):
            if attempt.has_leg(peer):
                attempt.peer_lost(peer, failure)

    def peer_fenced(self, peer: PeerDriver) -> None:
        """The endpoints that the peer wrote to are closed."""
        for attempt in self.attempts:
            if attempt.has_leg(peer):
                attempt.peer_fenced(peer)

    def forget_peer(self, peer: PeerDriver) -> None:
        self._past = {index: past for index, past in self._past.items() if past[0] is not peer}

    def rank_lost(self, rank: int, failure: Failure) -> None:
        for attempt in self.attempts:
            if any(target.rank == rank for target in attempt.targets):
                attempt.rank_lost(failure)

    # Records

    def reached(self, number: int, rows: int, extra: int) -> None:
        if number in self._attempts:
            self._attempts[number].rows_counted(rows)

    def overflowed(self, number: int, rows: int, counter_index: int) -> None:
        if number in self._attempts:
            self._attempts[number].count_overflowed(rows)
        else:
            self.strayed(counter_index, rows, 0)

    def strayed(self, counter_index: int, rows: int, extra: int) -> None:
        slot, generation = divmod(counter_index, NUM_GENERATIONS)
        log.error("rows landed in a slot that is not in use", slot=slot, generation=generation)
        if counter_index in self._past:
            peer, request_id = self._past[counter_index]
            detail = f"rows landed for request {request_id!r} after all of it had landed"
            peer.lose(Failure(Reason.overflow, detail))

    def slot_reached(self, counter_index: int, rows: int, extra: int) -> None:
        self._node.rotation.slot_reached(counter_index)
        if counter_index in self._by_slot:
            attempt, peer = self._by_slot[counter_index]
            attempt.slot_reached(peer, rows)

    def is_slot_of(self, peer: PeerDriver, counter_index: int) -> bool:
        """Whether rows in that slot are of a live request at that peer."""
        return counter_index in self._by_slot and self._by_slot[counter_index][1] is peer

    def rows_owed(self, peer: PeerDriver) -> dict[int, int]:
        """By counter: rows that the peer has posted in all for requests it is done with and we are not."""
        return {
            index: attempt.rows_posted_by(peer)
            for index, (attempt, other) in self._by_slot.items()
            if other is peer
            if attempt.may_land_from(peer) and attempt.rows_posted_by(peer)
        }


def _busy(request_id: str, what: str) -> BusyError:
    return BusyError(request_id, f"every {what} is held by a request that is alive or not proven ended")
