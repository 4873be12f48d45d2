"""A messenger over real libfabric whose ranks' memory is in worker processes."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import kvmsgr
from kvmsgr.device.worker_messages import LayerCounters
from kvmsgr.errors import RankLostError

from .processes import Child, joined, loss, until, within

LAYERS, PAGES, PLANES, TOKENS, DIM = 2, 4, 2, 4, 8
DIMS = "layer page plane head token dim"
NUM_POSITIONS = 7
COMPUTE = "kv[{layer}, [3, 1]] = np.arange({layer}, 128 + {layer}).reshape(2, 2, 1, 4, 8) + 1000 * link.rank"


@dataclass
class Pair:
    """A prefiller whose two ranks hold a head each, in workers, and a decoder whose one rank holds both heads."""

    prefiller: kvmsgr.Messenger
    decoder: kvmsgr.Messenger
    workers: list[Child]
    lost: list[str]
    kv: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    hidden: np.ndarray[tuple[int, ...], np.dtype[np.float32]]

    def fetch(self, request_id: str) -> kvmsgr.Fetch:
        spans = [kvmsgr.Span(0, 0, [0, 2])]
        return self.decoder.fetch(request_id, [self.prefiller.descriptor], range(NUM_POSITIONS + 1), spans)


@asynccontextmanager
async def pair(folder: Path, fabric: str, layer_counters: LayerCounters) -> AsyncIterator[Pair]:
    options = {"model": "toy", "fabric": fabric}
    async with joined(folder, 2, layer_counters=layer_counters, total_heads=2) as (group, workers):
        config = kvmsgr.Config(name="prefiller", layer_counters=layer_counters, **options)  # type: ignore[arg-type]  # they are texts
        prefiller = await kvmsgr.Messenger.open(config, ranks=group.ranks, counters=group.counters)
        lost: list[str] = []
        group.on_lost(lambda error: lost.append(error.how))
        group.on_lost(lambda error: prefiller.rank_lost(error.rank, f"pid {error.pid}: {error.how}"))
        async with prefiller:
            kv = np.full((LAYERS, PAGES, PLANES, 2, TOKENS, DIM), -1, np.float32)
            hidden = np.zeros((4, 4), np.float32)
            cache = kvmsgr.Cache([kvmsgr.CacheGroup.from_tensors([kv], DIMS)])
            context = [kvmsgr.ContextBuffer("hidden", hidden)]
            config = kvmsgr.Config(name="decoder", **options)  # type: ignore[arg-type]  # they are texts
            async with await kvmsgr.Messenger.open(config, cache, context) as decoder:
                yield Pair(prefiller, decoder, workers, lost, kv, hidden)
        if lost:
            assert await loss(group)


def step_of(both: Pair, request: kvmsgr.PrefillRequest) -> kvmsgr.Step:
    return both.prefiller.begin_step([kvmsgr.Chunk(request, 0, NUM_POSITIONS, [kvmsgr.Span(0, 0, [3, 1])])])


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["shm", "net"])
@pytest.mark.parametrize("layer_counters", ["lead", "rank"])
async def test_what_workers_compute_arrives_layer_by_layer(
    tmp_path: Path, fabric: str, layer_counters: LayerCounters
) -> None:
    async with pair(tmp_path, fabric, layer_counters) as both:
        fetch = both.fetch("one")
        request = await within(anext(both.prefiller.requests()))
        request.accept()
        step = step_of(both, request)
        bumping = both.workers if layer_counters == "rank" else both.workers[:1]
        signals = step.signals if layer_counters == "rank" else [step.signal]
        for worker, signal_ in zip(bumping, signals, strict=True):
            await worker(f"counter = link.counter(); counter.start({signal_.ticket})")
        for layer in range(LAYERS):
            for worker in both.workers:
                await worker(COMPUTE.format(layer=layer))
            for worker in bumping:
                await worker("counter.bump()")
            rows = (layer + 1) * NUM_POSITIONS * PLANES * 2
            await until(lambda rows=rows: fetch.rows_landed >= rows, f"layer {layer} landed")  # type: ignore[misc]  # it is a condition
            assert fetch.rows_landed == rows
        assert step.signals_context
        for number, worker in enumerate(both.workers):
            await worker(f"hidden[:] = {number} + 5")
        for worker in bumping:
            await worker("counter.bump()")
        arrival = await within(fetch)
        for layer in range(LAYERS):
            for head in range(2):
                wanted = np.arange(layer, 128 + layer, dtype=np.float32).reshape(2, 2, 4, 8) + 1000 * head
                np.testing.assert_array_equal(both.kv[layer, 0, :, head], wanted[0])
                np.testing.assert_array_equal(both.kv[layer, 2, :, head, :3], wanted[1, :, :3])
        assert arrival.context["hidden"].view(np.float32)[0] in (5, 6)
        arrival.release()
        await within(fetch.released())


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["shm", "net"])
async def test_a_worker_that_dies_fails_requests_by_name_on_both_sides(tmp_path: Path, fabric: str) -> None:
    async with pair(tmp_path, fabric, "rank") as both:
        fetch = both.fetch("doomed")
        requests = both.prefiller.requests()
        request = await within(anext(requests))
        request.accept()
        step = step_of(both, request)
        for worker, signal_ in zip(both.workers, step.signals, strict=True):
            await worker(COMPUTE.format(layer=0))
            await worker(f"counter = link.counter(); counter.start({signal_.ticket}); counter.bump()")
        await until(lambda: fetch.rows_landed > 0, "the first layer landed")
        both.workers[1].kill(signal.SIGKILL)
        told = rf"rank 1 of prefiller is lost: pid {both.workers[1].pid}: its process was killed by SIGKILL"
        with pytest.raises(RankLostError, match=told):
            await within(fetch)
        await within(fetch.released())
        await within(request.released())
        assert both.lost == ["its process was killed by SIGKILL"]
        later = both.fetch("later")
        (await within(anext(requests))).accept()
        with pytest.raises(RankLostError, match=told):
            await within(later)
