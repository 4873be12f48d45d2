"""The whole algebra against a mover that goes element by element: bytes, rows, and bytes that must not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmsgr.layout import PageCursor, build_templates, page_array
from kvmsgr_protocol import Span, expected_rows, pack_pages, rows_per_position
from tests.layout.memory import Memory, Shape, Wire, fill, mask, memories, move

MAX_POSITIONS = 32
WIDTHS = st.sampled_from([(2,), (2, 2), (3, 2), (2, 2, 3)])
PAGE_TOKENS = st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 4), (1, 4), (4, 1), (2, 4), (4, 2), (2, 6), (6, 2)])


@st.composite
def shapes(draw: st.DrawFn, widths: tuple[int, ...], page_tokens: int) -> Shape:
    """Some of 4 layers and some of 3 heads."""
    first_layer, head_start = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    num_layers, num_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3 - head_start))
    return Shape(num_layers, num_heads, page_tokens, widths, first_layer, head_start, total_heads=3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Memory, Memory]:
    widths = draw(WIDTHS, label="widths")
    sides = []
    for spare, page_tokens in enumerate(draw(PAGE_TOKENS, label="page tokens")):
        shape = draw(shapes(widths, page_tokens), label="shape")
        sides.append(draw(memories(shape, -(-MAX_POSITIONS // page_tokens) + spare), label="memory"))
    return sides[0], sides[1]


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
@settings(max_examples=300, deadline=None)
@given(cases(), st.data(), st.integers(1, MAX_POSITIONS), st.integers(0, 9))
def test_runs_move_what_arrays_move(
    case: tuple[Memory, Memory], data: st.DataObject, num_tokens: int, seed: int
) -> None:
    src, dst = case
    fill(src, seed)
    fill(dst, seed + 100)
    src_tokens, dst_tokens = src.group.page_tokens, dst.group.page_tokens
    spans = data.draw(destination_spans(dst_tokens, dst.group.num_pages), label="spans")
    src_pages = np.array(data.draw(st.permutations(range(src.group.num_pages)), label="source pages"))
    stops = [*sorted(data.draw(st.sets(st.integers(0, num_tokens)), label="stops")), num_tokens - 1]

    dst_of: dict[int, tuple[int, int]] = {}  # position -> destination page and token
    for first, pages in spans:
        for index, page in enumerate(pages):
            start = (first // dst_tokens + index) * dst_tokens
            dst_of |= {at: (page, at - start) for at in range(max(first, start), start + dst_tokens)}
    moved = [position for position in dst_of if position < num_tokens - 1]
    src_of = {position: (int(src_pages[position // src_tokens]), position % src_tokens) for position in moved}
    after, rows = move(src, dst, [(src_of[position], dst_of[position]) for position in moved])
    last_page = (num_tokens - 2) // dst_tokens
    tail = [position for position in dst_of if position >= num_tokens - 1 and position // dst_tokens == last_page]
    common = src.shape.cells & dst.shape.cells
    loose = mask(dst, common, [dst_of[position] for position in tail])
    fixed = mask(dst, common, [dst_of[position] for position in moved])

    cursor = PageCursor(
        num_tokens - 1,
        spans,
        src_tokens,
        dst_tokens,
        num_src_pages=src.group.num_pages,
        num_dst_pages=dst.group.num_pages,
    )
    templates = build_templates(src.group, dst.group)
    wire = Wire(src, dst)
    start = 0
    for stop in stops:
        if stop > start:
            cursor.add_source(start, src_pages[start // src_tokens : -(-stop // src_tokens)])
        writes = cursor.advance(stop)
        before = wire.rows
        for template in templates:
            wire.carry(template, writes.pairs, [template.edge_runs(*edge) for edge in writes.edges])
        assert wire.rows - before == writes.num_positions * sum(template.rows_per_position for template in templates)
        start = max(start, stop)

    assert cursor.finished
    wired = [Span(0, first, pack_pages(pages)) for first, pages in spans]
    held = rows_per_position(dst.group, [src.group])
    assert wire.rows == rows == expected_rows(num_tokens, wired, [dst.group], rows=[held])
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
