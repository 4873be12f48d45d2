"""Two layers or planes of a cache never share a byte, however they are interleaved."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr.errors import LayoutError
from kvmsgr.layout import describe_group
from kvmsgr.layout.overlap import check_apart
from kvmsgr.types import RawArray
from kvmsgr_protocol import GroupLayout, LayerEntry, PlaneLayout


@st.composite
def groups(draw: st.DrawFn) -> GroupLayout:
    """Rows that lie apart within an entry, and entries anywhere."""
    counts = [draw(st.integers(1, 3)) for _ in range(3)]
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    strides, least = [0, 0, 0], max(widths)
    for axis in draw(st.permutations(range(3))):
        strides[axis] = least + draw(st.integers(0, 3))
        least = strides[axis] * (counts[axis] - 1) + least
    planes = [PlaneLayout(width, *strides) for width in widths]
    num_layers = draw(st.integers(1, 3))
    entries = [
        LayerEntry(layer, plane, draw(st.integers(0, 1)), draw(st.integers(0, 40)), layer + 1)
        for layer, plane in product(range(num_layers), range(len(planes)))
    ]
    return GroupLayout("kv", "int8", 1, counts[2], counts[0], 0, counts[1], counts[1], planes, entries)


def share_bytes(group: GroupLayout) -> bool:
    """The same, byte by byte."""
    taken: set[tuple[int, int]] = set()
    for entry in group.entries:
        plane = group.planes[entry.plane]
        own = {
            (entry.region, entry.offset_bytes + page * plane.page_stride_bytes + head * plane.head_stride_bytes + at)
            for page, head, token in product(range(group.num_pages), range(group.num_heads), range(group.page_tokens))
            for at in range(token * plane.token_stride_bytes, token * plane.token_stride_bytes + plane.row_bytes)
        }
        if own & taken:
            return True
        taken |= own
    return False


@given(groups())
def test_it_is_found_exactly_when_a_byte_is_shared(group: GroupLayout) -> None:
    if share_bytes(group):
        with pytest.raises(LayoutError, match="share bytes"):
            check_apart(group)
    else:
        check_apart(group)


def array(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> RawArray:
    return RawArray(address, shape, strides, "int8", 1)


def test_interleaved_views_of_one_tensor_are_fine() -> None:
    keys, values = (array(4096 + at, (3, 2, 4, 8), (2 * 64, 2 * 32, 16, 1)) for at in (0, 8))
    describe_group([[keys], [values]], "page head token dim", name="kv")


def test_a_tensor_that_begins_inside_another_is_refused() -> None:
    keys, values = (array(4096 + at, (3, 2, 4, 8), (64, 32, 8, 1)) for at in (0, 96))
    with pytest.raises(LayoutError, match="plane 0 of layer 0 and plane 1 of layer 0 share bytes"):
        describe_group([[keys], [values]], "page head token dim", name="kv")


def test_layers_that_share_only_their_keys_are_refused() -> None:
    keys = array(4096, (3, 2, 4, 8), (64, 32, 8, 1))
    values = [array(address, (3, 2, 4, 8), (64, 32, 8, 1)) for address in (1 << 20, 1 << 21)]
    with pytest.raises(LayoutError, match="plane 0 of layer 0 and plane 0 of layer 1 share bytes"):
        describe_group([[keys, keys], values], "page head token dim", name="kv")


@pytest.mark.parametrize(("at", "apart"), [(300, True), (40, True), (100, True), (90, False), (0, False)])
def test_planes_of_different_strides_need_pieces_of_their_own(at: int, apart: bool) -> None:
    keys, values = PlaneLayout(8, 128, 0, 8), PlaneLayout(4, 64, 0, 4)
    entries = [LayerEntry(0, 0, 0, 0, 1), LayerEntry(0, 1, 0, at, 1)]
    group = GroupLayout("kv", "int8", 1, 4, 3, 0, 1, 1, [keys, values], entries)
    if apart:
        check_apart(group)
    else:
        with pytest.raises(LayoutError, match="different strides"):
            check_apart(group)
