"""Paged throughput: an armed step of the poller beside the bare loop, in pairs of one run each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .machine import Cores
from .pair import Pages, Pair, shuffled_pages
from .report import Check, Report, Spread
from .target import WINDOW

KIB = 1024
PAGE_BYTES = (16 * KIB, 64 * KIB, 256 * KIB)
MOVED_BYTES = 96 << 20
WANTED_RATIO = 0.9

Move = Callable[[Pages, int], float]

HEADER = f"""
paged throughput, {MOVED_BYTES >> 20} MiB in shuffled pages, window {WINDOW}, medians [10 %..90 %]
                    poller GB/s         bare loop GB/s      poller/bare         bytes"""


def verify(pair: Pair, pages: Pages, page_bytes: int) -> int:
    """Moves the pages both ways and compares. Returns the number of wrong pages."""
    num_wrong = 0
    moves: list[Move] = [pair.move, pair.move_bare]
    for move in moves:
        pair.clear_target()
        move(pages, page_bytes)
        num_wrong += pair.num_wrong(pages, page_bytes)
    return num_wrong


def measure(pair: Pair, page_bytes: int, num_pairs: int) -> tuple[list[float], list[float]]:
    """GB/s of the poller and of the bare loop. A pair moves the same pages four times, there and back in order, so that
    a machine that gets faster or slower meanwhile favours neither."""
    generator = np.random.default_rng(page_bytes)
    ours, bare = [], []
    for index in range(num_pairs):
        pages = shuffled_pages(generator, page_bytes, MOVED_BYTES)
        first, second = (pair.move, pair.move_bare) if index % 2 else (pair.move_bare, pair.move)
        spent_s = {first: 0.0, second: 0.0}
        for move in (first, second, second, first):
            spent_s[move] += move(pages, page_bytes)
        ours.append(2 * MOVED_BYTES / spent_s[pair.move] / 1e9)
        bare.append(2 * MOVED_BYTES / spent_s[pair.move_bare] / 1e9)
    return ours, bare


def show(report: Report, what: str, ours: list[float], bare: list[float], num_wrong: int) -> None:
    ratio = Spread.of([a / b for a, b in zip(ours, bare, strict=True)])
    columns = "".join(f"{spread!s:<20}" for spread in (Spread.of(ours), Spread.of(bare), ratio))
    report.add(
        f"{what:<20}{columns}" + (f"WRONG PAGES: {num_wrong}" if num_wrong else "equal"),
        {"what": what, "poller_gb_s": ours, "bare_gb_s": bare, "num_wrong_pages": num_wrong},
        Check(f"{what}, wrong pages", num_wrong, "==", 0),
        Check(f"{what}, throughput over the bare loop's", ratio.median, ">=", WANTED_RATIO),
    )


def run(report: Report, provider: str, cores: Cores, num_pairs: int, corrupt_write: int | None) -> None:
    with Pair(provider, cores, target_spins=True) as pair:
        pair.rest()
        if corrupt_write:
            pair.poller.inject("flip", corrupt_write)
        for page_bytes in PAGE_BYTES:
            pages = shuffled_pages(np.random.default_rng(0), page_bytes, MOVED_BYTES)
            num_wrong = verify(pair, pages, page_bytes)
            ours, bare = measure(pair, page_bytes, num_pairs)
            show(report, f"{provider} {page_bytes // KIB} KiB pages", ours, bare, num_wrong)
