"""From two layouts to templates: the intersection of their index ranges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvmsgr.layout.match import check_group
from kvmsgr.layout.rowtable import RowTable
from kvmsgr.layout.sharding import common_part
from kvmsgr.layout.template import PageSteps, Template, UnitRuns
from kvmsgr_protocol import GroupLayout, LayerEntry


class _Place(NamedTuple):
    """Where the rows of one plane lie in a unit of one side: first row, and the strides of heads and tokens."""

    offset_bytes: int
    head_bytes: int
    token_bytes: int

    def offsets(self, num_heads: int, unit_tokens: int) -> npt.NDArray[np.int64]:
        """Offsets of the rows (head, token)."""
        heads = np.arange(num_heads, dtype=np.int64) * self.head_bytes + self.offset_bytes
        return (heads[:, None] + np.arange(unit_tokens, dtype=np.int64) * self.token_bytes).ravel()


class _Shape(NamedTuple):
    """How planes that are moved together lie on both sides."""

    src_page: PageSteps
    dst_page: PageSteps
    src: tuple[_Place, ...]
    dst: tuple[_Place, ...]
    num_heads: int
    unit_tokens: int
    row_bytes: int


@lru_cache(maxsize=1024)
def _unit_runs(shape: _Shape) -> UnitRuns:
    """Join the rows of a unit to runs. Remembered: pairs of ranks are often shaped alike."""
    tokens = np.tile(np.arange(shape.unit_tokens, dtype=np.int64), shape.num_heads * len(shape.src))
    src, dst = (
        np.concatenate([place.offsets(shape.num_heads, shape.unit_tokens) for place in places])
        for places in (shape.src, shape.dst)
    )
    return UnitRuns(RowTable.build(src, dst, tokens, shape.row_bytes))


class _Side:
    """One of the two groups, with its entries by (layer, plane), and the part of it that both hold."""

    def __init__(self, group: GroupLayout, layers: Sequence[int], heads: range, unit_tokens: int) -> None:
        self.group, self.layers, self.heads, self.unit_tokens = group, layers, heads, unit_tokens
        self.entries: dict[tuple[int, int], LayerEntry] = {(entry.layer, entry.plane): entry for entry in group.entries}
        self._units = group.page_tokens // unit_tokens

    def place(self, plane: int, distance_bytes: int = 0) -> _Place:
        """Where the rows of a plane lie in a unit that starts `distance_bytes` before the plane does."""
        strides = self.group.planes[plane]
        first = distance_bytes + (self.heads.start - self.group.head_start) * strides.head_stride_bytes
        return _Place(first, strides.head_stride_bytes, strides.token_stride_bytes)

    def steps(self, plane: int) -> PageSteps:
        """How far the units of a plane lie apart."""
        strides = self.group.planes[plane]
        unit_bytes = strides.token_stride_bytes * self.unit_tokens if self._units > 1 else 0
        return PageSteps(strides.page_stride_bytes, self._units, unit_bytes)

    def base(self, layer: int, planes: Sequence[int]) -> tuple[int, int]:
        """Region and offset of the lowest of some planes of a layer."""
        return min((self.entries[layer, plane].region, self.entries[layer, plane].offset_bytes) for plane in planes)

    def together(self) -> tuple[_Place, ...] | None:
        """The places of all planes, from the lowest one's start; None where they differ between layers or units."""
        planes = range(len(self.group.planes))
        if len({self.steps(plane) for plane in planes}) > 1:
            return None
        found = set()
        for layer in self.layers:
            region, lowest = self.base(layer, planes)
            entries = [self.entries[layer, plane] for plane in planes]
            if any(entry.region != region for entry in entries):
                return None
            found.add(tuple(entry.offset_bytes - lowest for entry in entries))
        if len(found) > 1:
            return None
        return tuple(self.place(plane, distance_bytes) for plane, distance_bytes in enumerate(found.pop()))


def _alone(src: _Side, dst: _Side, plane: int) -> _Shape:
    """One plane by itself."""
    places = ((src.place(plane),), (dst.place(plane),))
    row_bytes = src.group.planes[plane].row_bytes
    return _Shape(src.steps(plane), dst.steps(plane), *places, len(src.heads), src.unit_tokens, row_bytes)


def _together(src: _Side, dst: _Side) -> _Shape | None:
    """All planes, where both sides hold them at fixed distances; None where not."""
    row_bytes = {plane.row_bytes for plane in src.group.planes}
    src_places, dst_places = src.together(), dst.together()
    if src_places is None or dst_places is None or len(row_bytes) > 1:
        return None
    return _alone(src, dst, 0)._replace(src=src_places, dst=dst_places)


def _template(src: _Side, dst: _Side, shape: _Shape, served: Sequence[Sequence[int]]) -> Template:
    """One template for planes that lie alike: an entry for each layer and member of `served`."""
    entries = [
        (*src.base(layer, planes), *dst.base(layer, planes), src.entries[layer, planes[0]].signal)
        for planes in served
        for layer in src.layers
    ]
    return Template.build(_unit_runs(shape), shape.src_page, shape.dst_page, entries, src.group.item_bytes)


def build_templates(src_group: GroupLayout, dst_group: GroupLayout) -> tuple[Template, ...]:
    """Work out how units of `src_group` become units of `dst_group`: the layers and heads that both hold.

    Where the planes form longer runs together, there is one template, whose entries are the layers. Otherwise each
    (layer, plane) is an entry, and planes that lie alike share a template.

    Returns:
        The templates; together they move each common row of a unit exactly once. None where nothing is common.

    Raises:
        LayoutMismatchError: Names the first field that must be the same and is not.
    """
    check_group(src_group, dst_group)
    common = common_part(src_group, dst_group)
    if common is None:
        return ()
    unit_tokens = min(src_group.page_tokens, dst_group.page_tokens)
    src, dst = (_Side(group, common.layers, common.heads, unit_tokens) for group in (src_group, dst_group))
    planes = range(len(src_group.planes))
    alone: dict[_Shape, list[Sequence[int]]] = {}
    for plane in planes:
        alone.setdefault(_alone(src, dst, plane), []).append((plane,))
    together = _together(src, dst)
    if together is not None:
        num_runs = sum(len(_unit_runs(shape).runs) * len(served) for shape, served in alone.items())
        if len(_unit_runs(together).runs) < num_runs:
            return (_template(src, dst, together, [planes]),)
    return tuple(_template(src, dst, shape, served) for shape, served in alone.items())
