"""The whole algebra against a mover that goes element by element: bytes, rows, and bytes that must not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmsgr.layout import PageCursor, build_templates, page_array
from kvmsgr_protocol import Span, expected_rows, pack_pages
from tests.layout.memory import Memory, Shape, Wire, fill, mask, memories, move

NUM_PAGES = 8

SHAPES = st.builds(
    Shape,
    num_layers=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    page_tokens=st.integers(1, 4),
    widths=st.one_of(st.just((2,)), st.just((2, 2)), st.just((3, 2)), st.just((2, 2, 3))),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Memory, Memory]:
    shape = draw(SHAPES, label="shape")
    return draw(memories(shape, NUM_PAGES), label="source"), draw(memories(shape, NUM_PAGES + 1), label="destination")


@st.composite
def destination_spans(draw: st.DrawFn, page_tokens: int, num_pages: int) -> list[tuple[int, list[int]]]:
    """Spans with gaps between them, which may begin inside a page."""
    free = draw(st.permutations(range(num_pages)), label="free pages")
    spans, position = [], 0
    for _ in range(draw(st.integers(0, 3), label="spans")):
        first = position + draw(st.integers(0, page_tokens), label="gap")
        taken, free = free[:2], free[2:]
        spans.append((first, taken))
        position = (first // page_tokens + len(taken)) * page_tokens
    return draw(st.permutations(spans))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases(), st.data(), st.integers(1, 4 * NUM_PAGES), st.integers(0, 9))
def test_runs_move_what_arrays_move(
    case: tuple[Memory, Memory], data: st.DataObject, num_tokens: int, seed: int
) -> None:
    src, dst = case
    fill(src, seed)
    fill(dst, seed + 100)
    page_tokens = src.group.page_tokens
    num_tokens = min(num_tokens, page_tokens * NUM_PAGES)
    spans = data.draw(destination_spans(page_tokens, dst.group.num_pages), label="spans")
    src_pages = np.array(data.draw(st.permutations(range(NUM_PAGES)), label="source pages"))
    stops = [*sorted(data.draw(st.sets(st.integers(0, num_tokens)), label="stops")), num_tokens - 1]

    dst_of: dict[int, int] = {}  # position -> destination page
    for first, pages in spans:
        for index, page in enumerate(pages):
            start = (first // page_tokens + index) * page_tokens
            dst_of |= dict.fromkeys(range(max(first, start), start + page_tokens), page)
    moved = [position for position in dst_of if position < num_tokens - 1]
    after, rows = move(
        src, dst, [(src_pages[position // page_tokens], dst_of[position], position % page_tokens) for position in moved]
    )
    last_page = (num_tokens - 2) // page_tokens
    tail = [position for position in dst_of if position >= num_tokens - 1 and position // page_tokens == last_page]
    loose = mask(dst, [(dst_of[position], position % page_tokens) for position in tail])
    fixed = mask(dst, [(dst_of[position], position % page_tokens) for position in moved])

    cursor = PageCursor(
        num_tokens - 1, spans, page_tokens, page_tokens, num_src_pages=NUM_PAGES, num_dst_pages=dst.group.num_pages
    )
    templates = build_templates(src.group, dst.group)
    wire = Wire(src, dst)
    start = 0
    for stop in stops:
        if stop > start:
            cursor.add_source(start, src_pages[start // page_tokens : -(-stop // page_tokens)])
        writes = cursor.advance(stop)
        before = wire.rows
        for template in templates:
            wire.carry(template, writes.pairs, [template.edge_runs(*edge) for edge in writes.edges])
        assert wire.rows - before == writes.num_positions * sum(template.rows_per_position for template in templates)
        start = max(start, stop)

    assert cursor.finished
    wired = [Span(0, first, pack_pages(pages)) for first, pages in spans]
    assert wire.rows == rows == expected_rows(num_tokens, wired, [dst.group])
    assert all(page_array(span.pages).tolist() == pages for span, (_, pages) in zip(wired, spans, strict=True))
    same = dst.arena == after
    assert same[~loose].all()
    assert (wire.times_written[fixed] == 1).all()
    assert (wire.times_written <= 1).all()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_runs_are_the_longest(case: tuple[Memory, Memory], data: st.DataObject) -> None:
    """No run of a template continues another one on both sides, and none is split."""
    for template in build_templates(case[0].group, case[1].group):
        runs = template.runs.astype(np.int64)
        ends = {(src + num_bytes, dst + num_bytes) for src, dst, num_bytes, _ in runs.tolist()}
        assert not ends & {(src, dst) for src, dst, _, _ in runs.tolist()}
        assert (runs[:, 2] == runs[:, 3] * template.row_bytes).all()
        assert (np.diff(template.entries[:, 4]) >= 0).all()
