"""Conformance: the switches for faults do the same on every fabric."""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt
import pytest

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import FAILED_POST

from .fabrics import FabricUnderTest
from .flow import stop_halfway
from .pair import SCATTERED, Pair
from .side import NUM_LAYERS, NUM_PAGES, PAGE_ROWS, ROWS_A_PAGE

PAIRS = [(0, 1), (2, 0), (4, 5)]


class Spoiling:
    def test_a_dropped_write_is_reported_sent_and_never_lands(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(3 * ROWS_A_PAGE - PAGE_ROWS)
            pair.source.poller.inject("drop", 2)
            pair.source.run_step(pair.begin(PAIRS))
            assert pair.source.wait(records.SENT)[2] == 3 * ROWS_A_PAGE
            pair.target.wait(records.REACHED)
            assert not pair.target.copy()[0, 0].any()
            pair.assert_moved([(0, 1), (4, 5)])

    def test_a_flipped_write_differs_in_one_byte(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            source = pair.source.memory.copy()
            pair.target.expect(3 * ROWS_A_PAGE)
            pair.source.poller.inject("flip", 3)
            pair.source.run_step(pair.begin(PAIRS))
            pair.target.wait(records.REACHED)
            pair.source.wait(records.SENT)
            landed = pair.target.copy()
            wrong = np.argwhere(landed[0, 5] != pair.source.pages[0, 4])
            assert wrong.tolist() == [[1]]  # the high byte of a 2-byte element
            assert landed[0, 5, 1] == pair.source.pages[0, 4, 1] ^ 0xFF
            pair.assert_moved(PAIRS[:2])
            np.testing.assert_array_equal(pair.source.memory, source)

    @pytest.mark.parametrize("nth", [1, 100, NUM_PAGES * NUM_LAYERS], ids=["first", "middle", "last"])
    def test_a_write_that_cannot_be_posted_fails_its_link(self, fabric: FabricUnderTest, nth: int) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
            pair.source.poller.inject("fail", nth)
            pair.send(1)
            _, _, code, _, call = pair.source.wait(records.LINK_FAILED, pair.link)
            assert (code, call) == (errno.EIO, FAILED_POST)
            stopped = pair.source.wait(records.STOPPED, 0)
            assert stopped[2] == (nth - 1) * PAGE_ROWS
            pair.target.wait_stat("landed_rows", (nth - 1) * PAGE_ROWS)
            pair.target.wait_rounds()
            assert pair.target.slot_rows() == (nth - 1) * PAGE_ROWS
            assert not pair.target.seen(records.REACHED)

    def test_reordered_writes_all_land_and_sent_comes_last(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
            pair.source.disturb(5, reorder=0.5)
            pair.send(1)
            assert pair.source.wait(records.SENT)[2:5:2] == (NUM_PAGES * ROWS_A_PAGE, NUM_PAGES * NUM_LAYERS)
            pair.target.wait(records.REACHED)
            pair.assert_moved(SCATTERED)

    def test_what_was_set_aside_is_dropped_by_stop(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, window=2) as pair:
            pair.source.disturb(6, reorder=0.9)
            stop_halfway(pair)

    def test_the_same_seed_loses_the_same_writes(self, fabric: FabricUnderTest) -> None:
        landed: list[npt.NDArray[np.uint8]] = []
        for _ in range(2):
            with Pair(fabric) as pair:
                pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
                pair.source.disturb(11, drop=0.2)
                pair.send(1)
                pair.source.wait(records.SENT)
                pair.target.wait_rounds(30)
                landed.append(pair.target.copy().max(axis=2))
        assert 0 < np.count_nonzero(landed[0]) < NUM_PAGES * NUM_LAYERS
        np.testing.assert_array_equal(landed[0], landed[1])

    def test_a_fault_needs_a_name_and_a_number(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            with pytest.raises(ValueError, match="no fault 'melt'"):
                pair.source.poller.inject("melt", 1)
            with pytest.raises(ValueError, match="from 1"):
                pair.source.poller.inject("drop", 0)
