"""Drives one request on the prefiller: what was asked, which pages have been planned, what is still being read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from kvmsgr.core import serve as core
from kvmsgr.core.failure import Failure
from kvmsgr.errors import ConfigError, ContextReleasedError, FabricStuckError, LocalProtocolError
from kvmsgr_protocol import Accept, Cancel, Dispatch, Drained, Failed, Finished, Message, Reason, Restarted, Sent

from .answers import as_text, declined, failed, log_failure
from .arrival import Contexts, first_of_each
from .delivery import Delivery
from .orders import Orders

if TYPE_CHECKING:
    from .node import Node
    from .peer import PeerDriver
    from .steps import Step

log = structlog.get_logger("kvmsgr")
COUNT_S = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request at its decoder.

    Args:
        ok: Every row arrived.
        rows_posted: Rows that this side posted.
        reason: Why it failed; None when it did not.
        detail: The same in words.
    """

    ok: bool
    rows_posted: int
    reason: Reason | None = None
    detail: str = ""


class PrefillRequest:
    """One request to prefill.

    Attributes:
        request_id: As the decoder named it.
        num_tokens: Length of the prompt. Its last token is not prefilled: chunks stop at `num_tokens - 1`.
        tokens: The prompt, uint32, shape (num_tokens,); empty where the decoder did not send it.
        payload: Opaque bytes from the decoder's engine.
        trace: Trace context from it.
        context_slot: The slot of its context, in every context buffer; -1: none is wanted, or the request is over and
            has given it back. It is held until the steps that compute the request have shown all their signals, and
            while `send_context` is due.
    """

    def __init__(
        self,
        node: Node,
        peer: PeerDriver,
        dispatch: Dispatch,
        delivery: Delivery,
        tag: int,
        context_slot: int,
    ) -> None:
        self.request_id = dispatch.request_id
        self.num_tokens = dispatch.num_tokens
        self.tokens: npt.NDArray[np.uint32] = np.frombuffer(dispatch.tokens, dtype="<u4")
        self.payload = dispatch.payload
        self.trace = dispatch.trace
        self.peer = peer
        self.tag = tag
        self.dispatch = dispatch
        self.delivery = delivery
        self.ranks: tuple[int, ...] = ()  # of ours, that hold it
        self.context_slot = context_slot
        self.next_position = 0
        self.num_transfers = 0
        self.last_armed = self.num_positions == 0  # and its context
        self.context_due = False  # the last chunk was announced, and `send_context` is to follow
        self.given_up = False  # by the engine: `send_context` does not follow, even if chunks are announced yet
        self.node = node
        self.open_steps: list[Step] = []  # that compute it and are not over
        self.spoiled = False  # a step of it was given up halfway, which its end is about to follow
        self._num_ended = 0
        self._rows = 0
        self._machine = core.Serve(dispatch.request_id)
        self._outcome: asyncio.Future[Outcome] = node.loop.create_future()
        self._released: asyncio.Future[int] = node.loop.create_future()
        self._failure: Failure | None = None
        self._settled = False
        self._deadline = node.loop.time() + dispatch.time_allowed_s
        self._expiry = node.loop.call_at(self._deadline, self._expire)

    # The engine's side

    @property
    def num_positions(self) -> int:
        """Positions to prefill."""
        return self.num_tokens - 1

    @property
    def wants_context(self) -> bool:
        """Whether the decoder wants the context buffers; see `Step.signals_context`."""
        return self.dispatch.context_slot >= 0

    @property
    def contexts(self) -> Contexts:
        """For each rank, the name of each of its context buffers to the bytes that the engine fills, shape
        (slot bytes,). Empty when none is wanted. Write them only while `context_slot` is held, see there.

        Raises:
            ContextReleasedError: The request is over, and the slot may be another's.
        """
        slot = self.context_slot
        if not self.wants_context:
            return {}
        if slot < 0:
            raise ContextReleasedError(self.request_id, "it is over; where context_slot is -1 nothing is to be written")
        return {number: rank.context_views(slot) for number, rank in enumerate(self.node.memory.ranks)}

    @property
    def context(self) -> Mapping[str, npt.NDArray[np.uint8]]:
        """`contexts` of the first rank that has each buffer."""
        return first_of_each(self.contexts)

    @property
    def offered(self) -> bool:
        """Whether the engine has not answered yet."""
        return self._machine.state is core.ServeState.offered

    @property
    def ended(self) -> bool:
        """Whether the request is over, well or not: chunks of it move nothing any more."""
        return self._machine.state in (core.ServeState.stopping, core.ServeState.ended)

    @property
    def may_move(self) -> bool:
        """Whether something of it may still be armed: it is not over, and both its peer and its ranks live."""
        over = self.ended or self.spoiled
        return not over and bool(self.peer.open_links) and self.node.lost_ranks.keys().isdisjoint(self.ranks)

    @property
    def unwanted(self) -> bool:
        """Whether it has failed, on either side."""
        return self._failure is not None

    def accept(self, ranks: Sequence[int] | None = None) -> None:
        """Take the request: chunks of it may be announced. Does nothing when the request is over already.

        Args:
            ranks: Those of this messenger's ranks that hold its KV: with data-parallel attention one of them; None:
                all. What several of them hold alike is sent by one of these, so that all share the load.

        Raises:
            ConfigError: There is no such rank.
            LayoutMismatchError: These ranks do not hold all that was asked for. The request is still to be answered.
            LocalProtocolError: It was accepted before; likewise of `refuse` and `busy`, where `fail` is meant.
        """
        known = range(len(self.node.memory.ranks))
        chosen = tuple(known if ranks is None else ranks)
        if not chosen or not set(chosen) <= set(known):
            needed = f"needed are some of {list(known)}"
            raise ConfigError(f"request {self.request_id!r} accepted with ranks {list(chosen)}; {needed}")
        if self.offered:
            for rank in chosen:
                if rank in self.node.lost_ranks:
                    self.rank_lost(self.node.rank_failure(rank))
                    return
            self.delivery.choose(chosen, self.node.balance)
            self.ranks = chosen
        self._answer(core.EngineAccepted())
        self.check_completed()

    def refuse(self, reason: str) -> None:
        """Say that the request will not be served here."""
        self._answer(core.EngineDeclined(Failure(Reason.refused, as_text(reason))))

    def busy(self, reason: str, retry_after_s: float | None = None) -> None:
        """Say that the request cannot be served now.

        Raises:
            ConfigError: `retry_after_s` is no duration.
        """
        if retry_after_s is not None and not 0 <= retry_after_s <= 1e9:
            raise ConfigError(f"retry_after_s is {retry_after_s}; a number of seconds, or None, is needed")
        self._answer(core.EngineDeclined(Failure(Reason.busy, as_text(reason), retry_after_s=retry_after_s)))

    def _answer(self, event: core.EngineAccepted | core.EngineDeclined) -> None:
        if self._machine.state not in (core.ServeState.offered, core.ServeState.ended):
            raise LocalProtocolError(f"request {self.request_id!r} was accepted before; to give it up, call fail()")
        self._feed(event)

    def fail(self, reason: str) -> None:
        """Give the request up, at any time. What is posted already may still be read; see `released`. A `send_context`
        that was due is not any more: the context buffers are written by nobody but steps that were announced."""
        self.failed(Reason.engine, as_text(reason))
        self._give_up_context()

    def _give_up_context(self) -> None:
        """The engine will not send it any more."""
        with self.node.lock:  # an engine's thread may be about to announce the last chunk
            self.given_up, self.context_due = True, False
        self.release_context_slot()

    def send_context(self) -> None:
        """Send the context buffers, which hold their final values now. Due once, and from any thread, after the last
        chunk was announced with `Chunk.context_later`. It is due even if the request ends meanwhile: then nothing is
        sent, and the context slot, which was held until now, is given back.

        Raises:
            LocalProtocolError: No context is wanted, the last chunk was not announced, or its context is sent already.
            StepLimitError: As `Messenger.begin_step`. Nothing was sent.
        """
        node = self.node
        with node.lock:
            if node.closing:
                return
            if self._context_is_due():
                if self.may_move:
                    self._arm_context()
                self.context_due = False
        node.loop.call_soon_threadsafe(self._context_sent)

    def _context_is_due(self) -> bool:
        """Raises LocalProtocolError where it never was, or is not any more; but for a request that is over."""
        if not self.wants_context:
            why = "no context is wanted; `wants_context` says whether it is"
        elif self.context_due or self.ended:
            return self.context_due
        elif self.next_position < self.num_positions:
            why = (
                f"its chunks are announced up to {self.next_position} of {self.num_positions}; the last one comes first"
            )
        else:
            why = "it was sent, or goes with its last chunk; to send it later, announce that chunk with context_later"
        raise LocalProtocolError(f"send_context of request {self.request_id!r}: {why}")

    def _arm_context(self) -> None:
        orders, parts = Orders(), [(counter, 0) for counter in range(len(self.node.memory.num_signals))]
        orders.add_context(self, ready=True)
        self.node.fabric.begin_step(parts, *orders.arrays(), int(self.node.config.step_timeout_s * 1e9))
        self.num_transfers += len(orders)
        self.last_armed = True

    def _context_sent(self) -> None:
        self.check_completed()
        self.release_context_slot()

    async def preempt(self) -> int:
        """Take the pages back, because others need them more: nothing more of the request is posted, and nothing reads
        its pages when this returns. Chunks that were announced move nothing any more; their steps go on for the others.

        The decoder is told, and asks again by itself: the request comes back through `requests()`, as a new one of the
        same id. It does not where the decoder has given it up meanwhile, or has counted every row. `outcome()` of this
        one is `Reason.preempted`, then too. To have the decoder give it up, call `fail`. Where every row was posted
        already this only waits, for the pages would not come back any sooner; what is over stays as it is.

        A `send_context` that was due is not any more, as with `fail`. The context slot is held until the steps that
        were announced have shown all their signals; the request comes back when there is one for it.

        Returns:
            Rows that were posted.

        Raises:
            LocalProtocolError: It has not been accepted; answer it by `busy` or `refuse`.
            FabricStuckError: As from `released`.
        """
        if self.offered:
            raise LocalProtocolError(f"request {self.request_id!r} was not accepted: to put it off, call busy()")
        expected, posted = self.dispatch.expected_rows, self.node.fabric.state.leg_rows_posted(self.tag)
        if not (self.last_armed and posted == expected):
            detail = "the prefiller's engine took its pages back"
            self._feed(core.Preempted(Failure(Reason.preempted, detail, self._rows, expected)))
            self._give_up_context()
        return await self.released()

    async def cancelled(self) -> Reason | None:
        """Wait until there is no use in computing it any more: its decoder cancelled or failed it, or is lost, or this
        side failed it. Returns why; None when the request came to a good end instead."""
        return (await self.outcome()).reason

    async def released(self) -> int:
        """Wait until nothing reads the source pages any more; returns the rows posted.

        That is when every posted write is locally complete, or the endpoint it was posted on is closed.

        Raises:
            FabricStuckError: The messenger was closed, and its endpoints could not be: never use these pages again.
        """
        return await asyncio.shield(self._released)

    async def outcome(self) -> Outcome:
        """Wait for what became of the request at its decoder. Never raises for a failed transfer."""
        return await asyncio.shield(self._outcome)

    # What comes in

    def message_received(self, message: Message) -> None:
        match message:
            case Finished(rows=rows):
                self._finished(rows)
            case Failed(code=code, reason=detail):
                self._feed(core.DecoderFailed(Failure(code, f"{self.peer.name} failed: {detail}")))
            case Cancel(code=code, reason=detail):
                self._feed(core.DecoderFailed(Failure(code, f"{self.peer.name} cancelled: {detail}")))

    def _finished(self, rows: int, late: bool = False) -> None:
        """All rows can have landed only if all were posted. The poller counts a write when it is on its way already, so
        it may be a moment behind the decoder."""
        if self._machine.state is core.ServeState.ended:
            return  # its peer was lost while we waited for our own count
        expected, posted = self.dispatch.expected_rows, self.node.fabric.state.leg_rows_posted(self.tag)
        if self.ended or rows == expected == posted:
            self._feed(core.DecoderFinished())
        elif rows == expected and not late:
            self.node.loop.call_later(COUNT_S, self._finished, rows, True)
        else:
            detail = f"Finished with {rows} of {expected} rows for request {self.request_id!r}: {posted} were posted"
            self.peer.lose(Failure(Reason.protocol, detail, posted, expected))

    def transfer_ended(self, rows: int) -> None:
        """One of our transfers is locally complete, or was stopped after `rows`."""
        self._num_ended += 1
        self._rows += rows
        self.check_completed()

    def check_completed(self) -> None:
        """Every read over? Then either all is sent, or what failed has drained."""
        if self._num_ended != self.num_transfers:
            return
        state, sound = self._machine.state, self.peer.link_failure is None  # what a failed link has stopped is not sent
        if state is core.ServeState.stopping:
            self._feed(core.ReadsEnded(self._rows))
        elif self.last_armed and sound and state in (core.ServeState.accepted, core.ServeState.arrived):
            self._feed(core.WritesCompleted(self._rows))

    def release_context_slot(self) -> None:
        """Give the slot back, unless it may still be written: by a step that computes a request which has failed, or
        before a `send_context` that is due."""
        with self.node.lock:  # an engine's thread may be announcing a step
            posted = self.last_armed and self._rows == self.dispatch.expected_rows
            written = posted or (not self.context_due and all(step.shown for step in self.open_steps))
            if self.context_slot < 0 or not self._released.done() or not written:
                return
            slot, self.context_slot = self.context_slot, -1
        self.node.context_slots.give(slot)

    def never_released(self, error: FabricStuckError) -> None:
        """The fabric cannot be closed: it may read the source pages for ever."""
        if not self._released.done():
            self._released.set_exception(error)
            self._released.exception()  # it may never be awaited; closing the messenger has said it

    def failed(self, reason: Reason, detail: str) -> None:
        self._feed(core.Failed(Failure(reason, detail, self._rows, self.dispatch.expected_rows)))

    def peer_lost(self, failure: Failure) -> None:
        self._feed(core.PeerEnded(failure))

    def rank_lost(self, failure: Failure) -> None:
        """A rank that holds it is lost."""
        self.failed(failure.reason, failure.detail)

    def _expire(self) -> None:
        self.failed(Reason.timeout, f"not prefilled within the {self.dispatch.time_allowed_s:g} s allowed")

    def _never_answered(self) -> None:
        detail = f"{self.peer.name} has not said what became of it, long after the time allowed"
        self._feed(core.NeverAnswered(Failure(Reason.timeout, detail, self._rows, self.dispatch.expected_rows)))

    # What follows from it

    def _feed(self, event: object) -> None:
        for effect in self._machine.feed(event):
            self._carry_out(effect)
        self.show()

    def show(self) -> None:
        """Show in the state file where the request stands."""
        if self._machine.state is core.ServeState.ended:
            return
        held = 0 if self._released.done() else self.delivery.num_sources
        failure = self._failure
        self.node.ledger.update(
            self.tag,
            str(self._machine.state),
            held,
            str(failure.reason) if failure else "",
            failure.detail if failure else "",
        )

    def _carry_out(self, effect: object) -> None:
        leg = self.request_id, self.dispatch.attempt
        match effect:
            case core.SendAccept():
                self.peer.send(Accept(*leg))
            case core.SendDecline(failure):
                self.peer.send(declined(self.dispatch, failure))
            case core.SendSent(rows):
                self.peer.send(Sent(*leg, rows_posted=rows))
            case core.SendFailure(failure):
                self.peer.send(failed(*leg, failure))
            case core.SendRestarted():
                self.peer.send(Restarted(*leg))
            case core.SendDrained(rows):
                self.peer.send(Drained(*leg, rows_posted=rows))
            case core.StopWrites():
                self.node.stop_writes(self)
                self.check_completed()
            case core.SettleOutcome(failure):
                self._failure, self._settled = failure, True
                if failure is not None:
                    log_failure(self.request_id, failure)
            case core.ReleasePages(rows):
                self._expiry.cancel()
                patience_s = self.node.config.drain_timeout_s
                self._expiry = self.node.loop.call_at(self._deadline + patience_s, self._never_answered)
                log.info("source pages released", request_id=self.request_id, rows=rows)
                _resolve(self._released, rows)
                self.release_context_slot()
            case core.Forget():
                self._expiry.cancel()
                self.node.inbox.forget(self)
        if self._settled:
            self._resolve_outcome()

    def _resolve_outcome(self) -> None:
        failure = self._failure
        if failure is None:
            _resolve(self._outcome, Outcome(True, self.dispatch.expected_rows))
        else:
            posted = self.node.fabric.state.leg_rows_posted(self.tag)
            _resolve(self._outcome, Outcome(False, posted, failure.reason, failure.detail))


_T = TypeVar("_T")


def _resolve(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)
