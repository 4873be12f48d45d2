"""`tools/bench overlap`: how much of a request travels while it is computed (T48).

The raw rate is that of a bare loop of fi_writedata between two other processes, with pages of the same size, in turns
with what is compared to it. The request is as large as takes it a given share of the time of the compute.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

import kvmsgr
from kvmsgr._ext import native

from .bare import BareError
from .fake_engine import PAGE_BYTES, EngineProcess, How, Kv, Shape, config, marked, new_cache, shuffled
from .machine import MachineError, choose_cores, facts, raised_priority
from .pair import Pair, shuffled_pages
from .report import Check, Report, Spread
from .target import POOL_BYTES, TargetError

ERRORS = (BareError, MachineError, TargetError, native.NativeError, kvmsgr.errors.KvmsgrError, OSError, TimeoutError)
FABRICS = ("net", "shm")
TRANSFER_SHARE, MOST_SHARE = 0.6, 0.75  # of the compute; beyond that the machine has become slower meanwhile
WANTED_POSTED, WANTED_LAYERS = 90.0, 2.0
RAW_BYTES = POOL_BYTES // 2
PATIENCE_S = 60.0
HEADER = f"""
{"":<8}{"":<14}{"posted before the last signal, %":<36}{"last signal to ready, ms":<28}{"in layer times":<24}pages"""


@dataclass
class Samples:
    """A list entry a run."""

    posted: list[float] = field(default_factory=list)  # before the last signal, in percent
    ready_ms: list[float] = field(default_factory=list)  # from the last signal


class Decoder:
    """Fetches one request at a time from the engine's process."""

    def __init__(self, messenger: kvmsgr.Messenger, engine: EngineProcess, shape: Shape, kv: Kv) -> None:
        self._messenger, self._engine, self._shape = messenger, engine, shape
        self._kv = kv
        self._pages = shuffled(shape, 2)
        self._num_requests = 0

    async def fetch(self, how: How, samples: Samples) -> None:
        self._num_requests += 1
        prompt = np.zeros(self._shape.num_positions + 1, np.uint32)
        spans = [kvmsgr.Span(0, 0, self._pages)]
        prefilled = asyncio.ensure_future(self._engine.prefill(how))
        fetch = self._messenger.fetch(f"r{self._num_requests}", [self._engine.descriptor], prompt, spans)
        async with asyncio.timeout(PATIENCE_S):
            arrival = await fetch
            ready_ns = time.monotonic_ns()
            forward = await prefilled
            await fetch.released()
        arrival.release()
        samples.posted.append(100 * forward.posted_bytes / self._shape.num_bytes)
        samples.ready_ms.append((ready_ns - forward.last_signal_ns) / 1e6)

    def num_wrong(self) -> int:
        """Pages that do not hold what the engine computed; forgets what they hold."""
        found = self._kv.view(np.uint64)[:, self._pages]
        wanted = marked(self._shape)[:, shuffled(self._shape, 1), None, None, None, None]
        num_wrong = int((found != wanted).any(axis=(2, 3, 4, 5)).sum())
        self._kv[:] = 0
        return num_wrong


@asynccontextmanager
async def decoder(fabric: str, shape: Shape) -> AsyncIterator[Decoder]:
    engine = EngineProcess(fabric, shape)
    try:
        kv, cache = new_cache(shape)
        async with await kvmsgr.Messenger.open(config("decoder", fabric), cache) as messenger:
            yield Decoder(messenger, engine, shape, kv)
    finally:
        engine.close()


def raw_rate(pair: Pair, seed: int) -> float:
    """Bytes a second of the bare loop, there and then."""
    pages = shuffled_pages(np.random.default_rng(seed), PAGE_BYTES, RAW_BYTES)
    cores = os.sched_getaffinity(0)
    try:
        return RAW_BYTES / pair.move_bare(pages, PAGE_BYTES)
    finally:
        os.sched_setaffinity(0, cores)


def shape_for(rate: float, options: argparse.Namespace) -> Shape:
    """A request that takes its share of the compute at this rate."""
    shape = Shape(options.layers, options.layer_ms / 1e3, options.chunks, 0)
    page_s = shape.num_layers * PAGE_BYTES / rate
    num_pages = max(round(TRANSFER_SHARE * shape.compute_s / page_s), options.chunks)
    return Shape(options.layers, options.layer_ms / 1e3, options.chunks, num_pages)


