"""Arrays with named axes, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmsgr.errors import LayoutError
from kvmsgr.layout.regions import RegionRange
from kvmsgr.types import RawArray

AXES = ("layer", "page", "plane", "head", "token", "dim")
"""Names an axis may have."""


@dataclass(frozen=True, slots=True)
class View:
    """An array with named axes; an axis it does not have is one element long."""

    array: RawArray
    size: dict[str, int]
    stride_bytes: dict[str, int]

    def addresses(self, axis: str) -> list[int]:
        """Offset of each index of `axis` from the array's address."""
        return [index * self.stride_bytes[axis] for index in range(self.size[axis])]

    def range(self) -> RegionRange:
        """The bytes from the first to the last element."""
        span = sum((self.size[axis] - 1) * self.stride_bytes[axis] for axis in AXES)
        return RegionRange(self.array.address, span + self.array.item_bytes)


def parse_dims(dims: str, num_parts: int, recurrent: bool) -> list[str]:
    """Split `dims` into axis names and check them. A recurrent group needs no tokens."""
    axes = dims.split()
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise LayoutError(f"dims {dims!r}: axis {unknown[0]!r} is unknown, known are {', '.join(AXES)}")
    for axis in axes:
        if axes.count(axis) > 1:
            raise LayoutError(f"dims {dims!r}: axis {axis!r} is named twice")
    for axis in ("page", "dim") if recurrent else ("page", "token", "dim"):
        if axis not in axes:
            raise LayoutError(f"dims {dims!r}: axis {axis!r} is missing")
    if axes[-1] != "dim":
        raise LayoutError(f"dims {dims!r}: axis 'dim' must be the last one, the last is {axes[-1]!r}")
    if num_parts > 1 and "plane" in axes:
        raise LayoutError(f"dims {dims!r}: {num_parts} parts are a plane each, so there can be no axis 'plane'")
    return axes


def _view(array: RawArray, axes: list[str], where: str) -> View:
    """Name the axes of one array and check that its elements lie apart."""
    if not len(axes) == len(array.shape) == len(array.strides_bytes):
        raise LayoutError(
            f"{where}: dims name {len(axes)} axes, the array has {len(array.shape)} "
            f"(shape {array.shape}) and {len(array.strides_bytes)} strides"
        )
    size, stride = dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0)
    for axis, count, stride_bytes in zip(axes, array.shape, array.strides_bytes, strict=True):
        if count < 1:
            raise LayoutError(f"{where}: axis {axis!r} has {count} elements, needed is at least 1")
        size[axis] = count
        stride[axis] = stride_bytes if count > 1 else 0  # of a single element the stride means nothing
    if size["dim"] > 1 and stride["dim"] != array.item_bytes:
        raise LayoutError(
            f"{where}: axis 'dim' has a stride of {stride['dim']} bytes, needed is {array.item_bytes}, the item size"
        )
    extent = array.item_bytes
    for axis in sorted((axis for axis in axes if size[axis] > 1), key=stride.__getitem__):
        if stride[axis] < extent:
            raise LayoutError(
                f"{where}: axis {axis!r} has a stride of {stride[axis]} bytes, needed is at least {extent}, "
                "or its elements overlap"
            )
        extent += (size[axis] - 1) * stride[axis]
    return View(array, size, stride)


def _same(what: str, values: Sequence[tuple[str, object]]) -> None:
    """Check that the values of all (where, value) are one."""
    (first_where, first), *others = values
    for where, value in others:
        if value != first:
            raise LayoutError(f"{where}: {what} is {value}, that of {first_where} is {first}; one group has one")


def group_views(parts: Sequence[Sequence[RawArray]], axes: list[str], name: str) -> list[list[View]]:
    """Name the axes of all arrays and check that they are one group."""
    if not parts:
        raise LayoutError(f"group {name!r} has no arrays")
    views: list[list[tuple[str, View]]] = []
    for part_index, part in enumerate(parts):
        where = f"group {name!r}, part {part_index}"
        if not part or ("layer" in axes and len(part) != 1):
            needed = "one array, which holds all layers" if "layer" in axes else "one array a layer"
            raise LayoutError(f"{where}: {len(part)} arrays, needed is {needed}")
        labels = [f"{where}, array {index}" for index in range(len(part))]
        views.append([(label, _view(array, axes, label)) for label, array in zip(labels, part, strict=True)])
    everywhere = [labelled for part in views for labelled in part]
    _same("the number of arrays", [(part[0][0], len(part)) for part in views])
    _same("dtype and item size", [(label, (view.array.dtype, view.array.item_bytes)) for label, view in everywhere])
    for axis in ("layer", "page", "head", "token"):
        _same(f"the size of axis {axis!r}", [(label, view.size[axis]) for label, view in everywhere])
    for pieces in views:
        for axis in ("plane", "dim"):
            _same(f"the size of axis {axis!r}", [(label, view.size[axis]) for label, view in pieces])
        for axis in ("page", "plane", "head", "token"):
            _same(f"the stride of axis {axis!r}", [(label, view.stride_bytes[axis]) for label, view in pieces])
    return [[view for _, view in part] for part in views]
