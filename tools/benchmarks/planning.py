"""`tools/bench planning`: what it takes to plan a request, on the thread that calls.

Two messengers of eight ranks each, over `net` in this process, with caches of real geometry: their addresses are
reserved, and nothing is ever stored there. Steps are announced, timed and abandoned, so that nothing moves.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import mmap
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import structlog

import kvmsgr
from kvmsgr.fabric.libfabric import Fabric
from kvmsgr.layout import Balance, head_share
from kvmsgr.runtime.delivery import Delivery

from .machine import choose_cores, facts, raised_priority
from .report import Check, Report, Spread

NUM_RANKS = 8
PAGE_TOKENS, ITEM_BYTES = 64, 2
REQUEST_PAGES, CHUNK_PAGES = 2048, 256
MOST_REQUEST_MS, MOST_CHUNK_MS, MOST_FOR_TWICE = 5.0, 1.0, 1.2
PATIENCE_S = 30.0
HOUR_S = 3600.0
ERRORS = (kvmsgr.errors.KvmsgrError, OSError, TimeoutError)

HEADER = f"""
{"planning, medians [10 %..90 %]":<44}{"whole, ms":<20}{"native part, ms":<20}{"index copy, us":<22}pages  orders"""


@dataclass(frozen=True)
class Model:
    """One cache group. Both nodes deal its heads to eight ranks."""

    name: str
    num_layers: int
    planes: int
    heads: int
    dim: int

    @property
    def twice(self) -> Model:
        """With as many layers again."""
        return replace(self, num_layers=2 * self.num_layers)


R1 = Model("R1", num_layers=61, planes=1, heads=1, dim=576)
QWEN3_CODER = Model("Qwen3-Coder", num_layers=62, planes=2, heads=8, dim=128)


@dataclass(frozen=True)
class Case:
    """What is planned: a request of so many pages from its Dispatch on (`anew`), or a chunk of one."""

    model: Model
    what: str
    num_pages: int
    anew: bool
    ranks: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        target = "TP8" if self.ranks is None else "one DP rank"
        return f"{self.model.name} x {self.model.num_layers} TP8 -> {target}, {self.what}"

    @property
    def twice(self) -> Case:
        return replace(self, model=self.model.twice)


REQUEST = Case(R1, "128k request", REQUEST_PAGES, anew=True)
CASES = (
    REQUEST,
    replace(REQUEST, ranks=(3,)),
    Case(R1, "16k chunk", CHUNK_PAGES, anew=False),
    Case(QWEN3_CODER, "16k chunk", CHUNK_PAGES, anew=False),
)


@dataclass(frozen=True)
class Sample:
    """One announcement: how long it took, the native part of it, and a copy of the arrays that this was given."""

    whole_ms: float
    native_ms: float
    copy_us: float
    num_pages: int
    num_orders: int


Space = npt.NDArray[np.uint8]
"""Addresses that nobody else uses, without memory behind them."""


def reserve(num_bytes: int) -> Space:
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0), np.uint8)


def rank_of(model: Model, rank: int) -> tuple[kvmsgr.Rank, Space]:
    """A rank, and where its cache would be."""
    heads = head_share(model.heads, NUM_RANKS, rank)
    shape = model.num_layers, REQUEST_PAGES, model.planes, len(heads), PAGE_TOKENS, model.dim
    strides = tuple(math.prod(shape[axis + 1 :]) * ITEM_BYTES for axis in range(len(shape)))
    space = reserve(math.prod(shape) * ITEM_BYTES)
    array = kvmsgr.RawArray(space.ctypes.data, shape, strides, "bfloat16", ITEM_BYTES)
    group = kvmsgr.CacheGroup.from_tensors(
        [array], "layer page plane head token dim", head_start=heads.start, total_heads=model.heads
    )
    return kvmsgr.Rank(kvmsgr.Cache([group])), space


@asynccontextmanager
async def opened(model: Model, name: str) -> AsyncIterator[kvmsgr.Messenger]:
    ranks, spaces = zip(*(rank_of(model, rank) for rank in range(NUM_RANKS)), strict=True)
    config = kvmsgr.Config(name=name, model="planning", fabric="net", time_allowed_s=HOUR_S, step_timeout_s=HOUR_S)
    async with await kvmsgr.Messenger.open(config, ranks=ranks) as messenger:
        yield messenger
    del spaces  # only now


class Planner:
    """A request that a prefiller has accepted, to be planned again and again."""

    def __init__(self, case: Case, messenger: kvmsgr.Messenger, request: kvmsgr.PrefillRequest) -> None:
        self._case, self._messenger, self._request = case, messenger, request
        pages = random.Random(1).sample(range(REQUEST_PAGES), case.num_pages)
        stop = min(case.num_pages * PAGE_TOKENS, request.num_positions)
        self._chunk = kvmsgr.Chunk(request, 0, stop, [kvmsgr.Span(0, 0, pages)])

    async def sample(self) -> Sample:
        """Announce the chunk, and take it back."""
        request = self._request
        routes, node = request.peer.routes, request.node
        assert routes is not None
        with native_calls(node.fabric) as calls:
            begun_ns = time.perf_counter_ns()
            if self._case.anew:
                request.delivery = Delivery(node.memory, routes, request.dispatch)
                request.delivery.choose(request.ranks, Balance(NUM_RANKS))
            step = self._messenger.begin_step([self._chunk])
            whole_ns = time.perf_counter_ns() - begun_ns
        step.abandon()
        async with asyncio.timeout(PATIENCE_S):
            while request.num_transfers != request._num_ended:  # noqa: ASYNC110  # the poller lets go of them
                await asyncio.sleep(0.0002)
        [(native_ns, arrays)] = calls
        begun_ns = time.perf_counter_ns()
        for array in arrays:
            array.copy()
        copy_ns = time.perf_counter_ns() - begun_ns
        orders, pages, _ = arrays
        return Sample(whole_ns / 1e6, native_ns / 1e6, copy_ns / 1e3, len(pages), len(orders))


Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint64]]


@contextmanager
def native_calls(fabric: Fabric) -> Iterator[list[tuple[int, Arrays]]]:
    """Note what the native layer is given, and how many nanoseconds it takes."""
    calls: list[tuple[int, Arrays]] = []
    begin_step = fabric.begin_step

    def timed(
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
        deadline_ns: int,
    ) -> list[int]:
        begun_ns = time.perf_counter_ns()
        tickets = begin_step(parts, orders, pages, edges, deadline_ns)
        calls.append((time.perf_counter_ns() - begun_ns, (orders, pages, edges)))
        return tickets

    with mock.patch.object(fabric, "begin_step", timed):
        yield calls


@asynccontextmanager
async def planner(case: Case) -> AsyncIterator[Planner]:
    """Open both nodes, and have a prompt of 128k tokens asked for."""
    async with opened(case.model, "prefill") as prefiller, opened(case.model, "decode") as decoder:
        pages = random.Random(2).sample(range(REQUEST_PAGES), REQUEST_PAGES)
        tokens = np.zeros(REQUEST_PAGES * PAGE_TOKENS, np.uint32)  # the last one is not moved: the last page is an edge
        spans = [kvmsgr.Span(0, 0, pages)]
        fetch = decoder.fetch("planned", [prefiller.descriptor], tokens, spans, ranks=case.ranks)
        try:
            request = await asyncio.wait_for(anext(aiter(prefiller.requests())), PATIENCE_S)
            request.accept()
            yield Planner(case, prefiller, request)
        finally:
            fetch.cancel()
            await asyncio.wait_for(fetch.released(), PATIENCE_S)


async def measure(cases: Sequence[Case], num_samples: int) -> list[list[Sample]]:
    """Samples of each case, taken in turn, so that a machine that gets slower meanwhile favours none."""
    async with AsyncExitStack() as stack:
        planners = [await stack.enter_async_context(planner(case)) for case in cases]
        for one in planners:
            await one.sample()  # what is worked out once between two peers
        rounds = [[await one.sample() for one in planners] for _ in range(num_samples)]
    return [list(samples) for samples in zip(*rounds, strict=True)]


def show(report: Report, case: Case, samples: Sequence[Sample], check: Check, note: str = "") -> None:
    figures = {name: [getattr(sample, name) for sample in samples] for name in ("whole_ms", "native_ms", "copy_us")}
    whole, native, copied = (str(Spread.of(values)) for values in figures.values())
    last = samples[-1]
    report.add(
        f"{case.name:<44}{whole:<20}{native:<20}{copied:<22}{last.num_pages:<7}{last.num_orders:<8}{note}".rstrip(),
        {"what": case.name, **figures, "num_pages": last.num_pages, "num_orders": last.num_orders},
        check,
    )


def run_case(report: Report, case: Case, num_samples: int) -> None:
    """As it is, and with twice the layers."""
    once, twice = asyncio.run(measure((case, case.twice), num_samples))
    median_ms = Spread.of([sample.whole_ms for sample in once]).median
    ratio = Spread.of([second.whole_ms / first.whole_ms for first, second in zip(once, twice, strict=True)]).median
    most_ms = MOST_REQUEST_MS if case.anew else MOST_CHUNK_MS
    show(report, case, once, Check(f"{case.name}, ms", median_ms, "<=", most_ms))
    check = Check(f"{case.twice.name}, over half of them", ratio, "<=", MOST_FOR_TWICE)
    show(report, case.twice, twice, check, f"{ratio:.2f} x")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, metavar="N", default=201, help="of each case (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")


def run(options: argparse.Namespace) -> bool:
    """Measure and print. True when every figure is as wanted."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with raised_priority() as raised:
        report = Report(facts(choose_cores(), raised))
        for name, value in report.machine.items():
            print(f"{name:<18}{value}")
        print(HEADER)
        for case in CASES:
            run_case(report, case, options.samples)
    if options.json:
        report.write(options.json)
    print()
    return report.conclude()
