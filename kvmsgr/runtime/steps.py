"""From chunks to armed writes: one call before each forward pass, from any thread, in microseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmsgr.device.counters import Signal
from kvmsgr.errors import ConfigError, LayoutError, LocalProtocolError, MessengerClosedError
from kvmsgr.layout import PageWrites, Template
from kvmsgr.types import Span
from kvmsgr_protocol import Reason, immediate

from .pages import page_indices
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
        signals_context: Whether one more bump is due after the context buffers were written, because a chunk is its
            request's last and has context. It holds even if that request ends in the meantime.
        ticket: Its number on its counter; 0 for a step that moves nothing.
    """

    def __init__(self, node: Node, chunks: Sequence[Chunk], counter: int) -> None:
        waits = [chunk for chunk in chunks if not chunk.ready]
        self.chunks = waits
        self.counter = counter
        self.ticket = 0
        self.signal = Signal(node.counters[counter], 0)
        self.signals_context = any(chunk.last and chunk.request.wants_context for chunk in waits)
        self.num_bumps = node.memory.num_signals + self.signals_context if waits else 0
        self._node = node
        self._marks = [_Mark(chunk) for chunk in waits]

    def armed(self, ticket: int) -> None:
        """The native layer has it."""
        self.ticket = ticket
        self.signal = Signal(self._node.counters[self.counter], ticket)
        self._node.steps[(self.counter, ticket)] = self
        for chunk in self.chunks:
            chunk.request.num_open_steps += 1

    def abandon(self) -> None:
        """The forward will not run: nothing of this step is sent, and its chunks may be announced again.

        Call it instead of `signal.start()`. A step that has started cannot be taken back, for layers of it may be on
        their way: its requests fail, by name. A step that has shown all its signals, and one that moves nothing, are
        left as they are. Chunks that were `ready` have gone when they were announced.

        Raises:
            LocalProtocolError: A later step of one of its requests was announced; abandon that one first.
        """
        node = self._node
        with node.lock:
            if (self.counter, self.ticket) not in node.steps or self.signal.num_bumps >= self.num_bumps:
                return
            if not self.signal.started:
                for mark in self._marks:
                    mark.check_newest()
                for mark in self._marks:
                    mark.restore()
            for chunk in self.chunks:
                chunk.request.last_armed = False  # what is stopped now must not look complete
            del node.steps[(self.counter, self.ticket)]
            node.fabric.poller.abandon(self.counter, self.ticket)
        if self.signal.started:
            seen = self.signal.num_bumps
            detail = f"step {self.ticket} was abandoned after {seen} of {self.num_bumps} layer signals"
            node.loop.call_soon_threadsafe(self.fail, detail)
        else:
            node.loop.call_soon_threadsafe(self.over)

    def fail(self, detail: str) -> None:
        """Fail the requests whose chunks it computes."""
        for chunk in self.chunks:
            chunk.request.failed(Reason.step_fault, detail)
        self.over()

    def over(self) -> None:
        """The forward computes nothing more."""
        for chunk in self.chunks:
            chunk.request.num_open_steps -= 1
            chunk.request.release_context_slot()
            chunk.request.show()


class _Mark:
    """Where a request stood before a step, so that a step that is not armed, or abandoned, leaves no trace."""

    def __init__(self, chunk: Chunk) -> None:
        request = chunk.request
        self._request = request
        self._before = request.next_position
        self._last_armed = request.last_armed
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
        request.last_armed = self._last_armed
        for cursor, mark in zip(request.cursors, self._cursors, strict=True):
            cursor.restore(mark)


def begin_step(node: Node, chunks: Sequence[Chunk], counter: int) -> Step:
    """Announce a step; see `Messenger.begin_step`."""
    if not 0 <= counter < len(node.counters):
        raise ConfigError(f"layer counter {counter} does not exist; there are {len(node.counters)}")
    requests = [chunk.request for chunk in chunks]
    if len(set(requests)) < len(requests):
        raise LayoutError("a step has one chunk a request at most; announce pages that are ready by themselves")
    with node.lock:
        if node.closing:
            raise MessengerClosedError("the messenger is closed: no step can be announced")
        marks = [_Mark(chunk) for chunk in chunks]
        tallies = [request.num_transfers for request in requests]
        try:
            return _arm(node, list(chunks), counter)
        except BaseException:
            for mark, request, num_transfers in zip(marks, requests, tallies, strict=True):
                mark.restore()
                request.num_transfers = num_transfers
            raise


def _arm(node: Node, chunks: Sequence[Chunk], counter: int) -> Step:
    step, batch = Step(node, chunks, counter), _Batch()
    for chunk in chunks:
        _advance(node, chunk, batch)
    if step.num_bumps or batch.transfers:
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
        if step.num_bumps:
            step.armed(ticket)
    if chunks:
        node.loop.call_soon_threadsafe(_announced, chunks)
    return step


def _announced(chunks: Sequence[Chunk]) -> None:
    """On the event loop: show what is held now; and the writes of a last chunk may be complete, or there are none."""
    for chunk in chunks:
        if chunk.last:
            chunk.request.check_completed()
        chunk.request.show()


def _advance(node: Node, chunk: Chunk, batch: _Batch) -> None:
    """Plan the pages that this chunk makes final."""
    request = chunk.request
    if request.node is not node:
        raise LocalProtocolError(f"request {request.request_id!r} came to another messenger; announce its chunks there")
    if request.offered:
        raise LocalProtocolError(f"request {request.request_id!r} has not been accepted: call accept() first")
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
        request.cursors[span.group].add_source(span.first_token, page_indices(span.pages))
    transfers = list(_transfers(chunk))
    request.num_transfers += len(transfers)
    request.last_armed = chunk.last
    imm = immediate.base(request.dispatch.slot, request.dispatch.generation)
    for template, pairs, edges in transfers:
        batch.add((request.peer.link, template, imm, request.tag, chunk.ready), pairs, edges)


def _transfers(chunk: Chunk) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint64]]]:
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
