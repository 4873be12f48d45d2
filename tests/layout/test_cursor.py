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


def test_small_source_pages_fill_a_large_one() -> None:
    request = PageCursor(11, [(2, [7, 9])], 2, 8, num_src_pages=50, num_dst_pages=10)
    request.add_source(2, [21, 22, 23])
    first = request.advance(5)
    assert (first.pairs.tolist(), first.edges, first.num_positions) == ([[21, 7 * 4 + 1]], [], 2)
    request.add_source(8, [24, 25])
    last = request.advance(11)
    assert last.pairs.tolist() == [[22, 30], [23, 31], [24, 36]]
    assert (last.edges, last.num_positions) == ([(25, 37, 0, 1, True)], 7)
    assert (request.finished, request.num_sources) == (True, 5)


def test_a_large_source_page_fills_small_ones() -> None:
    request = PageCursor(11, [(1, [5, 3, 4]), (8, [0, 9])], 8, 2, num_src_pages=50, num_dst_pages=10)
    request.add_source(0, [6])
    first = request.advance(7)
    assert (first.pairs.tolist(), first.edges) == ([[25, 3], [26, 4]], [(24, 5, 1, 2, False)])
    request.add_source(7, [6, 2])
    last = request.advance(11)
    assert (last.pairs.tolist(), last.edges) == ([[8, 0]], [(9, 9, 0, 1, True)])


def test_a_source_page_that_is_held_in_part_is_not_held_before() -> None:
    request = PageCursor(8, [(0, [1, 2, 3, 4])], 8, 2, num_src_pages=50, num_dst_pages=10)
    request.add_source(3, [6])
    with pytest.raises(LayoutError, match="position 0 is computed"):
        request.advance(2)
    request.add_source(0, [6])
    assert len(request.advance(8).pairs) == 4


def test_what_was_added_before_a_mark_stays() -> None:
    request = cursor()
    request.add_source(2, [1])
    early = request.mark()
    request.add_source(0, [1, 2])
    late = request.mark()
    request.add_source(0, [1, 2, 3])
    assert request.num_sources == 3
    request.restore(late)
    assert request.num_sources == 2
    assert request.advance(8).num_positions == 8
    request.restore(early)
    assert request.num_sources == 1
    with pytest.raises(LayoutError, match="position 0 is computed"):
        request.advance(4)
    request.add_source(0, [1, 4, 3])
    assert request.advance(10).pairs.tolist() == [[1, 90], [4, 91]]


@pytest.mark.parametrize(
    ("src_tokens", "dst_tokens", "num_src_pages", "num_dst_pages", "message"),
    [
        (16, 1, 1 << 27, 16, None),
        (16, 1, (1 << 27) + 1, 16, "134217729 source pages of 16 units each"),
        (1, 16, 16, (1 << 27) + 1, "134217729 destination pages of 16 units each"),
    ],
)
def test_units_are_numbered_with_31_bits(
    src_tokens: int, dst_tokens: int, num_src_pages: int, num_dst_pages: int, message: str | None
) -> None:
    def last_unit() -> PageCursor:
        return PageCursor(
            16, [(0, range(16))], src_tokens, dst_tokens, num_src_pages=num_src_pages, num_dst_pages=num_dst_pages
        )

    if message is None:
        request = last_unit()
        request.add_source(0, [num_src_pages - 1])
        assert request.advance(16).pairs[-1].tolist() == [2**31 - 1, 15]
    else:
        with pytest.raises(LayoutError, match=message):
            last_unit()


def recurrent(num_positions: int = 100, spans: list[tuple[int, Pages]] | None = None) -> PageCursor:
    spans = [(0, [90])] if spans is None else spans
    return PageCursor(num_positions, spans, 1, 1, num_src_pages=50, num_dst_pages=100, recurrent=True)


def test_a_state_goes_out_with_the_last_position() -> None:
    request = recurrent()
    request.add_source(0, [7])
    assert request.advance(64).num_positions == 0
    mark = request.mark()
    request.add_source(64, [7])
    writes = request.advance(100)
    assert (writes.pairs.tolist(), writes.edges, writes.num_positions) == ([[7, 90]], [], 1)
    assert (request.finished, request.num_sources) == (True, 1)
    request.restore(mark)
    assert request.advance(101).num_positions == 1
    assert request.advance(101).num_positions == 0


def test_a_state_may_be_named_late_or_not_be_wanted() -> None:
    request = recurrent()
    with pytest.raises(LayoutError, match="position 0 is computed"):
        request.advance(100)
    request.add_source(99, [7])
    assert request.advance(100).pairs.tolist() == [[7, 90]]
    for unwanted in (recurrent(spans=[]), recurrent(spans=[(0, [])]), recurrent(0)):
        unwanted.add_source(0, [7])
        assert unwanted.advance(100).num_positions == 0
        assert unwanted.finished


def test_a_recurrent_group_has_one_page() -> None:
    request = recurrent()
    request.add_source(0, [7])
    with pytest.raises(LayoutError, match="source page 8 for the positions from 0 on: another span has given"):
        request.add_source(50, [8])
    with pytest.raises(LayoutError, match="source span with 2 pages: a recurrent group has one page"):
        request.add_source(50, [7, 8])
    with pytest.raises(LayoutError, match="source span from position -1"):
        request.add_source(-1, [7])
    for spans in ([(0, [1, 2])], [(1, [1])]):
        with pytest.raises(LayoutError, match="a recurrent group has one page, from position 0"):
            recurrent(spans=[(first, pages) for first, pages in spans])
    with pytest.raises(LayoutError, match="another span has given"):
        recurrent(spans=[(0, [1]), (0, [2])])
