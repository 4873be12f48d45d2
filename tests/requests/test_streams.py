"""Several streams: micro-batches of a step, each with its layer counter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmsgr
from kvmsgr.errors import ConfigError
from kvmsgr.fabric.inprocess import Air
from kvmsgr.testing.loop import simulate
from tests.workers.leftovers import nothing_left
from tests.workers.processes import joined, until, within

from .ahead import LAYERS, PAGE_TOKENS, ROWS_A_LAYER, ahead

WORKER_LAYERS, PLANES, TOKENS, DIM = 2, 2, 4, 8
DIMS = "layer page plane head token dim"
NUM_WORKERS = NUM_STREAMS = 2


def test_the_layers_of_two_micro_batches_go_by_their_own_counters() -> None:
    """Ping-pong: one computes while the other would communicate."""

    async def scenario(air: Air) -> None:
        async with ahead("inprocess", num_streams=2, context=False) as engine:
            jobs = [await engine.fetch(PAGE_TOKENS) for _ in range(2)]
            for stream, job in enumerate(jobs):
                engine.announce(stream, [(job, PAGE_TOKENS)])
                engine.start(stream)
            order = [0, 0, 1, 0, 1, 1]
            done = [0, 0]
            for stream in order:
                engine.bump(stream)
                done[stream] += 1
                for job, layers in zip(jobs, done, strict=True):
                    rows = layers * PAGE_TOKENS * ROWS_A_LAYER
                    await until(lambda job=job, rows=rows: job.fetch.rows_landed >= rows, f"{layers} layers of {job}")  # type: ignore[misc]  # a condition
                    assert job.fetch.rows_landed == rows
            assert done == [LAYERS, LAYERS]
            with pytest.raises(ConfigError, match="layer counter 2 does not exist; there are 2"):
                engine.announce(2, [])
            await engine.finish()

    simulate(scenario, 0)


@pytest.mark.slow
@pytest.mark.parametrize("layer_counters", ["lead", "rank"])
async def test_micro_batches_in_worker_processes(tmp_path: Path, layer_counters: str) -> None:
    """Each stream's ring lies in memory that the workers bump and the lead watches. It is shorter than what is run."""
    with nothing_left():
        await run_micro_batches(tmp_path, {"layer_counters": layer_counters, "num_streams": NUM_STREAMS})


async def run_micro_batches(folder: Path, counters: dict[str, Any]) -> None:
    async with joined(folder, NUM_WORKERS, total_heads=NUM_WORKERS, num_slots=2, **counters) as (group, workers):
        config = kvmsgr.Config(name="prefiller", model="toy", fabric="net", **counters)
        kv = np.full((WORKER_LAYERS, 4, PLANES, NUM_WORKERS, TOKENS, DIM), -1, np.float32)
        cache = kvmsgr.Cache([kvmsgr.CacheGroup.from_tensors([kv], DIMS)])
        hidden = [kvmsgr.ContextBuffer("hidden", np.zeros((4, 4), np.float32))]
        async with (
            await kvmsgr.Messenger.open(config, ranks=group.ranks, counters=group.counters) as prefiller,
            await kvmsgr.Messenger.open(
                kvmsgr.Config(name="decoder", model="toy", fabric="net"), cache, hidden
            ) as decoder,
        ):
            fetches, requests = [], []
            for number, pages in enumerate(([0, 2], [3, 1])):
                spans = [kvmsgr.Span(0, 0, pages)]
                fetches.append(decoder.fetch(f"r{number}", [prefiller.descriptor], range(2 * TOKENS + 1), spans))
                requests.append(await within(anext(prefiller.requests())))
                requests[-1].accept()
            bumping = workers if counters["layer_counters"] == "rank" else workers[:1]
            for worker in bumping:
                await worker(f"counters = [link.counter(stream) for stream in range({NUM_STREAMS})]")
            for worker in workers:
                await worker("kv[:] = np.arange(kv.size).reshape(kv.shape) + 1000 * link.rank")
            for start in range(2 * TOKENS):  # a token a step: the rings are gone round several times
                steps = [
                    prefiller.begin_step(
                        [kvmsgr.Chunk(request, start, start + 1, [kvmsgr.Span(0, 0, [2 * n, 2 * n + 1])])],
                        counter=n,
                    )
                    for n, request in enumerate(requests)
                ]
                for stream, step in enumerate(steps):
                    for worker, ticket in zip(bumping, step.tickets, strict=True):
                        await worker(f"counters[{stream}].start({ticket})")
                for _ in range(WORKER_LAYERS + steps[0].signals_context):
                    for stream in range(NUM_STREAMS):
                        for worker in bumping:
                            await worker(f"counters[{stream}].bump()")
                await until(lambda: len(prefiller._node.steps) <= len(group.counters), "older steps are over")
            for fetch in fetches:
                (await within(fetch)).release()
                await within(fetch.released())
    wanted = np.arange(kv.size // NUM_WORKERS, dtype=np.float32).reshape(WORKER_LAYERS, 4, PLANES, TOKENS, DIM)
    for head in range(NUM_WORKERS):
        for pages, sources in (([0, 2], [0, 1]), ([3, 1], [2, 3])):
            np.testing.assert_array_equal(kv[:, pages][:, :, :, head], wanted[:, sources] + 1000 * head)