async def measure(report: Report, fabric: str, pair: Pair, options: argparse.Namespace) -> None:
    rates = [raw_rate(pair, seed) for seed in range(6)][1:]  # the first one touches memory for the first time
    shape = shape_for(float(np.median(rates)), options)
    samples: dict[How, Samples] = {"overlapped": Samples(), "at the end": Samples()}
    num_wrong = 0
    async with decoder(fabric, shape) as ours:
        for how in samples:
            await ours.fetch(how, Samples())
            num_wrong += ours.num_wrong()
        await ours.fetch("overlapped", Samples())  # its pages were touched before
        for run in range(options.runs):
            for how, its in samples.items():
                await ours.fetch(how, its)
            rates.append(raw_rate(pair, run))
        num_wrong += ours.num_wrong()
    show(report, fabric, shape, samples, rates, num_wrong)


def show(
    report: Report, fabric: str, shape: Shape, samples: dict[How, Samples], rates: list[float], num_wrong: int
) -> None:
    layer_ms = shape.layer_s * 1e3
    for how, its in samples.items():
        posted, ready = Spread.of(its.posted), Spread.of(its.ready_ms)
        layers = Spread.of([ms / layer_ms for ms in its.ready_ms])
        figures = {"what": f"{fabric} {how}", "posted_percent": its.posted, "ready_ms": its.ready_ms}
        checks = (
            Check(f"{fabric} bytes posted before the last layer signal, %", posted.median, ">=", WANTED_POSTED),
            Check(f"{fabric} last layer signal to ready, in layer times", layers.median, "<=", WANTED_LAYERS),
        )
        wrong = f"WRONG PAGES: {num_wrong}" if num_wrong else "equal"
        line = f"{fabric:<8}{how:<14}{posted!s:<36}{ready!s:<28}{layers!s:<24}{wrong}"
        report.add(line, figures, *(checks if how == "overlapped" else ()))
    rate = Spread.of([rate / 1e9 for rate in rates])
    whole_ms = shape.num_bytes / (rate.median * 1e9) * 1e3
    last_ms = whole_ms / shape.num_chunks / shape.num_layers
    share = 100 * whole_ms / 1e3 / shape.compute_s
    report.add(
        f"{fabric:<8}{'raw limit':<14}{rate} GB/s with pages of {PAGE_BYTES >> 10} KiB: the last layer takes "
        f"{last_ms:.2f} ms, all {shape.num_bytes / 1e6:.0f} MB {whole_ms:.0f} ms, {share:.0f} % of the compute",
        {"what": f"{fabric} raw", "gb_s": [rate / 1e9 for rate in rates], "num_bytes": shape.num_bytes},
        Check(f"{fabric} raw limit: the transfer in % of the compute", share, "<=", 100 * MOST_SHARE),
        Check(f"{fabric} wrong pages", num_wrong, "==", 0),
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", default="all", choices=[*FABRICS, "all"])
    parser.add_argument("--runs", type=positive, default=7, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=30, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--layer-ms", type=float, default=5.0, metavar="MS", help="compute (default: %(default)s)")
    parser.add_argument("--chunks", type=positive, default=2, metavar="N", help="of the prompt (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")


def run(options: argparse.Namespace) -> bool:
    """Measure and print. True when every figure is as wanted."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with raised_priority() as raised:
        cores = choose_cores()
        report = Report(facts(cores, raised))
        for name, value in report.machine.items():
            print(f"{name:<18}{value}")
        print(
            f"\n{options.chunks} chunks of {options.layers} layers that take {options.layer_ms:g} ms each; medians "
            f"[10 %..90 %] of {options.runs} runs{HEADER}"
        )
        for fabric in FABRICS if options.provider == "all" else [options.provider]:
            with Pair(fabric, cores, target_spins=False) as pair:
                pair.rest()
                asyncio.run(measure(report, fabric, pair, options))
    if options.json:
        report.write(options.json)
    print()
    return report.conclude()
