"""From chunks to armed writes: one call before each forward pass, from any thread, in microseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmsgr.device.counters import Signal
from kvmsgr.errors import LayoutError, LocalProtocolError
from kvmsgr.layout import PageWrites, Template
from kvmsgr.types import Span
from kvmsgr_protocol import immediate

from .serve import PrefillRequest

if TYPE_CHECKING:
    from .node import Node

_NO_PAGES = np.empty((0, 2), dtype=np.int32)
_NO_EDGES = np.empty((0, 4), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A token range of one request that one step computes.

    Args:
        request: The request.
        start, stop: Positions [start, stop). Chunks of a request follow each other; the last one stops at
            `request.num_tokens - 1`.
        spans: The source pages that hold these positions. Pages that were named before need not be named again.
        ready: The pages hold their final values already: they are sent at once.
    """

    request: PrefillRequest
    start: int
    stop: int
    spans: Sequence[Span]
    ready: bool = False

    @property
    def last(self) -> bool:
        """Whether the chunk is its request's last."""
        return self.stop == self.request.num_positions


@dataclass(slots=True)
class _Batch:
    """What one native call arms."""

    transfers: list[tuple[int, int, int, int, bool]] = field(default_factory=list)
    pages: list[npt.NDArray[np.int32]] = field(default_factory=list)
    page_starts: list[int] = field(default_factory=lambda: [0])
    edges: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    edge_starts: list[int] = field(default_factory=lambda: [0])

    def add(
        self, transfer: tuple[int, int, int, int, bool], pairs: npt.NDArray[np.int32], edges: npt.NDArray[np.uint64]
    ) -> None:
        self.transfers.append(transfer)
        self.pages.append(pairs)
        self.page_starts.append(self.page_starts[-1] + len(pairs))
        self.edges.append(edges)
        self.edge_starts.append(self.edge_starts[-1] + len(edges))


class Step:
    """One announced forward pass.

    Attributes:
        signal: What the forward does: `signal.start()` before it, `signal.bump()` after each layer.
        ticket: Its number on its counter; 0 for a step that moves nothing.
    """

    def __init__(
        self, node: Node, chunks: Sequence[Chunk], counter: int, num_bumps: int = 0, marks: Sequence[_Mark] = ()
    ) -> None:
        self.chunks = chunks
        self.counter = counter
        self.num_bumps = num_bumps
        self.ticket = 0
        self.signal = Signal(node.counters[counter], 0)
        self._node = node
        self._marks = marks

    def number(self, ticket: int) -> None:
        self.ticket = ticket
        self.signal = Signal(self._node.counters[self.counter], ticket)

    def abandon(self) -> None:
        """The forward will not run: nothing of this step is sent, and its chunks may be announced again.

        Raises:
            LocalProtocolError: A later step of one of its requests was announced; abandon that one first.
        """
        if self.ticket == 0:
            return
        with self._node.lock:
            for mark in self._marks:
                mark.check_newest()
            for mark in self._marks:
                mark.restore()
            self._node.steps.pop((self.counter, self.ticket), None)
            self._node.fabric.poller.abandon(self.counter, self.ticket)


class _Mark:
    """Where a request stood before a step, so that a step that is not armed, or abandoned, leaves no trace."""

    def __init__(self, chunk: Chunk) -> None:
        request = chunk.request
        self._request = request
        self._before = request.next_position
        self._after = chunk.stop
        self._cursors = [cursor.mark() for cursor in request.cursors]

    def check_newest(self) -> None:
        request = self._request
        if request.next_position != self._after:
            raise LocalProtocolError(
                f"request {request.request_id!r}: the step up to position {self._after} cannot be abandoned, a later "
                f"one up to {request.next_position} was announced; abandon the later one first"
            )

    def restore(self) -> None:
        request = self._request
        request.next_position = self._before
        request.last_armed = False
        for cursor, mark in zip(request.cursors, self._cursors, strict=True):
            cursor.restore(mark)


