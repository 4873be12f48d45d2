"""Bytes, rows and records of transfers over real providers."""

from __future__ import annotations

import numpy as np
import pytest

from kvmsgr._ext import native
from tests.native.loopback import (
    IMMEDIATE,
    LAYER_BYTES,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_ROWS,
    ROW_BYTES,
    Pair,
    add_template,
    begin,
    connect,
)

ALL_ROWS = PAGE_ROWS * NUM_LAYERS
SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]


def test_a_step_moves_its_pages_and_nothing_else(pair: Pair) -> None:
    pairs = [(1, 2), (9, 7), (4, 63)]
    pair.expect(len(pairs))
    pair.run_step(pair.begin(pairs, tag=77))
    assert pair.target.wait(native.REACHED, 1)[2] == 3 * ALL_ROWS
    kind, tag, rows, _, writes = pair.source.wait(native.SENT)
    assert (kind, tag, rows, writes) == (native.SENT, 77, 3 * ALL_ROWS, 3 * NUM_LAYERS)
    pair.assert_moved(pairs)
    untouched = np.setdiff1d(np.arange(NUM_PAGES), [dst for _, dst in pairs])
    assert not pair.target.pages[:, untouched].any()


def test_layers_go_as_they_are_bumped(pair: Pair) -> None:
    pair.expect_rows(2 * PAGE_ROWS)
    ticket = pair.begin([(0, 0)])
    pair.source.counter.start(ticket)
    pair.source.counter.bump()
    pair.source.counter.bump()
    pair.target.wait(native.REACHED)
    assert pair.target.pages[:2, 0].all()
    assert not pair.target.pages[2:, 0].any()
    pair.source.poller.abandon(0, ticket)
    assert pair.source.wait(native.STOPPED)[2] == 2 * PAGE_ROWS


def test_ready_transfers_need_no_step(pair: Pair) -> None:
    pair.expect(1)
    pair.begin([(3, 3)], ready=True, num_bumps=0)
    pair.target.wait(native.REACHED)
    pair.source.wait(native.SENT)
    pair.source.wait(native.STEP_ENDED)
    pair.assert_moved([(3, 3)])


def test_neighbours_are_merged(pair: Pair) -> None:
    pairs = [(page, page + 1) for page in range(NUM_PAGES - 1)]
    pair.expect(len(pairs))
    pair.begin(pairs, ready=True, num_bumps=0)
    pair.target.wait(native.REACHED)
    assert pair.source.wait(native.SENT)[4] == NUM_LAYERS
    pair.assert_moved(pairs)


def test_merging_stops_at_the_limit(provider: str) -> None:
    with Pair(provider, max_write_bytes=4 * PAGE_BYTES) as pair:
        pairs = [(page, page) for page in range(10)]
        pair.expect(len(pairs))
        pair.begin(pairs, ready=True, num_bumps=0)
        pair.target.wait(native.REACHED)
        assert pair.source.wait(native.SENT)[4] == 3 * NUM_LAYERS
        pair.assert_moved(pairs)


@pytest.mark.parametrize(("window", "link_bytes"), [(1, 1 << 20), (64, 1), (3, 2 * PAGE_BYTES)])
def test_small_windows_still_move_everything(provider: str, window: int, link_bytes: int) -> None:
    with Pair(provider, window=window, link_bytes=link_bytes) as pair:
        pair.expect(NUM_PAGES)
        pair.begin(SCATTERED, ready=True, num_bumps=0)
        pair.target.wait(native.REACHED)
        assert pair.source.wait(native.SENT)[4] == NUM_PAGES * NUM_LAYERS
        pair.assert_moved(SCATTERED)


def test_edges_move_parts_of_pages(pair: Pair) -> None:
    rows = 5
    edges = np.array([[0, PAGE_BYTES, rows * ROW_BYTES, rows]], dtype=np.uint64)
    pair.expect_rows(rows * NUM_LAYERS)
    order = (pair.link, pair.template, IMMEDIATE, 1, True)
    begin(pair.source, [(order, [])], 0, edges=edges)
    pair.target.wait(native.REACHED)
    moved = pair.target.pages[:, 1]
    np.testing.assert_array_equal(moved[:, : rows * ROW_BYTES], pair.source.pages[:, 0, : rows * ROW_BYTES])
    assert not moved[:, rows * ROW_BYTES :].any()


def test_long_runs_are_split_between_rows(provider: str) -> None:
    with Pair(provider, max_write_bytes=3 * ROW_BYTES + 1) as pair:
        pair.expect(1)
        pair.begin([(0, 0)], ready=True, num_bumps=0)
        pair.target.wait(native.REACHED)
        assert pair.source.wait(native.SENT)[2:5:2] == (ALL_ROWS, 6 * NUM_LAYERS)
        pair.assert_moved([(0, 0)])


def test_a_small_transfer_does_not_wait_for_a_large_one(provider: str) -> None:
    with Pair(provider, window=4) as pair:
        pair.expect(NUM_PAGES + 1)
        large = ((pair.link, pair.template, IMMEDIATE, 1, True), SCATTERED)
        small = ((pair.link, pair.template, IMMEDIATE, 2, True), [(0, 0)])
        begin(pair.source, [large, small], num_bumps=0)
        assert pair.source.wait(native.SENT)[1] == 2
        assert pair.source.wait(native.SENT)[1] == 1


