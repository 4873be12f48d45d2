"""From two layouts to templates: the intersection of their index ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmsgr.layout.match import check_group
from kvmsgr.layout.rowtable import RowTable
from kvmsgr.layout.template import Template
from kvmsgr_protocol import GroupLayout, LayerEntry


@dataclass(frozen=True, slots=True)
class _Planes:
    """Planes that one entry of a layer serves together: their rows, from the place of the lowest plane."""

    planes: tuple[int, ...]
    table: RowTable
    src_page_bytes: int
    dst_page_bytes: int
    runs: npt.NDArray[np.uint64]


class _Side:
    """One of the two groups, with its entries by (layer, plane)."""

    def __init__(self, group: GroupLayout) -> None:
        self.group = group
        self.entries: dict[tuple[int, int], LayerEntry] = {(entry.layer, entry.plane): entry for entry in group.entries}
        self.layers = sorted({entry.layer for entry in group.entries})

    def offsets(self, plane: int, heads: range, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Offsets of the rows (head, token) of one plane, from the place of its page."""
        strides = self.group.planes[plane]
        first = heads.start - self.group.head_start
        head_offsets = np.arange(first, first + len(heads)) * strides.head_stride_bytes
        return (head_offsets[:, None] + tokens * strides.token_stride_bytes).ravel()

    def place(self, layer: int, planes: Sequence[int]) -> tuple[int, int]:
        """Region and offset of the lowest of some planes of a layer."""
        return min((self.entries[layer, plane].region, self.entries[layer, plane].offset_bytes) for plane in planes)

    def distances(self) -> tuple[int, ...] | None:
        """Distance of each plane from the lowest one; None where it is not the same for all layers and pages."""
        planes = range(len(self.group.planes))
        found = set()
        for layer in self.layers:
            region, lowest = self.place(layer, planes)
            entries = [self.entries[layer, plane] for plane in planes]
            if any(entry.region != region for entry in entries):
                return None
            found.add(tuple(entry.offset_bytes - lowest for entry in entries))
        same_pages = len({plane.page_stride_bytes for plane in self.group.planes}) == 1
        return found.pop() if len(found) == 1 and same_pages else None


def _alone(src: _Side, dst: _Side, plane: int) -> _Planes:
    """One plane by itself: the heads and tokens both sides hold."""
    heads = range(
        max(src.group.head_start, dst.group.head_start),
        min(src.group.head_start + src.group.num_heads, dst.group.head_start + dst.group.num_heads),
    )
    tokens = np.arange(min(src.group.page_tokens, dst.group.page_tokens), dtype=np.int64)
    table = RowTable.build(
        src.offsets(plane, heads, tokens),
        dst.offsets(plane, heads, tokens),
        np.tile(tokens, len(heads)),
        src.group.planes[plane].row_bytes,
    )
    return _planes((plane,), table, src, dst)


def _planes(planes: tuple[int, ...], table: RowTable, src: _Side, dst: _Side) -> _Planes:
    src_plane, dst_plane = src.group.planes[planes[0]], dst.group.planes[planes[0]]
    return _Planes(planes, table, src_plane.page_stride_bytes, dst_plane.page_stride_bytes, table.all_runs())


def _together(src: _Side, dst: _Side, alone: Sequence[_Planes]) -> _Planes | None:
    """All planes as one, where both sides hold them at fixed distances; None where not."""
    src_distances, dst_distances = src.distances(), dst.distances()
    if src_distances is None or dst_distances is None or len({one.table.row_bytes for one in alone}) > 1:
        return None
    table = RowTable.build(
        np.concatenate([one.table.src_offsets + far for one, far in zip(alone, src_distances, strict=True)]),
        np.concatenate([one.table.dst_offsets + far for one, far in zip(alone, dst_distances, strict=True)]),
        np.concatenate([one.table.tokens for one in alone]),
        alone[0].table.row_bytes,
    )
    return _planes(tuple(range(len(alone))), table, src, dst)


def _template(src: _Side, dst: _Side, served: Sequence[_Planes]) -> Template:
    """One template for planes that have the same runs: an entry for each layer and member of `served`."""
    shape = served[0]
    entries = [
        (*src.place(layer, one.planes), *dst.place(layer, one.planes), src.entries[layer, one.planes[0]].signal)
        for one in served
        for layer in src.layers
    ]
    return Template.build(shape.table, shape.src_page_bytes, shape.dst_page_bytes, entries, src.group.item_bytes)


def build_templates(src_group: GroupLayout, dst_group: GroupLayout) -> tuple[Template, ...]:
    """Work out how pages of `src_group` become pages of `dst_group`.

    Where the planes form longer runs together, there is one template, whose entries are the layers. Otherwise each
    (layer, plane) is an entry, and planes with the same runs share a template.

    Returns:
        The templates; together they move each row of a page exactly once.

    Raises:
        LayoutMismatchError: Names the first field that must be the same and is not.
    """
    check_group(src_group, dst_group)
    src, dst = _Side(src_group), _Side(dst_group)
    alone = [_alone(src, dst, plane) for plane in range(len(src_group.planes))]
    together = _together(src, dst, alone)
    if together is not None and len(together.runs) < sum(len(one.runs) for one in alone):
        return (_template(src, dst, [together]),)
    alike: dict[tuple[object, ...], list[_Planes]] = {}
    for one in alone:
        key = (one.table.row_bytes, one.src_page_bytes, one.dst_page_bytes, one.runs.tobytes())
        alike.setdefault(key, []).append(one)
    return tuple(_template(src, dst, served) for served in alike.values())
