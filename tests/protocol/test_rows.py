"""The row count, against counting position by position."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmsgr_protocol import (
    GroupLayout,
    Span,
    expected_rows,
    group_positions,
    pack_pages,
    rows_per_position,
    span_positions,
)
from tests.protocol.samples import context, group, state


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


# Legs


def shard(layers: Iterable[int], heads: range) -> GroupLayout:
    """What a rank holds of a group of 8 heads, K and V."""
    layout = group(num_heads=len(heads), num_layers=max(layers, default=0) + 1)
    entries = [entry for entry in layout.entries if entry.layer in layers]
    return replace(layout, head_start=heads.start, total_heads=8, entries=entries)


def cells(layout: GroupLayout) -> set[tuple[int, int, int]]:
    """(layer, plane, head) of each row of a position."""
    heads = range(layout.head_start, layout.head_start + layout.num_heads)
    return {(entry.layer, entry.plane, head) for entry in layout.entries for head in heads}


shards = st.builds(
    shard,
    st.sets(st.integers(0, 4), min_size=1),
    st.tuples(st.integers(0, 7), st.integers(1, 8)).map(lambda pair: range(pair[0], min(8, sum(pair)))),
)


@given(shards, st.lists(shards, max_size=4))
def test_a_leg_counts_what_somebody_holds_once(destination: GroupLayout, sources: list[GroupLayout]) -> None:
    held: set[tuple[int, int, int]] = set().union(*map(cells, sources))
    assert rows_per_position(destination, sources) == len(cells(destination) & held)
    assert rows_per_position(destination) == rows_per_position(destination, [destination]) == len(cells(destination))


@given(shards, st.integers(0, 5), st.integers(0, 8))
def test_legs_add_up_to_the_whole(destination: GroupLayout, layer: int, head: int) -> None:
    below, above = range(layer), range(layer, 6)
    parts = [
        shard(layers, heads)
        for layers in (below, above)
        for heads in (range(head), range(head, 8))
        if len(layers) and len(heads)
    ]
    spans = [Span(0, 2, pack_pages([4, 5]))]
    legs = [expected_rows(8, spans, [destination], rows=[rows_per_position(destination, [part])]) for part in parts]
    assert sum(legs) == expected_rows(8, spans, [destination])


def test_each_group_has_its_own_rows() -> None:
    groups = [group(4), group(8, num_heads=1, num_planes=1, num_layers=5, name="latent")]
    spans = [Span(0, 0, pack_pages([3, 4, 5])), Span(1, 8, pack_pages([7]))]
    assert expected_rows(11, spans, groups, [context(num_units=3)], rows=[7, 0]) == 10 * 7 + 3
    with pytest.raises(ValueError, match="shorter"):
        expected_rows(11, spans, groups, rows=[7])


# Recurrent groups


def test_a_state_has_one_row_a_head_layer_and_plane_whatever_the_length() -> None:
    spans = [Span(0, 0, pack_pages([7]))]
    assert expected_rows(2, spans, [state()]) == expected_rows(10_000, spans, [state()]) == 4
    assert expected_rows(1, spans, [state()]) == 0
    assert expected_rows(9, [], [state()]) == 0
    assert expected_rows(9, spans, [state()], rows=[1]) == 1
    assert group_positions(9, [Span(1, 5, b""), *spans], 0, state()) == 1
    assert group_positions(1, spans, 0, state()) == 0


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 0, pack_pages([7, 8]))],
        [Span(0, 0, pack_pages([7])), Span(0, 0, pack_pages([8]))],
        [Span(0, 3, pack_pages([7]))],
    ],
)
def test_a_state_takes_one_page_from_position_0(spans: list[Span]) -> None:
    with pytest.raises(
        ValueError, match=r"group 0 \('state'\) is recurrent: . pages, first_token .*; it takes one page"
    ):
        expected_rows(9, spans, [state()])
