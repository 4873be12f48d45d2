"""T11: 200 requests by way of 4 context slots, late contexts, held writes, cancels: each gets its own record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

import kvmsgr
from kvmsgr import Chunk, Span
from kvmsgr.errors import BusyError, ContextReleasedError, RequestCancelledError

from .nodes import DIM, NET, Pair, pair, run, within

NUM_REQUESTS, NUM_SLOTS, NUM_AT_ONCE = 200, 4, 8
MOST_DELAY_S = 0.05
NUM_POSITIONS, PAGE_TOKENS = 4, 4


class Load:
    """A decoder's engine that asks for many things at once, and a prefiller's that takes its time with contexts."""

    def __init__(self, both: Pair, rng: Random) -> None:
        self.both, self.rng = both, rng
        self.arrived: set[int] = set()
        self.cancelled: set[int] = set()
        self.num_busy = 0
        self._left = iter(range(NUM_REQUESTS))
        self._news = asyncio.Condition()
        self._forward = asyncio.Lock()

    async def _delay(self) -> None:
        await asyncio.sleep(self.rng.random() * MOST_DELAY_S)

    async def _tell(self) -> None:
        """Something was released: whoever found no slot may try again."""
        async with self._news:
            self._news.notify_all()

    # The decoder

    async def ask(self, worker: int) -> None:
        for number in self._left:
            while not await self._tried(number, worker):
                self.num_busy += 1

    async def _tried(self, number: int, page: int) -> bool:
        async with self._news:
            try:
                fetch = self.both.fetch(f"request {number}", NUM_POSITIONS + 1, [page], payload=b"%d" % number)
            except BusyError:  # no slot here
                await self._news.wait()
                return False
        if number % 5 == 0:
            delay_s = self.rng.random() * MOST_DELAY_S
            asyncio.get_running_loop().call_later(delay_s, fetch.cancel)
        try:
            await self._use(await fetch, number)
        except RequestCancelledError:
            self.cancelled.add(number)
        except BusyError:  # none there
            await fetch.released()
            async with self._news:
                if self.both.prefiller.node.context_slots.num_held == NUM_SLOTS:
                    await self._news.wait()
            return False
        await fetch.released()
        await self._tell()
        return True

    async def _use(self, arrival: kvmsgr.Arrival, number: int) -> None:
        """Nobody writes to the context as long as it is not given back."""
        for _ in range(2):
            assert arrival.context["hidden"].view("f4").tolist() == [number] * DIM, f"not the record of {number}"
            await self._delay()
        arrival.release()
        with pytest.raises(ContextReleasedError):
            arrival.context["hidden"]
        self.arrived.add(number)
        await self._tell()

    # The prefiller

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for request in self.both.prefiller.messenger.requests():
                group.create_task(self._prefill(request))

    async def _prefill(self, request: kvmsgr.PrefillRequest) -> None:
        request.accept()
        how = self.rng.choice(("later", "later", "later", "ready", "with its step"))
        chunk = Chunk(
            request, 0, NUM_POSITIONS, [Span(0, 0, [int(request.payload) % 24])],
            ready=how == "ready", context_later=how != "with its step",
        )  # fmt: skip
        async with self._forward:
            step = self.both.begin(chunk)
            self.both.forward(step, 1, chunk.spans[0].pages)  # type: ignore[arg-type]  # a list
            if step.signals_context:
                self._write(request)
                step.signal.bump()
        if chunk.context_later:
            await self._delay()
            if request.context_slot >= 0:
                self._write(request)
            await asyncio.to_thread(request.send_context)
        await request.released()
        await request.outcome()
        await self._tell()

    def _write(self, request: kvmsgr.PrefillRequest) -> None:
        request.context["hidden"].view("f4")[:] = int(request.payload)


@asynccontextmanager
async def held_now_and_then(side: kvmsgr.Messenger, rng: Random) -> AsyncIterator[None]:
    """Writes to a messenger stay in the air for up to 50 ms."""
    poller = side._node.fabric.poller

    async def hold() -> None:
        try:
            while True:
                for held in (True, False):
                    await asyncio.to_thread(poller.hold, held)
                    await asyncio.sleep(rng.random() * MOST_DELAY_S)
        finally:
            poller.hold(False)

    task = asyncio.ensure_future(hold())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def load(fabric: str, seed: int) -> None:
    async with pair(fabric, num_context_slots=NUM_SLOTS) as both:
        load = Load(both, Random(seed))
        serving = asyncio.ensure_future(load.serve())
        async with held_now_and_then(both.decoder.messenger, Random(seed + 1000)):
            await within(asyncio.gather(*(load.ask(worker) for worker in range(NUM_AT_ONCE))), 60)
        assert load.arrived | load.cancelled == set(range(NUM_REQUESTS))
        assert not load.arrived & load.cancelled
        assert all(number % 5 == 0 for number in load.cancelled)
        assert len(load.cancelled) > 10, "cancels that came in time"
        assert load.num_busy > 10, "slots were scarce"
        assert both.decoder.node.context_slots.num_held == 0
        await both.prefiller.messenger.close()
        await within(serving)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_t11_in_simulation(seed: int) -> None:
    run("inprocess", lambda: load("inprocess", seed), seed, any_order=bool(seed))


@pytest.mark.slow
@pytest.mark.parametrize("fabric", [NET, "shm"])
def test_t11_over_libfabric(fabric: str) -> None:
    run(fabric, lambda: load(fabric, 11))
