"""The page cursor: each page once, when it is final, and nothing without its source."""

from __future__ import annotations

import numpy as np
import pytest

from kvmsgr.errors import LayoutError
from kvmsgr.layout import PageCursor
from kvmsgr.layout.pagetable import Pages


def cursor(num_positions: int = 10, spans: list[tuple[int, Pages]] | None = None) -> PageCursor:
    """Pages of 4 tokens, 50 at the source and 100 at the destination."""
    spans = [(0, [90, 91, 92])] if spans is None else spans
    return PageCursor(num_positions, spans, 4, 4, num_src_pages=50, num_dst_pages=100)


def test_pages_go_out_once_when_they_are_final() -> None:
    request = cursor()
    request.add_source(0, [1, 2])
    assert request.advance(3).pairs.shape == (0, 2)
    first = request.advance(7)
    assert str(first.pairs.dtype) == "int32"
    assert (first.pairs.tolist(), first.edges, first.num_positions) == ([[1, 90]], [], 4)
    assert request.advance(7).num_positions == 0
    request.add_source(7, np.array([2, 3], np.int64))
    assert not request.finished
    last = request.advance(10)
    assert (last.pairs.tolist(), last.edges, last.num_positions) == ([[2, 91]], [(3, 92, 0, 2, True)], 6)
    assert request.finished
    assert request.advance(3).num_positions == request.advance(10).num_positions == 0


def test_a_step_that_did_not_run_gives_its_pages_again() -> None:
    request = cursor()
    request.add_source(0, [1, 2, 3])
    request.advance(4)
    mark = request.mark()
    taken = request.advance(10)
    request.restore(mark)
    assert not request.finished
    again = request.advance(10)
    assert (again.pairs.tolist(), again.edges) == (taken.pairs.tolist(), taken.edges)


def test_a_step_that_did_not_run_leaves_no_source_page_behind() -> None:
    request = cursor()
    mark = request.mark()
    request.add_source(0, [1, 2, 3])
    request.restore(mark)
    request.add_source(0, [4, 5, 6])
    assert request.advance(4).pairs[:, 0].tolist() == [4]


def test_a_computed_last_token_is_not_moved() -> None:
    request = cursor()
    request.add_source(0, [1, 2, 3])
    writes = request.advance(11)
    assert (writes.pairs.tolist(), writes.edges) == ([[1, 90], [2, 91]], [(3, 92, 0, 2, True)])


def test_a_prompt_of_one_token_is_finished_at_once() -> None:
    request = cursor(0)
    assert request.finished
    request.add_source(0, [1])
    assert request.advance(1).num_positions == 0


def test_positions_outside_the_destination_are_skipped() -> None:
    request = cursor(spans=[(6, [91])])
    request.add_source(4, [2])
    writes = request.advance(10)
    assert (writes.pairs.tolist(), writes.edges, writes.num_positions) == ([], [(2, 91, 2, 4, False)], 2)


def test_a_span_may_begin_and_end_inside_one_page() -> None:
    request = cursor(3, [(1, [7])])
    request.add_source(1, [5])
    assert request.advance(3).edges == [(5, 7, 1, 3, True)]


def test_spans_that_hold_nothing_are_ignored() -> None:
    request = cursor(10, [(0, []), (10, [99, 10**6]), (400, [1]), (4, [3, 4, 5, -1])])
    request.add_source(4, [1, 2])
    request.add_source(99, [-7])
    assert request.advance(10).pairs.tolist() == [[1, 3]]


def test_a_missing_source_page_is_named_and_nothing_is_lost() -> None:
    request = cursor()
    request.add_source(0, [1])
    request.add_source(5, [2])
    with pytest.raises(LayoutError, match="position 4 is computed, and no source page was given for it"):
        request.advance(8)
    request.add_source(4, [2])
    assert request.advance(8).pairs.tolist() == [[1, 90], [2, 91]]


def test_a_source_page_may_be_named_again_but_not_changed() -> None:
    request = cursor()
    request.add_source(0, [1, 2])
    request.add_source(4, [2, 3])
    with pytest.raises(LayoutError, match="source page 9 for the positions from 4 on: another span has given"):
        request.add_source(0, [1, 9])


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, [1, 2]), (6, [3])], "destination page 3 for the positions from 4 on: another span has given"),
        ([(0, [1, 2]), (4, [2])], "destination page 2 for the positions from 4 on: another span has given"),
        ([(0, [1, 2, 1])], "destination page 1 is named twice"),
        ([(0, [1, 100])], "destination page 100 for the positions from 4 on: the group has 100 pages"),
        ([(0, [-1])], "destination page -1 for the positions from 0 on: the group has 100 pages"),
        ([(-1, [1])], "destination span from position -1"),
        ([(0, [[1, 2]])], "a flat list of integers"),
        ([(0, [1.5])], "pages of type float64"),
    ],
)
def test_bad_destinations_are_refused(spans: list[tuple[int, Pages]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        cursor(spans=spans)


def test_a_bad_source_is_refused() -> None:
    with pytest.raises(LayoutError, match="source page 50 for the positions from 0 on: the group has 50 pages"):
        cursor().add_source(0, [50])
