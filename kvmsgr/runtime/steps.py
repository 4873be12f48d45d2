"""From chunks to armed writes: one call before each forward pass, from any thread, in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvmsgr.device.counters import Signal
from kvmsgr.errors import ConfigError, LayoutError, LocalProtocolError, MessengerClosedError
from kvmsgr.types import Span
from kvmsgr_protocol import Reason

from .orders import Orders
from .serve import PrefillRequest

if TYPE_CHECKING:
    from .node import Node


@dataclass(frozen=True, slots=True)
class Chunk:
    """A token range of one request that one step computes.

    Args:
        request: The request.
        start, stop: Positions [start, stop). Chunks of a request follow each other; the last one stops at
            `request.num_tokens - 1`.
        spans: The source pages that hold these positions. Pages that were named before need not be named again.
        ready: The pages hold their final values already: they are sent at once, and so is the context of a last chunk.
            Or the step, announced before, that computes them for another request: they go layer by layer as it signals.
            Such chunks are announced in a call of their own, all with the same step, and are chunks of that step from
            then on. What of it is over and complete is as if ready.
        context_later: Of a last chunk: its step does not release the context buffers, `PrefillRequest.send_context`
            does, when they are written.
    """

    request: PrefillRequest
    start: int
    stop: int
    spans: Sequence[Span]
    ready: bool | Step = False
    context_later: bool = False

    @property
    def last(self) -> bool:
        """Whether the chunk is its request's last."""
        return self.stop == self.request.num_positions

    @property
    def brings_context(self) -> bool:
        """Whether the context goes with it: released by its step, or at once where it is ready. Not that of a request
        that was over before, and has given its context slot back."""
        return self.last and not self.context_later and self.request.context_slot >= 0


