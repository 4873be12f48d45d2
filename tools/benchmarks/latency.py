"""From a layer's bump to the entry of its first fi_writedata, with the GIL free and with it hogged.

Beside it, of the same run: a bare loop on the poller's core that only watches the word, and one that only spins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmsgr._ext import native

from .bare import Words, bump_layers, spin_gaps, watch_layers
from .machine import Cores, pin, realtime
from .pair import Pair, shuffled_pages
from .report import Check, Report, Spread

PAGE_BYTES = 4096
NUM_LAYERS = 200
GAP_NS = (150_000, 300_000)
SPIN_NS = 100_000_000
GAP_LIMITS_US = (1, 10, 50, 500)
WANTED_P50_US = 2.0
WANTED_HOGGED_RATIO = 2.0

Delays = npt.NDArray[np.float64]  # us, one a layer

HEADER = f"""
bump to the first fi_writedata of its layer, in us; bumps {GAP_NS[0] // 1000}-{GAP_NS[1] // 1000} us apart
                      p50       p99       max"""


@dataclass
class Samples:
    """What was measured, a list entry a pair: the poller with the GIL free and hogged, the bare watcher, the gaps of a
    bare spin (how many above each limit, the longest in ns)."""

    free: list[Delays] = field(default_factory=list)
    hogged: list[Delays] = field(default_factory=list)
    watched: list[Delays] = field(default_factory=list)
    gaps: list[tuple[list[int], int]] = field(default_factory=list)


@contextmanager
def hogged_gil(core: int) -> Iterator[None]:
    """A Python thread that computes all the time."""
    done = threading.Event()

    def hog() -> None:
        pin(core)
        while not done.is_set():
            sum(range(1000))

    thread = threading.Thread(target=hog)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def delays(bumped_ns: Words, done_ns: Words) -> Delays:
    return (done_ns.astype(np.int64) - bumped_ns.astype(np.int64)) / 1e3


def bump(counter: native.LayerCounter, ticket: int, seed: int) -> Words:
    with realtime():
        return bump_layers(counter.address, ticket, NUM_LAYERS, GAP_NS, seed)


def forward(pair: Pair, seed: int) -> Delays:
    """One step of NUM_LAYERS layers, a page each, bumped by this thread with the GIL released."""
    pages = shuffled_pages(np.random.default_rng(seed), PAGE_BYTES, PAGE_BYTES)
    pair.expect(pages, PAGE_BYTES, NUM_LAYERS)
    ticket = pair.arm(pages, PAGE_BYTES, NUM_LAYERS)
    bumped_ns = bump(pair.counter, ticket, seed)
    pair.finish(NUM_LAYERS)
    marks = sorted(pair.poller.take_trace(), key=lambda mark: mark[1])
    if [mark[1] for mark in marks] != list(range(NUM_LAYERS)):
        raise RuntimeError(f"{len(marks)} marks for {NUM_LAYERS} layers")
    return delays(bumped_ns, np.array([mark[3] for mark in marks], dtype=np.uint64))


def watch(pair: Pair, seed: int) -> Delays:
    """The same bumps, seen by a bare loop on the poller's core."""
    counter = native.LayerCounter()

    def watcher() -> Words:
        pin(pair.cores.source)
        return watch_layers(counter.address, 1, NUM_LAYERS)

    with ThreadPoolExecutor(1) as executor:
        seen_ns = executor.submit(watcher)
        bumped_ns = bump(counter, 1, seed)
        return delays(bumped_ns, seen_ns.result())


def hogged(pair: Pair, seed: int) -> Delays:
    with hogged_gil(pair.cores.driver):
        return forward(pair, seed)


def measure(pair: Pair, num_pairs: int) -> Samples:
    """Whatever is measured first has more to suffer from other work that had to wait before: the order turns."""
    samples = Samples()
    turns = [(samples.free, forward), (samples.hogged, hogged), (samples.watched, watch)]
    for seed in range(1, num_pairs + 1):
        pin(pair.cores.source)
        samples.gaps.append(spin_gaps(SPIN_NS, [limit * 1000 for limit in GAP_LIMITS_US]))
        pin(pair.cores.driver)
        for every, measure_one in turns:
            every.append(measure_one(pair, seed))
        turns.append(turns.pop(0))
    return samples


def show(report: Report, provider: str, samples: Samples) -> None:
    rows = {"poller": samples.free, "GIL hogged": samples.hogged, "bare watcher": samples.watched}
    p50_us = {}
    for name, every in rows.items():
        p50_us[name], p99, longest = np.percentile(np.concatenate(every), [50, 99, 100]).tolist()
        figures = {"p50_us": p50_us[name], "p99_us": p99, "max_us": longest}
        columns = "".join(f"{value:<10.2f}" for value in figures.values()).rstrip()
        report.add(f"{provider:<7}{name:<15}{columns}", {"what": f"{provider} bump to {name}", **figures})
    ratio = Spread.of([float(np.median(b) / np.median(a)) for a, b in zip(samples.free, samples.hogged, strict=True)])
    report.add(
        f"{provider:<7}p50 hogged/free {ratio}",
        {"what": f"{provider} p50 hogged over free", **vars(ratio)},
        Check(f"{provider} bump to fi_writedata, p50 in us", p50_us["poller"], "<=", WANTED_P50_US),
        Check(f"{provider} bump to fi_writedata, p50 hogged over free", ratio.median, "<=", WANTED_HOGGED_RATIO),
    )
    a_second = np.sum([num for num, _ in samples.gaps], axis=0) / (SPIN_NS * len(samples.gaps) / 1e9)
    longest_us = max(longest_ns for _, longest_ns in samples.gaps) / 1e3
    shown = ", ".join(f"{num:.0f} > {limit} us" for limit, num in zip(GAP_LIMITS_US, a_second, strict=True))
    report.add(
        f"{provider:<7}gaps a second of a bare spin: {shown}; longest {longest_us:.0f} us",
        {
            "what": f"{provider} gaps of a bare spin",
            "limits_us": list(GAP_LIMITS_US),
            "num_a_second": a_second.tolist(),
            "longest_us": longest_us,
        },
    )


def run(report: Report, provider: str, cores: Cores, num_pairs: int) -> None:
    with Pair(provider, cores, target_spins=False) as pair:
        pair.poller.trace(2 * NUM_LAYERS)
        pin(cores.driver)
        forward(pair, 0)  # connects
        pair.rest()
        samples = measure(pair, num_pairs)
    show(report, provider, samples)
