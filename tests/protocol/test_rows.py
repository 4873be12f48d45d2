"""The row count, against counting position by position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr_protocol import Span, expected_rows, pack_pages, span_positions
from tests.protocol.samples import context, group


def count_positions(num_tokens: int, spans: list[Span], page_tokens: int) -> int:
    """Positions before the last that some page of a span holds."""
    held = set()
    for span in spans:
        for index in range(span.num_pages):
            start = (span.first_token // page_tokens + index) * page_tokens
            held |= {position for position in range(start, start + page_tokens) if position >= span.first_token}
    return len(held & set(range(num_tokens - 1)))


@st.composite
def disjoint_spans(draw: st.DrawFn, page_tokens: int) -> list[Span]:
    """Up to 3 spans of one group, in any order."""
    spans, position = [], 0
    for _ in range(draw(st.integers(0, 3))):
        first = position + draw(st.integers(0, 2 * page_tokens))
        num_pages = draw(st.integers(0, 3))
        spans.append(Span(0, first, pack_pages(range(num_pages))))
        position = (first // page_tokens + num_pages) * page_tokens if num_pages else first
    return draw(st.permutations(spans))


@given(st.data(), st.integers(1, 40), st.integers(1, 5))
def test_rows_equal_a_count_of_positions(data: st.DataObject, num_tokens: int, page_tokens: int) -> None:
    spans = data.draw(disjoint_spans(page_tokens))
    layout = group(page_tokens=page_tokens, num_heads=2, num_planes=2, num_layers=3)
    assert expected_rows(num_tokens, spans, [layout]) == count_positions(num_tokens, spans, page_tokens) * 2 * 2 * 3


def test_groups_and_context_add_up() -> None:
    groups = [group(4, num_heads=2), group(8, num_heads=1, num_planes=1, num_layers=5, name="latent")]
    spans = [Span(0, 0, pack_pages([3, 4, 5])), Span(1, 8, pack_pages([7]))]
    assert expected_rows(11, spans, groups) == 10 * 12 + 2 * 5
    assert expected_rows(11, spans, groups, [context(num_units=3), context("logits", 2)]) == 10 * 12 + 2 * 5 + 5


def test_a_full_prefix_hit_expects_its_context_alone() -> None:
    assert expected_rows(100, [], [group()], [context(num_units=3)]) == 3
    assert expected_rows(100, [Span(0, 99, pack_pages([1]))], [group()], [context(num_units=3)]) == 3


def test_a_prompt_of_one_token_expects_nothing() -> None:
    assert expected_rows(1, [Span(0, 0, pack_pages([1]))], [group()], [context()]) == 0


def test_the_last_position_is_never_received() -> None:
    assert span_positions(Span(0, 0, pack_pages([1, 2])), 4, 8) == range(7)
    assert span_positions(Span(0, 0, pack_pages([1, 2])), 4, 9) == range(8)
    assert span_positions(Span(0, 6, pack_pages([1, 2])), 4, 100) == range(6, 12)
    assert span_positions(Span(0, 6, b""), 4, 100) == range(6, 6)


def test_overlapping_spans_are_refused() -> None:
    spans = [Span(0, 4, pack_pages([1])), Span(0, 0, pack_pages([2, 3]))]
    with pytest.raises(ValueError, match=r"spans of group 0 \('kv'\) overlap: positions 0..7 and 4..7"):
        expected_rows(100, spans, [group(4)])
    # where they overlap beyond the prompt, nothing is received twice
    assert expected_rows(5, spans, [group(4)]) == 4 * 12


def test_unknown_groups_and_empty_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="a span names group 1, there are 1"):
        expected_rows(9, [Span(1, 0, b"")], [group()])
    with pytest.raises(ValueError, match="num_tokens is 0"):
        expected_rows(0, [], [group()])
