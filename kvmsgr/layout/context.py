"""Context buffers: what a request needs beside KV. They move as a cache group of one layer, whose page is a slot."""

from __future__ import annotations

from math import prod

import numpy as np

from kvmsgr.errors import LayoutError
from kvmsgr.layout.match import check_context
from kvmsgr.layout.regions import RegionRange
from kvmsgr.layout.rowtable import RowTable
from kvmsgr.layout.template import PageSteps, Template, UnitRuns
from kvmsgr.types import RawArray
from kvmsgr_protocol import ContextLayout


def describe_context(name: str, array: RawArray, region: int, num_units: int = 1) -> tuple[ContextLayout, RegionRange]:
    """Describe a context buffer.

    Args:
        name: Name of the buffer, the same on all sides.
        array: Shape (num_slots, ...); a slot is contiguous.
        region: Index its region will have in the rank's list.
        num_units: Equal units a slot consists of; a unit is never split.

    Returns:
        The layout and its memory.

    Raises:
        LayoutError: A slot is not contiguous, slots overlap, or the units do not divide a slot.
    """
    if not array.shape or min(array.shape) < 1 or len(array.shape) != len(array.strides_bytes):
        raise LayoutError(
            f"context buffer {name!r}: shape {array.shape} with strides {array.strides_bytes}, needed is "
            "(num_slots, ...) without an empty axis"
        )
    expected = array.item_bytes
    for axis in range(len(array.shape) - 1, 0, -1):
        if array.shape[axis] > 1 and array.strides_bytes[axis] != expected:
            raise LayoutError(
                f"context buffer {name!r}: axis {axis} has a stride of {array.strides_bytes[axis]} bytes, needed is "
                f"{expected}: a slot must be contiguous"
            )
        expected *= array.shape[axis]
    num_slots, slot_bytes = array.shape[0], prod(array.shape[1:]) * array.item_bytes
    stride = array.strides_bytes[0] if num_slots > 1 else slot_bytes
    if stride < slot_bytes:
        raise LayoutError(f"context buffer {name!r}: slots are {stride} bytes apart and {slot_bytes} bytes long")
    if num_units < 1 or slot_bytes % (num_units * array.item_bytes):
        raise LayoutError(
            f"context buffer {name!r}: a slot has {slot_bytes // array.item_bytes} elements, "
            f"which {num_units} units do not divide"
        )
    layout = ContextLayout(
        name=name,
        dtype=array.dtype,
        item_bytes=array.item_bytes,
        unit_bytes=slot_bytes // num_units,
        num_units=num_units,
        num_slots=num_slots,
        slot_stride_bytes=stride,
        region=region,
        offset_bytes=0,
    )
    return layout, RegionRange(array.address, (num_slots - 1) * stride + slot_bytes)


def context_template(src: ContextLayout, dst: ContextLayout, signal: int) -> Template:
    """Return the template that moves a slot; its pages are slots.

    Args:
        src: The prefiller's buffer.
        dst: The decoder's buffer.
        signal: Bumps of the layer counter after which the buffer is written: one more than the layers'.

    Raises:
        LayoutMismatchError: Names the first field that must be the same and is not.
    """
    check_context(src, dst)
    offsets = np.arange(src.num_units, dtype=np.int64) * src.unit_bytes
    table = RowTable.build(offsets, offsets, np.zeros_like(offsets), src.unit_bytes)
    entry = (src.region, src.offset_bytes, dst.region, dst.offset_bytes, signal)
    src_slots, dst_slots = (PageSteps(buffer.slot_stride_bytes, 1, 0) for buffer in (src, dst))
    return Template.build(UnitRuns(table), src_slots, dst_slots, [entry], src.item_bytes)
