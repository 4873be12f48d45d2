"""Faults on purpose, and rows that nobody expects."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvmsgr._ext import native
from tests.native.loopback import GENERATION, NUM_LAYERS, NUM_PAGES, PAGE_ROWS, SLOT, Pair

PAIRS = [(0, 1), (2, 0), (4, 5)]
SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]
ALL_ROWS = len(PAIRS) * PAGE_ROWS * NUM_LAYERS


def test_a_dropped_write_is_reported_sent_and_never_lands(pair: Pair) -> None:
    pair.expect_rows(ALL_ROWS - PAGE_ROWS)
    pair.inject_drop(2)
    pair.run_step(pair.begin(PAIRS))
    assert pair.source.wait(native.SENT)[2] == ALL_ROWS
    pair.target.wait(native.REACHED)
    assert not pair.target.pages[0, 0].any()
    pair.assert_moved([(0, 1), (4, 5)])


def test_a_flipped_write_differs_in_one_byte(pair: Pair) -> None:
    source = pair.source.memory.copy()
    pair.expect(len(PAIRS))
    pair.source.poller.inject("flip", 3)
    pair.run_step(pair.begin(PAIRS))
    pair.target.wait(native.REACHED)
    pair.source.wait(native.SENT)
    wrong = np.argwhere(pair.target.pages[0, 5] != pair.source.pages[0, 4])
    assert wrong.tolist() == [[1]]  # the high byte of a 2-byte element
    assert pair.target.pages[0, 5, 1] == pair.source.pages[0, 4, 1] ^ 0xFF
    pair.assert_moved(PAIRS[:2])
    np.testing.assert_array_equal(pair.source.memory, source)


def test_a_refused_write_fails_the_link(pair: Pair) -> None:
    pair.source.poller.inject("fail", 3)
    pair.run_step(pair.begin(PAIRS, tag=8))
    assert pair.source.wait(native.LINK_FAILED, pair.link)[2:5:2] == (errno.EIO, native.FAILED_POST)
    assert pair.source.wait(native.STOPPED, 8)[2] == 2 * PAGE_ROWS


def test_reordered_writes_all_land(pair: Pair) -> None:
    pair.source.poller.disturb(5, reorder=0.4, slow_ns=1000)
    pair.expect(NUM_PAGES)
    pair.begin(SCATTERED, ready=True, num_bumps=0)
    pair.target.wait(native.REACHED)
    assert pair.source.wait(native.SENT)[2] == NUM_PAGES * PAGE_ROWS * NUM_LAYERS
    pair.assert_moved(SCATTERED)


def missing_pages(pair: Pair, seed: int) -> list[list[int]]:
    """(layer, destination page) of what does not arrive when a fifth of the writes are dropped."""
    pair.source.poller.disturb(seed, drop=0.2)
    pair.target.memory[:] = 0
    landed = pair.target.poller.stats()["landed_writes"]
    last, *others = SCATTERED
    pair.begin(others, ready=True, num_bumps=0)
    assert pair.source.wait(native.SENT)[2] == len(others) * PAGE_ROWS * NUM_LAYERS
    pair.source.poller.disturb(0)
    pair.begin([last], ready=True, num_bumps=0)  # behind everything else, on the same link
    pair.source.wait(native.SENT)
    while not pair.target.pages[NUM_LAYERS - 1, last[1]].all():
        assert pair.target.poller.stats()["landed_writes"] < landed + NUM_PAGES * NUM_LAYERS
    missing = np.argwhere(~pair.target.pages.any(axis=2)).tolist()
    pair.num_dropped += len(missing)
    return missing


def test_a_seed_spoils_the_same_writes_again(pair: Pair) -> None:
    first = missing_pages(pair, 11)
    assert 20 < len(first) < 90
    assert missing_pages(pair, 11) == first
    assert missing_pages(pair, 12) != first


def test_chances_that_make_no_sense_are_refused(pair: Pair) -> None:
    for drop, flip, reorder in ((1.5, 0.0, 0.0), (0.0, -0.1, 0.0), (0.6, 0.0, 0.6), (0.0, float("nan"), 0.0)):
        with pytest.raises(ValueError, match="chances"):
            pair.source.poller.disturb(1, drop=drop, flip=flip, reorder=reorder)
    with pytest.raises(ValueError, match="a pause"):
        pair.source.poller.disturb(1, slow_ns=10**9)


def test_a_fault_needs_a_name_and_a_number(pair: Pair) -> None:
    with pytest.raises(ValueError, match="no fault 'melt'"):
        pair.source.poller.inject("melt", 1)
    with pytest.raises(ValueError, match="from 1"):
        pair.source.poller.inject("drop", 0)


def test_more_rows_than_expected_are_an_overflow_once(pair: Pair) -> None:
    pair.expect_rows(PAGE_ROWS + 1)
    pair.run_step(pair.begin(PAIRS))
    _, attempt, rows, _, slot_index = pair.target.wait(native.OVERFLOW)
    assert (attempt, rows, slot_index) == (1, 2 * PAGE_ROWS, SLOT << 4 | GENERATION)
    pair.wait_landed("landed_rows", ALL_ROWS)
    assert not pair.target.drain(native.OVERFLOW, native.REACHED)


def test_rows_for_nobody_are_strays_once_a_slot(pair: Pair) -> None:
    pair.run_step(pair.begin(PAIRS))
    assert pair.target.wait(native.STRAY)[1] == SLOT << 4 | GENERATION
    pair.wait_landed("landed_rows", ALL_ROWS)
    assert not pair.target.drain(native.STRAY)
    assert pair.target.poller.stats()["strays"] == len(PAIRS) * NUM_LAYERS

    pair.expect(len(PAIRS))
    pair.target.state.unlink_slot(SLOT, GENERATION)
    pair.run_step(pair.begin(PAIRS))
    pair.target.wait(native.STRAY)
    assert pair.target.state.attempt_rows(1) == 0


def test_an_ended_attempt_still_counts(pair: Pair) -> None:
    pair.expect(len(PAIRS))
    pair.target.state.end_attempt(1)
    assert pair.target.state.expecting == 0
    pair.run_step(pair.begin(PAIRS))
    assert pair.target.wait(native.REACHED)[2] == ALL_ROWS
    assert pair.target.state.slot_rows(SLOT, GENERATION) == ALL_ROWS
    assert native.ATTEMPT_STATES[pair.target.state.attempts()[0][1]] == "ended"


def test_an_idle_poller_sleeps_and_wakes_for_a_command(pair: Pair) -> None:
    limit_ns = native.monotonic_ns() + 10**10
    while not pair.source.poller.stats()["sleeps"]:  # two seconds after it was connected
        assert native.monotonic_ns() < limit_ns, pair.source.poller.stats()
    pair.expect(len(PAIRS))
    pair.run_step(pair.begin(PAIRS))
    pair.target.wait(native.REACHED)
