"""Whether a layout that came from somewhere else stays inside its regions."""

from __future__ import annotations

from collections.abc import Sequence

from kvmsgr.errors import LayoutError
from kvmsgr_protocol import ContextLayout, GroupLayout


def check_bounds(groups: Sequence[GroupLayout], context: Sequence[ContextLayout], region_bytes: Sequence[int]) -> None:
    """Check that every row of every page, and every context slot, lies inside its region.

    Args:
        groups, context: Layouts of one rank.
        region_bytes: Length of each region they refer to.

    Raises:
        LayoutError: Names the layout, where it would end, and where its region does.
    """
    for group in groups:
        for entry in group.entries:
            plane = group.planes[entry.plane]
            end = (
                entry.offset_bytes
                + (group.num_pages - 1) * plane.page_stride_bytes
                + (group.num_heads - 1) * plane.head_stride_bytes
                + (group.page_tokens - 1) * plane.token_stride_bytes
                + plane.row_bytes
            )
            _check(f"group {group.name!r}, layer {entry.layer}, plane {entry.plane}", end, entry.region, region_bytes)
    for buffer in context:
        slots = (buffer.num_slots - 1) * buffer.slot_stride_bytes + buffer.num_units * buffer.unit_bytes
        _check(f"context buffer {buffer.name!r}", buffer.offset_bytes + slots, buffer.region, region_bytes)


def _check(what: str, end: int, region: int, region_bytes: Sequence[int]) -> None:
    if region >= len(region_bytes):
        raise LayoutError(f"{what} lies in region {region}; there are {len(region_bytes)}")
    if end > region_bytes[region]:
        raise LayoutError(f"{what} ends at byte {end} of region {region}, which has {region_bytes[region]}")
