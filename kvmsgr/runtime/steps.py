"""From chunks to armed writes: one call before each forward pass, from any thread, in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmsgr.device.counters import Signal
from kvmsgr.errors import ConfigError, LayoutError, LocalProtocolError, MessengerClosedError
from kvmsgr.layout import PageWrites, Template
from kvmsgr.types import Span
from kvmsgr_protocol import Reason, immediate

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


class _Batch:
    """What one native call arms; see `Poller.begin_step` for the columns of an order."""

    def __init__(self) -> None:
        self._orders: list[tuple[int, ...]] = []
        self._pages = [_NO_PAGES]
        self._edges = [_NO_EDGES]
        self._num_pages = self._num_edges = 0

    def __len__(self) -> int:
        return len(self._orders)

    def add_pages(self, pairs: npt.NDArray[np.int32]) -> int:
        """Returns where they begin. Several orders may share them."""
        start = self._num_pages
        self._pages.append(pairs)
        self._num_pages += len(pairs)
        return start

    def add_edges(self, edges: npt.NDArray[np.uint64]) -> int:
        start = self._num_edges
        self._edges.append(edges)
        self._num_edges += len(edges)
        return start

    def add(self, *order: int) -> None:
        self._orders.append(order)

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
        orders = np.array(self._orders, np.int64).reshape(-1, 10)
        return orders, np.concatenate(self._pages), np.concatenate(self._edges)


class Step:
    """One announced forward pass.

    Attributes:
        signals: What the forward does on each layer counter, one for all ranks or one a rank: `start()` before it,
            `bump()` after each layer.
        signals_context: Whether one more bump of each is due after the context buffers were written, because a chunk is
            its request's last and has context. It holds even if that request ends in the meantime.
        tickets: Its number on each counter; 0 for a step that moves nothing.
    """

    def __init__(self, node: Node, chunks: Sequence[Chunk], stream: int) -> None:
        waits = [chunk for chunk in chunks if not chunk.ready]
        num_signals = node.memory.num_signals
        first = stream * len(num_signals)
        self.chunks = waits
        self.counters = range(first, first + len(num_signals))
        self.tickets = [0] * len(num_signals)
        self.signals = [Signal(node.counters[counter], 0) for counter in self.counters]
        self.signals_context = any(chunk.last and chunk.request.wants_context for chunk in waits)
        self._num_bumps = [num + self.signals_context if waits else 0 for num in num_signals]
        for rank in node.lost_ranks if len(num_signals) > 1 else ():
            self._num_bumps[rank] = 0  # the native layer is done with that part at once
        self._node = node
        self._marks = [_Mark(chunk) for chunk in waits]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(counter, bumps) of each counter that it runs on."""
        return list(zip(self.counters, self._num_bumps, strict=True))

    @property
    def signal(self) -> Signal:
        """The one signal, where all ranks share a layer counter.

        Raises:
            LocalProtocolError: Each rank has its own.
        """
        if len(self.signals) > 1:
            raise LocalProtocolError(f"{len(self.signals)} ranks have a layer counter each: use signals[rank]")
        return self.signals[0]

    @property
    def ticket(self) -> int:
        """Its number, where all ranks share a layer counter."""
        return self.tickets[0]

    @property
    def moves(self) -> bool:
        """Whether its layers release anything."""
        return bool(self.chunks)

    def num_bumps_of(self, counter: int) -> int:
        """Bumps that it shows on one of its counters."""
        return self._num_bumps[counter - self.counters.start]

    def part_of(self, counter: int) -> int:
        """Which of its signals that is."""
        return counter - self.counters.start

    @property
    def _started(self) -> bool:
        return any(signal.started for signal in self.signals)

    @property
    def _shown(self) -> bool:
        """Whether it has shown all it will show."""
        return all(signal.num_bumps >= num for signal, num in zip(self.signals, self._num_bumps, strict=True))

    # Under the lock

    def armed(self, tickets: Sequence[int]) -> None:
        """The native layer has it."""
        self.tickets = list(tickets)
        self.signals = [
            Signal(self._node.counters[counter], ticket) for counter, ticket in zip(self.counters, tickets, strict=True)
        ]
        for key in zip(self.counters, tickets, strict=True):
            self._node.steps[key] = self
        for chunk in self.chunks:
            chunk.request.num_open_steps += 1

    @property
    def running(self) -> list[tuple[int, int]]:
        """(counter, ticket) of each counter on which it is not over."""
        return [key for key in zip(self.counters, self.tickets, strict=True) if self._node.steps.get(key) is self]

    def forget(self, part: int | None = None) -> None:
        """Take it off one of its counters, or all: what it has not released there it never will."""
        for counter, ticket in self.running:
            if part in (None, self.part_of(counter)):
                del self._node.steps[counter, ticket]
                self._node.fabric.poller.abandon(counter, ticket)

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
            if self._shown or not self.running:
                return
            if not self._started:
                for mark in self._marks:
                    mark.check_newest()
                for mark in self._marks:
                    mark.restore()
            for chunk in self.chunks:
                chunk.request.last_armed = False  # what is stopped now must not look complete
                chunk.request.spoiled |= self._started
            self.forget()
        if self._started:
            for chunk in self.chunks:
                node.stop_writes(chunk.request)  # now: a later step of it may run before the event loop does
            shown = zip(self.signals, self._num_bumps, strict=True)
            seen = ", ".join(f"{signal.num_bumps} of {num}" for signal, num in shown)
            which = f"step {self.ticket} of layer counter {self.counters.start}"
            detail = f"{which} was abandoned after {seen} layer signals"
            node.loop.call_soon_threadsafe(self.fail, detail)
        node.loop.call_soon_threadsafe(self.over)

    def fail(self, detail: str, part: int | None = None) -> None:
        """Fail the requests whose chunks it computes; `part`: only those of the ranks that bump this counter."""
        for chunk in self.chunks:
            if part is None or len(self.signals) == 1 or part in chunk.request.ranks:
                chunk.request.failed(Reason.step_fault, detail)

    def over(self) -> None:
        """The forward computes nothing more."""
        with self._node.lock:  # an engine's thread may be announcing another step of the same requests
            for chunk in self.chunks:
                chunk.request.num_open_steps -= 1
        for chunk in self.chunks:
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
        self._delivery = request.delivery.mark()

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
        request.delivery.restore(self._delivery)