def begin_step(node: Node, chunks: Sequence[Chunk], counter: int) -> Step:
    """Announce a step; see `Messenger.begin_step`."""
    if not chunks:
        return Step(node, chunks, counter)
    with node.lock:
        marks = [_Mark(chunk) for chunk in chunks]
        before = [(chunk.request, chunk.request.num_transfers, chunk.request.last_armed) for chunk in chunks]
        try:
            return _arm(node, chunks, counter, marks)
        except BaseException:
            for mark in reversed(marks):
                mark.restore()
            for request, num_transfers, last_armed in reversed(before):
                request.num_transfers, request.last_armed = num_transfers, last_armed
            raise


def _arm(node: Node, chunks: Sequence[Chunk], counter: int, marks: Sequence[_Mark]) -> Step:
    batch = _Batch()
    for chunk in chunks:
        _advance(node, chunk, batch)
    waits = [chunk for chunk in chunks if not chunk.ready]
    num_bumps = node.memory.num_signals + any(chunk.last and chunk.request.wants_context for chunk in waits)
    step = Step(node, chunks, counter, num_bumps if waits else 0, marks)
    if waits or batch.transfers:
        ticket = node.fabric.begin_step(
            counter,
            step.num_bumps,
            batch.transfers,
            np.concatenate([_NO_PAGES, *batch.pages]),
            batch.page_starts,
            np.concatenate([_NO_EDGES, *batch.edges]),
            batch.edge_starts,
            int(node.config.step_timeout_s * 1e9),
        )
        if waits:
            step.number(ticket)
            node.steps[(counter, ticket)] = step
    for chunk in chunks:
        if chunk.last and not chunk.request.num_transfers:
            node.loop.call_soon_threadsafe(chunk.request.check_completed)
    return step


def _advance(node: Node, chunk: Chunk, batch: _Batch) -> None:
    """Plan the pages that this chunk makes final."""
    request = chunk.request
    if not request.next_position == chunk.start < chunk.stop <= request.num_positions:
        raise LayoutError(
            f"request {request.request_id!r}: chunk [{chunk.start}, {chunk.stop}) was announced, expected is one that "
            f"starts at {request.next_position} and stops at {request.num_positions} at the latest"
        )
    request.next_position = chunk.stop
    if request.ended or request.peer.link is None:
        return  # the engine runs the chunk with the others; nothing of it is wanted any more
    for span in chunk.spans:
        if not 0 <= span.group < len(request.cursors):
            raise LayoutError(f"a span names group {span.group}; there are {len(request.cursors)}")
        request.cursors[span.group].add_source(span.first_token, np.asarray(span.pages, dtype=np.int32))
    transfers = list(_transfers(node, chunk))
    request.num_transfers += len(transfers)
    request.last_armed = chunk.last
    imm = immediate.base(request.dispatch.slot, request.dispatch.generation)
    for template, pairs, edges in transfers:
        batch.add((request.peer.link, template, imm, request.tag, chunk.ready), pairs, edges)


def _transfers(node: Node, chunk: Chunk) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint64]]]:
    """(template, page pairs, edges) of each transfer."""
    request = chunk.request
    for cursor, templates in zip(request.cursors, request.peer.templates, strict=True):
        writes = cursor.advance(chunk.stop)
        if not len(writes.pairs) and not writes.edges:
            continue
        for number, template in templates:
            yield number, writes.pairs, _edges(template, writes)
    if chunk.last and request.wants_context:
        slots = np.array([[request.context_slot, request.dispatch.context_slot]], dtype=np.int32)
        for number in request.peer.context_templates:
            yield number, slots, _NO_EDGES


def _edges(template: Template, writes: PageWrites) -> npt.NDArray[np.uint64]:
    return np.concatenate([_NO_EDGES, *(template.edge_runs(*edge) for edge in writes.edges)])