def test_two_links_share_a_poller(pair: Pair) -> None:
    second, _ = connect(pair.source, pair.target)
    template = add_template(pair.source, second)
    pair.expect(2 * NUM_PAGES)
    first = ((pair.link, pair.template, IMMEDIATE, 1, True), SCATTERED)
    other = ((second, template, IMMEDIATE, 2, True), SCATTERED)
    begin(pair.source, [first, other], num_bumps=0)
    pair.target.wait(native.REACHED)
    assert {pair.source.wait(native.SENT)[1] for _ in range(2)} == {1, 2}
    pair.assert_moved(SCATTERED)


def test_stop_drops_what_is_not_posted(pair: Pair) -> None:
    ticket = pair.begin([(0, 0)], tag=4)
    pair.source.poller.stop(pair.link, 4)
    assert pair.source.wait(native.STOPPED, 4)[2] == 0
    pair.run_step(ticket)
    following = pair.begin([(1, 1)], tag=5)
    pair.expect(1)
    pair.run_step(following)
    pair.target.wait(native.REACHED)
    assert pair.source.wait(native.STEP_ENDED)[2] == ticket
    assert not pair.target.pages[:, 0].any()


def test_the_trace_names_every_entry_in_order(pair: Pair) -> None:
    pair.source.poller.trace(16)
    before = native.monotonic_ns()
    pair.expect(2)
    pair.run_step(pair.begin([(0, 1), (5, 5)], tag=9))
    pair.source.wait(native.SENT)
    marks = pair.source.poller.take_trace()
    assert [mark[:2] for mark in marks] == [(9, layer) for layer in range(NUM_LAYERS)]
    assert all(entry < bumps <= NUM_LAYERS for _, entry, bumps, _ in marks)
    stamps = [mark[3] for mark in marks]
    assert before < stamps[0]
    assert stamps == sorted(stamps)
    assert pair.source.poller.take_trace() == []


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 0), (NUM_PAGES, 1)], "write 1 of entry 3 leaves its source region"),
        ([(0, 0), (1, NUM_PAGES)], "write 1 of entry 3 leaves its destination region"),
        ([(-1, 0)], "page pair 0 is"),
        ([], "nothing to move"),
    ],
)
def test_what_leaves_a_region_is_refused(pair: Pair, pairs: list[tuple[int, int]], message: str) -> None:
    good = ((pair.link, pair.template, IMMEDIATE, 1, True), [(0, 0)])
    bad = ((pair.link, pair.template, IMMEDIATE, 2, True), pairs)
    with pytest.raises(ValueError, match=f"transfer 1: .*{message}"):
        begin(pair.source, [good, bad], num_bumps=0)
    assert pair.source.poller.stats()["posted_writes"] == 0
    assert native.debug_counters()["transfers"] == 0


def test_edges_are_checked_too(pair: Pair) -> None:
    order = (pair.link, pair.template, IMMEDIATE, 1, True)
    last = NUM_LAYERS * LAYER_BYTES - ROW_BYTES
    for edge in ([last, 0, 2 * ROW_BYTES, 2], [0, last, 2 * ROW_BYTES, 2], [0, 0, ROW_BYTES, 0], [1 << 63, 0, 1, 1]):
        edges = np.array([edge], dtype=np.uint64)
        with pytest.raises(ValueError, match="transfer 0: "):
            begin(pair.source, [(order, [])], 0, edges=edges)


def test_arguments_that_make_no_sense_are_refused(pair: Pair) -> None:
    order = (pair.link, pair.template, 5 << 18, 1, False)
    with pytest.raises(ValueError, match="waits for signal 4 of a step with 3 bumps"):
        begin(pair.source, [(order, [(0, 0)])], num_bumps=3)
    with pytest.raises(ValueError, match="has no template 5"):
        begin(pair.source, [((pair.link, 5, 0, 1, False), [(0, 0)])])
    with pytest.raises(ValueError, match="already carries rows"):
        begin(pair.source, [((pair.link, pair.template, 1, 1, False), [(0, 0)])])
    for parts, message in (
        ([], "a step on 0 layer counters"),
        ([(1, 1)], "layer counter 1 of 1"),
        ([(0, 1), (0, 1)], "two parts"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.arm(parts, [], [])
    good = [0, *order, 0, 1, 0, 0]
    for column, wrong in ((0, 1), (0, -1), (3, 1 << 32), (5, 2), (6, -1), (6, 2), (7, 2), (9, 1)):
        bad = [*good]
        bad[column] = wrong
        with pytest.raises(ValueError, match="transfer 1: "):
            pair.arm([(0, NUM_LAYERS)], [good, bad], [(0, 0)])
    with pytest.raises(ValueError, match="orders has 10 columns"):
        pair.arm([(0, NUM_LAYERS)], [good[:9]], [(0, 0)])
    with pytest.raises(ValueError, match="was watched"):
        pair.source.poller.add_counter(pair.source.counter)
    assert native.debug_counters()["transfers"] == native.debug_counters()["steps"] == 0