class Step:
    """One announced forward pass.

    Attributes:
        signals: What the forward does on each layer counter, one for all ranks or one a rank: `start()` before it,
            `bump()` after each layer.
        chunks: What it computes.
        signals_context: Whether one more bump of each is due after the context buffers were written, because a chunk is
            its request's last and its context is not sent later. It holds even if that request ends in the meantime.
        tickets: Its number on each counter; 0 for a step that moves nothing.
    """

    def __init__(self, node: Node, chunks: Sequence[Chunk], stream: int, marks: Sequence[_Mark] = ()) -> None:
        """`marks`: where the requests of the chunks stood before."""
        waits = [chunk for chunk in chunks if not chunk.ready]
        num_signals = node.memory.num_signals
        first = stream * len(num_signals)
        self.chunks = tuple(waits)
        self.counters = range(first, first + len(num_signals))
        self.tickets = [0] * len(num_signals)
        self.signals = [Signal(node.counters[counter], 0) for counter in self.counters]
        self.signals_context = any(chunk.brings_context for chunk in waits)
        self._num_bumps = [num + self.signals_context if waits else 0 for num in num_signals]
        for rank in node.lost_ranks if len(num_signals) > 1 else ():
            self._num_bumps[rank] = 0  # the native layer is done with that part at once
        self._node = node
        self._members = self.chunks  # and those that have joined it
        self._marks = [mark for mark, chunk in zip(marks, chunks, strict=True) if not chunk.ready]
        self._broken: set[int] = set()  # its parts that were not complete when they were over

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

    @property
    def unwanted(self) -> bool:
        """Whether every request that goes with it is over."""
        return all(chunk.request.ended for chunk in self._members)

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
    def shown(self) -> bool:
        """Whether it has shown all it will show, so that it writes no context any more. It is over only when the next
        step starts, or with its time."""
        return all(signal.num_bumps >= num for signal, num in zip(self.signals, self._num_bumps, strict=True))

    # Under the lock

    def armed(self, tickets: Sequence[int]) -> None:
        """The native layer has it."""
        self.tickets = list(tickets)
        self.signals = [
            Signal(self._node.counters[counter], ticket, num + self.signals_context)
            for counter, ticket, num in zip(self.counters, tickets, self._node.memory.num_signals, strict=True)
        ]
        for key in zip(self.counters, tickets, strict=True):
            self._node.steps[key] = self
        for chunk in self.chunks:
            chunk.request.open_steps.append(self)

    def check_joinable(self, node: Node, chunks: Sequence[Chunk]) -> None:
        """Raises LocalProtocolError where its layers cannot release pages of these chunks."""
        why = None
        if self._node is not node:
            why = "is a step of another messenger"
        elif not any(self.tickets):
            why = "moves nothing, so that its layers are not seen; announce the pages with ready=True when it has run"
        elif any(len(self.signals) == 1 or part in chunk.request.ranks for chunk in chunks for part in self._broken):
            why = "failed or was abandoned: what it should have computed is not final; have it computed by another"
        if why is not None:
            raise LocalProtocolError(f"step {self.ticket}, named by `ready` of chunks that it computes, {why}")
        for chunk in chunks:
            if chunk.last and chunk.request.wants_context and not chunk.context_later:
                raise LocalProtocolError(
                    f"request {chunk.request.request_id!r}: step {self.ticket} computes its last pages for another "
                    "request, and not its context: say context_later, and call send_context when that is written"
                )

    def joined(self, chunks: Sequence[Chunk], marks: Sequence[_Mark]) -> None:
        """The native layer has its pages wait for these layers too."""
        self._members += tuple(chunks)
        self._marks += marks
        for chunk in chunks:
            chunk.request.open_steps.append(self)

    @property
    def running(self) -> list[tuple[int, int]]:
        """(counter, ticket) of each counter on which it is not over."""
        return [key for key in zip(self.counters, self.tickets, strict=True) if self._node.steps.get(key) is self]

    def forget(self, part: int | None = None) -> None:
        """Take it off one of its counters, or all: what it has not released there it never will."""
        for counter, ticket in self.running:
            if part in (None, self.part_of(counter)):
                self.broke(counter, ticket)
                self._node.fabric.poller.abandon(counter, ticket)

    def spoil(self, part: int | None = None) -> None:
        """Nothing more is posted of the requests that `fail` is about to end."""
        for request in self._requests_of(part):
            request.spoiled = True
            self._node.drop_writes(request)

    def _requests_of(self, part: int | None) -> list[PrefillRequest]:
        requests = [chunk.request for chunk in self._members]
        return [request for request in requests if part is None or len(self.signals) == 1 or part in request.ranks]

    def broke(self, counter: int, ticket: int) -> None:
        """It is over on that counter, and was not complete."""
        del self._node.steps[counter, ticket]
        self._broken.add(self.part_of(counter))

    def abandon(self) -> None:
        """The forward will not run: nothing of this step is sent, and its chunks may be announced again.

        Call it instead of `signal.start()`. A step that has started cannot be taken back, for layers of it may be on
        their way: its requests fail, by name. A step that has shown all its signals, and one that moves nothing, are
        left as they are, and so is any once the messenger is closed. Chunks that were `ready` have gone when they were
        announced.

        Raises:
            LocalProtocolError: A later step of one of its requests was announced (abandon that one first), or pages
                that were ready, or its context was sent: a request that cannot be taken back is given up by `fail`.
        """
        node = self._node
        with node.lock:
            if node.closing or self.shown or not self.running:
                return
            started = self._started  # once: the forward may run in another process
            if not started:
                for mark in {mark.request: mark for mark in self._marks}.values():  # of each the newest
                    mark.check_newest(self)
                for mark in reversed(self._marks):
                    mark.restore()
            for chunk in self._members:
                chunk.request.last_armed = False  # what is stopped now must not look complete
            if started:
                self.spoil()  # now: a later step of them may run before the event loop does
            self.forget()
        if started:
            shown = zip(self.signals, self._num_bumps, strict=True)
            seen = ", ".join(f"{signal.num_bumps} of {num}" for signal, num in shown)
            which = f"step {self.ticket} of layer counter {self.counters.start}"
            detail = f"{which} was abandoned after {seen} layer signals"
            node.loop.call_soon_threadsafe(self.fail, detail)
        node.loop.call_soon_threadsafe(self.over)

    def fail(self, detail: str, part: int | None = None) -> None:
        """Fail the requests whose chunks go with it; `part`: only those of the ranks that bump this counter."""
        for request in self._requests_of(part):
            request.failed(Reason.step_fault, detail)

    def release_context_slots(self) -> None:
        """Give those back that were kept for it alone."""
        for chunk in self._members:
            chunk.request.release_context_slot()

    def over(self) -> None:
        """The forward computes nothing more."""
        with self._node.lock:  # an engine's thread may be announcing another step of the same requests
            for chunk in self._members:
                chunk.request.open_steps.remove(self)
        self.release_context_slots()
        for chunk in self._members:
            chunk.request.show()


class _Mark:
    """Where a request stood before a step, so that a step that is not armed, or abandoned, leaves no trace."""

    def __init__(self, chunk: Chunk) -> None:
        request = chunk.request
        self.request = request
        self._context_later = chunk.context_later and request.wants_context
        self._before = request.next_position
        self._last_armed, self._context_due = request.last_armed, request.context_due
        self._after = chunk.stop
        self._delivery = request.delivery.mark()

    def check_newest(self, step: Step) -> None:
        """Raises LocalProtocolError where the step cannot be abandoned. What was ready after it cannot be either, and
        is in the way only until the request is over."""
        request = self.request
        only_ready_after = request.ended and request.open_steps[-1] is step
        if request.next_position != self._after and not only_ready_after:
            raise LocalProtocolError(
                f"request {request.request_id!r}: the step up to position {self._after} cannot be abandoned, a later "
                f"one up to {request.next_position} was announced; abandon the later one first"
            )
        if self._context_later and not (request.context_due or request.ended):
            raise LocalProtocolError(
                f"request {request.request_id!r}: its last step cannot be abandoned, for send_context was called after "
                "it was announced; let it run, or give the request up by fail()"
            )

    def restore(self) -> None:
        request = self.request
        if request.next_position != self._after:
            return  # nothing was changed; or it is over, and stands where what was ready has left it
        request.next_position = self._before
        request.last_armed, request.context_due = self._last_armed, self._context_due
        request.delivery.restore(self._delivery)


