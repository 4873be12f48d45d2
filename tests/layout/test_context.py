"""Context buffers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvmsgr.errors import LayoutError, LayoutMismatchError
from kvmsgr.layout import RegionRange, check_contexts, context_template, describe_context
from kvmsgr.types import RawArray
from kvmsgr_protocol import ContextLayout
from tests.layout.memory import raw


def test_a_slot_is_one_unit_unless_said_otherwise() -> None:
    array = np.zeros((5, 3, 8), np.float32)
    layout, memory = describe_context("hidden", raw(array, "float32"), 4)
    assert memory == RegionRange(array.ctypes.data, array.nbytes)
    assert layout == ContextLayout("hidden", "float32", 4, 96, 1, 5, 96, 4, 0)
    units, _ = describe_context("hidden", raw(array, "float32"), 4, num_units=3)
    assert (units.unit_bytes, units.num_units) == (32, 3)


def test_slots_may_lie_apart() -> None:
    array = np.zeros((5, 16), np.float32)[:, :4]
    layout, memory = describe_context("hidden", raw(array), 0)
    assert (layout.slot_stride_bytes, layout.unit_bytes, memory.num_bytes) == (64, 16, 4 * 64 + 16)


def test_one_slot_needs_no_stride() -> None:
    layout, memory = describe_context("hidden", RawArray(64, (1, 1, 8), (3, 5, 2), "float16", 2), 0)
    assert (layout.slot_stride_bytes, memory.num_bytes) == (16, 16)
    scalars, _ = describe_context("counter", raw(np.zeros(7, np.int64)), 0)
    assert (scalars.unit_bytes, scalars.num_slots) == (8, 7)


@pytest.mark.parametrize(
    ("shape", "strides", "num_units", "message"),
    [
        ((), (), 1, "without an empty axis"),
        ((4, 0), (2, 2), 1, "without an empty axis"),
        ((4, 8), (16,), 1, r"shape \(4, 8\) with strides \(16,\)"),
        ((4, 8), (32, 4), 1, "axis 1 has a stride of 4 bytes, needed is 2: a slot must be contiguous"),
        ((4, 8), (8, 2), 1, "slots are 8 bytes apart and 16 bytes long"),
        ((4, 8), (16, 2), 0, "a slot has 8 elements, which 0 units do not divide"),
        ((4, 8), (16, 2), 16, "a slot has 8 elements, which 16 units do not divide"),
    ],
)
def test_bad_buffers_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], num_units: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        describe_context("hidden", RawArray(64, shape, strides, "float16", 2), 0, num_units)


SRC = ContextLayout("hidden", "float32", 4, 64, 3, 5, 192, 1, 0)
DST = ContextLayout("hidden", "float32", 4, 64, 3, 9, 256, 2, 32)


def test_a_slot_moves_like_a_page() -> None:
    template = context_template(SRC, DST, 31)
    assert template.runs.tolist() == [[0, 0, 192, 3]]
    assert template.entries.tolist() == [[1, 0, 2, 32, 31]]
    assert (template.src_page_bytes, template.dst_page_bytes, template.row_bytes, template.item_bytes) == (
        192,
        256,
        64,
        4,
    )
    assert (template.rows_per_position, template.writes_per_page) == (3, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "logits"), ("dtype", "float16"), ("item_bytes", 2), ("unit_bytes", 32), ("num_units", 2)],
)
def test_what_must_match_is_refused_by_name(field: str, value: object) -> None:
    theirs = msgspec.structs.replace(DST, **{field: value})
    with pytest.raises(LayoutMismatchError) as caught:
        context_template(SRC, theirs, 1)
    assert caught.value.field == f"context buffer 'hidden': {field}"
    assert (caught.value.ours, caught.value.theirs) == (getattr(SRC, field), value)


def test_buffers_are_compared_in_their_order() -> None:
    check_contexts([SRC], [DST])
    with pytest.raises(LayoutMismatchError, match=r"context buffers differs: ours is \['hidden'\], theirs is \[\]"):
        check_contexts([SRC], [])
    with pytest.raises(LayoutMismatchError, match="unit_bytes"):
        check_contexts([SRC], [msgspec.structs.replace(DST, unit_bytes=1)])
