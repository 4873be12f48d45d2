"""The prefiller of these tests: a toy engine that prefills several requests at once, chunk by chunk, layer by layer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmsgr import Chunk, PrefillRequest, Span

from .cache import DESTINATION_OWNER, LAYERS, PAGE_TOKENS, RUN, SOURCE_OWNER
from .role import Role, tell

CHUNK = RUN * PAGE_TOKENS
BATCH = 4
LAYER_S = 0.001  # that the device computes a layer


@dataclass
class Job:
    """A request that is prefilled. `hold` names the point at which its forward waits until it is cancelled."""

    request: PrefillRequest
    tag: int
    hold: str | None
    pages: list[int] = field(default_factory=list)
    start: int = 0
    released: bool = False

    @property
    def stop(self) -> int:
        return min(self.start + CHUNK, self.request.num_positions)

    @property
    def last(self) -> bool:
        return self.stop == self.request.num_positions

    def chunk(self) -> Chunk:
        pages = self.pages[self.start // PAGE_TOKENS : -(-self.stop // PAGE_TOKENS)]
        return Chunk(self.request, self.start, self.stop, [Span(0, self.start, pages)])


class Prefiller(Role):
    """Tells of each request "accepted", "held" where it was asked to, "released" when its source pages came back, and
    "outcome"."""

    next_owner, foreign_owner = SOURCE_OWNER, DESTINATION_OWNER

    def opened(self) -> None:
        self._running: list[Job] = []
        self._changed = asyncio.Condition()
        self.spawn(self._listen())
        self.spawn(self._run())

    async def _listen(self) -> None:
        async for request in self.messenger.requests():
            self.spawn(self._serve(request, **json.loads(request.payload)))

    async def _serve(
        self, request: PrefillRequest, tag: int, hold: str | None = None, hit: bool = False, queue_s: float = 0.0
    ) -> None:
        request.accept()
        tell("accepted", id=request.request_id)
        job = Job(request, tag, hold)
        await self._hold(job, "accepted")
        if queue_s:
            await asyncio.sleep(queue_s)  # the engine is busy with others for so long
        num_pages = -(-request.num_positions // PAGE_TOKENS)
        async with self._changed:
            await self._changed.wait_for(lambda: request.ended or self.cache.has_room(num_pages))
            if not request.ended:
                job.pages = self.cache.take(num_pages)
                self.cache.clear(job.pages)
                if hit:
                    self._hit_prefix(job)
                self._running.append(job)
                self._changed.notify_all()
        rows = await request.released()
        self.cache.came_back(job.pages)
        job.released = True
        tell("released", id=request.request_id, rows=rows)
        outcome = await request.outcome()
        tell("outcome", id=request.request_id, ok=outcome.ok, reason=str(outcome.reason), detail=outcome.detail)
        async with self._changed:
            if outcome.ok:
                self.cache.give(job.pages)
            else:
                self.cache.keep(job.pages)
            self._changed.notify_all()

    def _hit_prefix(self, job: Job) -> None:
        """All but the last chunk has been computed before: it goes in one burst."""
        last_start = (job.request.num_positions - 1) // CHUNK * CHUNK
        if last_start > 0:
            for layer in range(LAYERS):
                self.cache.put(job.tag, layer, job.pages, 0, last_start)
            span = Span(0, 0, job.pages[: last_start // PAGE_TOKENS])
            self.messenger.begin_step([Chunk(job.request, 0, last_start, [span], ready=True)])
            job.start = last_start

    async def _run(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._running)
                batch, self._running = self._running[:BATCH], self._running[BATCH:]
            await self._forward(batch)
            for job in batch:
                job.start = job.stop
            self._running += [job for job in batch if job.start < job.request.num_positions and not job.request.ended]

    async def _forward(self, batch: list[Job]) -> None:
        step = self.messenger.begin_step([job.chunk() for job in batch])
        for job in batch:
            await self._hold(job, "allocated")
        step.signal.start()
        for layer in range(LAYERS):
            for job in batch:
                if not job.released:  # its pages belong to somebody else now
                    self.cache.put(job.tag, layer, job.pages, job.start, job.stop)
            step.signal.bump()
            await asyncio.sleep(LAYER_S)  # the device computes, and the host is free
            for job in batch:
                await self._hold(job, "first layer sent", lambda job=job: self._rows_posted(job) > 0)
        for job in batch:
            if job.last:
                rows = self.cache.num_rows(job.request.num_positions)
                rows -= self.cache.context_units
                await self._hold(job, "last chunk sent", lambda job=job, rows=rows: self._rows_posted(job) == rows)
        if step.signals_context:
            for job in batch:
                for views in job.request.contexts.values() if job.last and job.request.context_slot >= 0 else ():
                    views["hidden"][:] = job.tag & 0x7F
            step.signal.bump()
        for job in batch:
            if job.last:
                rows = self.cache.num_rows(job.request.num_positions)
                await self._hold(job, "context sent", lambda job=job, rows=rows: self._rows_posted(job) == rows)

    def _rows_posted(self, job: Job) -> int:
        return self.messenger._node.fabric.state.leg_rows_posted(job.request.tag)

    async def _hold(self, job: Job, point: str, reached: Callable[[], bool] = lambda: True) -> None:
        """Where the request asks for it: wait here until there is no use in going on."""
        if job.hold != point:
            return
        while not reached():
            if job.request.ended:
                self.problem(f"{job.request.request_id} ended before {point!r}")
                return
            await asyncio.sleep(0)
        job.hold = None
        tell("held", id=job.request.request_id, point=point, rows=self._rows_posted(job))
        await job.request.cancelled()