def begin_step(node: Node, chunks: Sequence[Chunk], counter: int) -> Step:
    """Announce a step; see `Messenger.begin_step`."""
    num_streams = len(node.counters) // len(node.memory.num_signals)
    if not 0 <= counter < num_streams:
        raise ConfigError(f"layer counter {counter} does not exist; there are {num_streams}")
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


def _arm(node: Node, chunks: Sequence[Chunk], stream: int) -> Step:
    step, batch = Step(node, chunks, stream), _Batch()
    for chunk in chunks:
        _advance(node, chunk, batch)
    if step.moves or len(batch):
        tickets = node.fabric.begin_step(step.parts, *batch.arrays(), int(node.config.step_timeout_s * 1e9))
        if step.moves:
            step.armed(tickets)
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
    over = request.ended or request.spoiled
    if over or not request.peer.open_links or not node.lost_ranks.keys().isdisjoint(request.ranks):
        return  # the engine runs the chunk with the others; nothing of it is wanted any more
    for span in chunk.spans:
        request.delivery.add_source(span)
    before = len(batch)
    _order(chunk, batch)
    request.num_transfers += len(batch) - before
    request.last_armed = chunk.last


def _order(chunk: Chunk, batch: _Batch) -> None:
    """One transfer for each pair of ranks, template and rail; they share the list of pages."""
    request = chunk.request
    routes, dispatch = request.peer.routes, request.dispatch
    assert routes is not None
    how = immediate.base(dispatch.slot, dispatch.generation), request.tag, int(chunk.ready)

    for writes, templates in request.delivery.advance(chunk.stop):
        first, num = batch.add_pages(writes.pairs), len(writes.pairs)
        for source, (template, rails) in templates:
            edges = _edges(template, writes)
            first_edge = batch.add_edges(edges) if len(edges) else 0
            turn = request.node.turn()
            for place, (link, number) in enumerate(rails):  # each takes its share of the pages, one of them the edges
                share = (place + turn) % len(rails)
                start, stop = first + num * share // len(rails), first + num * (share + 1) // len(rails)
                last_edge = first_edge + len(edges) if share == len(rails) - 1 else first_edge
                if start < stop or first_edge < last_edge:
                    batch.add(routes.part_of(source), link, number, *how, start, stop, first_edge, last_edge)
    if chunk.last and request.wants_context:
        slot = batch.add_pages(np.array([[request.context_slot, dispatch.context_slot]], dtype=np.int32))
        for source, (_, rails) in request.delivery.context():
            for link, number in rails:
                batch.add(routes.part_of(source), link, number, *how, slot, slot + 1, 0, 0)


def _edges(template: Template, writes: PageWrites) -> npt.NDArray[np.uint64]:
    return np.concatenate([_NO_EDGES, *(template.edge_runs(*edge) for edge in writes.edges)])
