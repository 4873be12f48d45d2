"""A request on its way here, as the decoder's engine sees it: one attempt after another, and one end."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from kvmsgr.core.failure import Failure
from kvmsgr.errors import BusyError, FabricStuckError, PagesQuarantined, transfer_error
from kvmsgr_protocol import Dispatch, Reason

from .answers import as_text, log_failure
from .arrival import Arrival

if TYPE_CHECKING:
    from .node import Node
    from .peer import PeerDriver

log = structlog.get_logger("kvmsgr")
RECORD_S = 0.05
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0  # before a peer that has ended two attempts is asked again
FENCE_S = 1.0  # that a fence takes, at most, once the lease is over


class Fetch:
    """One request on its way here. Await it for its `Arrival`; `released` tells when its pages are free.

    A prefiller may take its pages back (`PrefillRequest.preempt`). Once it is proven that nothing more of that attempt
    can land, the request is sent again, for the same pages and in the time that is left, and once more where it is
    busy then, at longer and longer intervals; awaiting it goes on.

    Attributes:
        request_id: As the engine named it.
        num_restarts: How often a prefiller has taken its pages back.
    """

    def __init__(self, node: Node, peers: Sequence[PeerDriver], dispatch: Dispatch) -> None:
        """`dispatch` is of all legs together, and of no attempt yet. Raises BusyError: there is no slot for one."""
        self.request_id = dispatch.request_id
        self.num_restarts = 0
        self._node = node
        self._dispatch = dispatch
        self._context_slot = dispatch.context_slot
        self._pause_s = 0.0  # before the next attempt; each one waits longer
        self._arrived = False
        self._arrival: asyncio.Future[Arrival] = node.loop.create_future()
        self._released: asyncio.Future[None] = node.loop.create_future()
        self._attempt = node.outbox.new_attempt(self, peers, dispatch)
        self._deadline_s = node.loop.time() + dispatch.time_allowed_s
        self._expiry = node.loop.call_at(self._deadline_s, self._expire)

    # The engine's side

    def __await__(self) -> Generator[object, None, Arrival]:
        return asyncio.shield(self._arrival).__await__()

    def cancel(self, why: str = "the engine no longer wants it") -> None:
        """Stop it: awaiting it raises `RequestCancelledError`, and its peers are told to stop. Idempotent, and without
        effect once the request is decided. The pages stay in quarantine until `released()`."""
        self._attempt.cancel(as_text(why))

    async def released(self) -> None:
        """Wait until it is proven that no write can land in the destination pages any more. Does not raise because the
        transfer failed.

        The proof: every row was counted; or each peer has said how many rows it posted and as many were counted; or the
        endpoint it wrote to is closed. A silent peer is lost after `Config.lease_s`, and its endpoint closed then.

        Raises:
            FabricStuckError: The messenger was closed, and its endpoints could not be: never use these pages again.
        """
        await asyncio.shield(self._released)

    @property
    def quarantine(self) -> str | None:
        """Why the pages of a request that is over are still held; None when they are not."""
        return self._attempt.quarantine

    @property
    def done(self) -> bool:
        """Whether it is decided; its pages may still be held."""
        return self._attempt.done

    @property
    def attempt(self) -> int:
        """Number of the attempt that is under way, or was the last."""
        return self._attempt.number

    @property
    def rows_landed(self) -> int:
        """Rows of this attempt that have landed so far: a restart begins at 0 again."""
        return self._attempt.rows_landed

    async def __aenter__(self) -> Fetch:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Cancel it if it is under way, and wait for its pages, as long as any proof can take: a peer may need
        `drain_timeout_s` to answer, and is lost then; a silent one is when its lease ends.

        Raises:
            PagesQuarantined: No proof has come; the messenger holds the pages on, and `released()` says when they are
                free. A cancelled task is not kept from ending: then this is only logged.
        """
        self.cancel("its block was left")
        config = self._node.config
        leases_s = config.lease_s * (2 if self._node.fabric.rotates else 1)  # one to lose it, one for others to move
        await asyncio.wait([self._released], timeout=max(leases_s, config.drain_timeout_s) + FENCE_S)
        if self._released.done():
            return
        quarantined = PagesQuarantined(self.request_id, self.quarantine or "")
        log.warning("pages quarantined", request_id=self.request_id, detail=str(quarantined))
        if kind is not asyncio.CancelledError:
            raise quarantined

    # What comes in

    def start(self) -> None:
        """Everything is armed: go."""
        self._attempt.start()

    def _expire(self) -> None:
        if self._attempt.is_complete:
            self._expiry = self._node.loop.call_later(RECORD_S, self._expire)
        else:
            self._attempt.expire(self._dispatch.time_allowed_s)

    def arrived(self, rows: int) -> None:
        """Every row has landed."""
        self._expiry.cancel()
        self._arrived = True
        self._arrival.set_result(self._make_arrival(rows))

    def failed(self, failure: Failure) -> None:
        """Nothing more will come of it."""
        self._expiry.cancel()
        error = transfer_error(
            self.request_id, failure.reason, failure.detail, failure.rows, failure.rows_expected, failure.retry_after_s
        )
        self._arrival.set_exception(error)
        self._arrival.exception()  # it may never be awaited; the log has said it

    def start_over(self, peers: Sequence[PeerDriver], failure: Failure) -> None:
        """Nothing of the last attempt can land any more. It has given its slots back, and the pages, and with them the
        context slot, wait for the next one. `failure`: why the last one ended."""
        pause_s = self._pause_s if failure.retry_after_s is None else failure.retry_after_s
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        left_s = max(0.0, self._deadline_s - self._node.loop.time() - pause_s)
        log.info("request starts over", request_id=self.request_id, after=failure.detail, left_s=round(left_s, 3))
        try:
            self._attempt = self._node.outbox.new_attempt(self, peers, replace(self._dispatch, time_allowed_s=left_s))
        except BusyError as error:
            failure = Failure(Reason.busy, error.detail)
            log_failure(self.request_id, failure)
            self.failed(failure)
            self.pages_free()
            return
        self.num_restarts += failure.reason is not Reason.busy
        self._attempt.start(pause_s)

    def pages_free(self) -> None:
        """No write can land in the destination pages any more."""
        self._node.outbox.release_pages(self._dispatch.ranks)
        if not self._arrived:
            self.release_context()
        self._released.set_result(None)

    def never_released(self, error: FabricStuckError) -> None:
        """The fabric cannot be closed: no proof will ever come."""
        if not self._released.done():
            self._released.set_exception(error)
            self._released.exception()  # it may never be awaited; closing the messenger has said it

    def release_context(self) -> None:
        slot, self._context_slot = self._context_slot, -1
        if slot >= 0:
            self._node.context_slots.give(slot)

    def _make_arrival(self, rows: int) -> Arrival:
        ranks, slot = self._node.memory.ranks, self._context_slot
        targets = self._dispatch.ranks
        contexts = {target.rank: ranks[target.rank].context_views(slot) for target in targets} if slot >= 0 else {}
        return Arrival(self._dispatch.num_tokens - 1, rows, contexts, slot, self)
