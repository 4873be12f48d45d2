"""Conformance: every row lands once, where it belongs, and is counted exactly."""

from __future__ import annotations

import numpy as np
import pytest

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import SLOT_REACHED
from kvmsgr_protocol import immediate

from .fabrics import FabricUnderTest
from .pair import SCATTERED, Pair
from .side import (
    IMMEDIATE,
    LAYER_BYTES,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_ROWS,
    ROW_BYTES,
    ROWS_A_PAGE,
    SLOT_INDEX,
)

T28_IMMEDIATES = (0x1, 0x89ABCDEF, 0xFFFFFFFF)
T28_PAGE_BYTES = 1 << 14


class Counting:
    def test_a_step_moves_its_pages_and_nothing_else(self, fabric: FabricUnderTest) -> None:
        pairs = [(1, 2), (9, 7), (4, 63)]
        with Pair(fabric) as pair:
            pair.target.expect(3 * ROWS_A_PAGE)
            pair.source.run_step(pair.begin(pairs, tag=77))
            assert pair.target.wait(records.REACHED, 1)[2] == 3 * ROWS_A_PAGE
            assert pair.source.wait(records.SENT)[1:5:3] == (77, 3 * NUM_LAYERS)
            pair.assert_moved(pairs)
            untouched = np.setdiff1d(np.arange(NUM_PAGES), [dst for _, dst in pairs])
            assert not pair.target.copy()[:, untouched].any()
            stats = pair.target.stats()
            assert (stats["landed_rows"], stats["strays"], pair.target.slot_rows()) == (
                3 * ROWS_A_PAGE,
                0,
                3 * ROWS_A_PAGE,
            )

    def test_every_row_of_many_transfers_is_counted_once(self, fabric: FabricUnderTest) -> None:
        num_transfers = 8
        with Pair(fabric) as pair:
            pair.target.expect(num_transfers * NUM_PAGES * ROWS_A_PAGE)
            pair.send(num_transfers)
            pair.target.wait(records.REACHED)
            ended = [pair.source.wait(records.SENT)[1:3] for _ in range(num_transfers)]
            assert sorted(ended) == [(tag, NUM_PAGES * ROWS_A_PAGE) for tag in range(num_transfers)]
            pair.assert_moved(SCATTERED)
            assert not pair.target.seen(records.OVERFLOW, records.STRAY)
            assert pair.target.attempt_rows() == num_transfers * NUM_PAGES * ROWS_A_PAGE

    def test_the_last_row_makes_it_reached(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(ROWS_A_PAGE + 1)
            pair.begin([(0, 0)], ready=True, num_bumps=0)
            pair.source.wait(records.SENT)
            pair.target.wait_stat("landed_rows", ROWS_A_PAGE)
            pair.target.wait_rounds()
            assert not pair.target.seen(records.REACHED)
            edge = np.array([[0, PAGE_BYTES, ROW_BYTES, 1]], dtype=np.uint64)
            template = one_entry(pair)
            pair.source.begin([((pair.link, template, IMMEDIATE, 2, True), [])], 0, edge)
            assert pair.target.wait(records.REACHED)[2] == ROWS_A_PAGE + 1

    def test_parts_of_pages_move_as_edges(self, fabric: FabricUnderTest) -> None:
        rows = 5
        edge = np.array([[0, PAGE_BYTES, rows * ROW_BYTES, rows]], dtype=np.uint64)
        with Pair(fabric) as pair:
            pair.target.expect(rows * NUM_LAYERS)
            pair.source.begin([((pair.link, pair.template, IMMEDIATE, 1, True), [])], 0, edge)
            pair.target.wait(records.REACHED)
            moved = pair.target.copy()[:, 1]
            np.testing.assert_array_equal(moved[:, : rows * ROW_BYTES], pair.source.pages[:, 0, : rows * ROW_BYTES])
            assert not moved[:, rows * ROW_BYTES :].any()

    def test_more_rows_than_expected_are_an_overflow_once(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(PAGE_ROWS + 1)
            pair.begin([(0, 1), (2, 0)], ready=True, num_bumps=0)
            assert pair.target.wait(records.OVERFLOW)[1:5:3] == (1, SLOT_INDEX)
            pair.target.wait_stat("landed_rows", 2 * ROWS_A_PAGE)
            assert not pair.target.seen(records.OVERFLOW, records.REACHED)

    def test_rows_for_nobody_are_strays_reported_once(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.begin([(0, 1), (2, 0)], ready=True, num_bumps=0)
            assert pair.target.wait(records.STRAY)[1] == SLOT_INDEX
            pair.target.wait_stat("landed_rows", 2 * ROWS_A_PAGE)
            assert not pair.target.seen(records.STRAY)
            assert pair.target.stats()["strays"] == 2 * NUM_LAYERS

    def test_an_awaited_slot_tells_when_its_rows_are_there(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(4 * ROWS_A_PAGE)
            assert pair.target.await_slot(ROWS_A_PAGE) == 0
            pair.begin([(0, 0)], ready=True, num_bumps=0)
            assert pair.target.wait(SLOT_REACHED)[1:3] == (SLOT_INDEX, ROWS_A_PAGE)
            assert pair.target.await_slot(ROWS_A_PAGE) == ROWS_A_PAGE

    @pytest.mark.parametrize("imm", T28_IMMEDIATES, ids=hex)
    @pytest.mark.parametrize("size", ["1 byte a row", "1 page"])
    def test_t28_immediates_arrive_as_they_were_sent(self, fabric: FabricUnderTest, imm: int, size: str) -> None:
        """And the bytes are there when they are counted, even if the receiver was idle at first."""
        slot, generation, rows = immediate.unpack(imm)
        num_bytes = rows if size == "1 byte a row" else T28_PAGE_BYTES
        with Pair(fabric) as pair:
            pair.target.state.open_attempt(1, rows, "t28")
            pair.target.state.link_slot(slot, generation, 1)
            order = (pair.link, one_entry(pair), immediate.base(slot, generation), 1, True)
            edge = np.array([[0, LAYER_BYTES, num_bytes, rows]], dtype=np.uint64)
            pair.target.wait_rounds()
            pair.source.begin([(order, [])], 0, edge)
            assert pair.target.wait(records.REACHED)[2] == rows
            moved = pair.target.copy().reshape(-1)[LAYER_BYTES : LAYER_BYTES + num_bytes]
            np.testing.assert_array_equal(moved, pair.source.memory[:num_bytes])
            assert pair.target.state.slot_rows(slot, generation) == rows
            assert pair.target.stats()["landed_writes"] == 1

    def test_t28_a_write_of_one_byte(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(1)
            edge = np.array([[3, 5, 1, 1]], dtype=np.uint64)
            pair.source.begin([((pair.link, one_entry(pair), IMMEDIATE, 1, True), [])], 0, edge)
            pair.target.wait(records.REACHED)
            moved = pair.target.copy().reshape(-1)
            assert moved[5] == pair.source.memory[3]
            assert np.count_nonzero(moved) == 1


def one_entry(pair: Pair) -> int:
    """A template of rows of one byte, for edges alone."""
    runs, entries = np.zeros((0, 4), dtype=np.uint64), np.zeros((1, 5), dtype=np.int64)
    return pair.source.poller.add_template(pair.link, runs, (0, 1, 0), (0, 1, 0), entries, 1, 1)