def begin_step(node: Node, chunks: Sequence[Chunk], counter: int) -> Step:
    """Announce a step; see `Messenger.begin_step`."""
    num_streams = len(node.counters) // len(node.memory.num_signals)
    if not 0 <= counter < num_streams:
        raise ConfigError(f"layer counter {counter} does not exist; there are {num_streams}")
    owner = _owner(chunks)
    requests = [chunk.request for chunk in chunks]
    if len(set(requests)) < len(requests):
        raise LayoutError("a step has one chunk a request at most; announce pages that are ready by themselves")
    with node.lock:
        if node.closing:
            raise MessengerClosedError("the messenger is closed: no step can be announced")
        marks = [_Mark(chunk) for chunk in chunks]
        tallies = [request.num_transfers for request in requests]
        try:
            if owner is not None:
                return _join(node, list(chunks), counter, owner, marks)
            return _arm(node, list(chunks), counter, marks)
        except BaseException:
            for mark, request, num_transfers in zip(marks, requests, tallies, strict=True):
                mark.restore()
                request.num_transfers = num_transfers
            raise


def _owner(chunks: Sequence[Chunk]) -> Step | None:
    """The step that computes the pages of all these chunks for other requests."""
    for chunk in chunks:
        if not isinstance(chunk.ready, bool | Step):
            raise ConfigError(
                f"request {chunk.request.request_id!r}: ready of chunk [{chunk.start}, {chunk.stop}) is a "
                f"{type(chunk.ready).__name__}; it must be a bool, or the Step that computes the pages"
            )
    owners = [chunk.ready for chunk in chunks if isinstance(chunk.ready, Step)]
    if owners and (len(owners) < len(chunks) or len(set(owners)) > 1):
        raise LocalProtocolError(
            f"{len(owners)} of {len(chunks)} chunks name {len(set(owners))} steps that compute them: those of one are "
            "announced by a begin_step of their own, and those that name none by another"
        )
    return owners[0] if owners else None


def _join(node: Node, chunks: Sequence[Chunk], stream: int, owner: Step, marks: Sequence[_Mark]) -> Step:
    """Have chunks go with a step that was announced before."""
    owner.check_joinable(node, chunks)
    chunks = [replace(chunk, ready=True) for chunk in chunks]  # so that no step is held by itself
    if not owner.running:
        return _arm(node, chunks, stream, marks)
    orders = Orders()
    for chunk in chunks:
        _advance(node, chunk, orders, ready=False)
    if len(orders):
        node.fabric.join_step(list(zip(owner.counters, owner.tickets, strict=True)), *orders.arrays())
    owner.joined(chunks, marks)
    node.loop.call_soon_threadsafe(_announced, chunks)
    return Step(node, [], stream)


def _arm(node: Node, chunks: Sequence[Chunk], stream: int, marks: Sequence[_Mark]) -> Step:
    step, orders = Step(node, chunks, stream, marks), Orders()
    for chunk in chunks:
        _advance(node, chunk, orders, ready=bool(chunk.ready))
    if step.moves or len(orders):
        tickets = node.fabric.begin_step(step.parts, *orders.arrays(), int(node.config.step_timeout_s * 1e9))
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


def _advance(node: Node, chunk: Chunk, orders: Orders, ready: bool) -> None:
    """Plan the pages that this chunk makes final; `ready`: they wait for no layer."""
    request = chunk.request
    if request.node is not node:
        raise LocalProtocolError(f"request {request.request_id!r} came to another messenger; announce its chunks there")
    if request.offered:
        raise LocalProtocolError(f"request {request.request_id!r} has not been accepted: call accept() first")
    if not request.next_position == chunk.start < chunk.stop <= request.num_positions:
        expected = f"one that starts at {request.next_position} and stops at {request.num_positions} at the latest"
        if request.next_position == request.num_positions:
            expected = "none, for all were announced: the prompt's last token is the decoder's"
        elif chunk.start > request.next_position:
            expected += "; positions whose pages are there already are announced too, by ready=True"
        raise LayoutError(
            f"request {request.request_id!r}: chunk [{chunk.start}, {chunk.stop}) was announced, expected is {expected}"
        )
    if chunk.context_later and not chunk.last:
        raise LocalProtocolError(
            f"request {request.request_id!r}: context_later is said of chunk [{chunk.start}, {chunk.stop}), and "
            f"context goes with the last one, which stops at {request.num_positions}: say it there"
        )
    request.next_position = chunk.stop
    request.context_due = chunk.context_later and request.wants_context and not request.given_up
    if not request.may_move:
        return  # the engine runs the chunk with the others; nothing of it is wanted any more
    for span in chunk.spans:
        request.delivery.add_source(span)
    before = len(orders)
    orders.add_positions(request, chunk.stop, ready)
    if chunk.brings_context:
        orders.add_context(request, ready)
    request.num_transfers += len(orders) - before
    request.last_armed = chunk.last and not request.context_due
