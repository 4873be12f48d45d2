"""Whether two rows of a cache share bytes."""

from __future__ import annotations

from itertools import combinations, product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmsgr.errors import LayoutError
from kvmsgr_protocol import GroupLayout, LayerEntry

Strides: TypeAlias = tuple[tuple[int, int], ...]


def check_apart(group: GroupLayout) -> None:
    """Check that no two (layer, plane) entries of a group share bytes; rows within an entry are known to lie apart.

    Entries may be interleaved, as the layers of one tensor with any order of axes are.

    Raises:
        LayoutError: Names two entries that overlap, or whose strides are so different that it cannot be told.
    """
    for region in {entry.region for entry in group.entries}:
        entries = [entry for entry in group.entries if entry.region == region]
        by_strides: dict[Strides, list[LayerEntry]] = {}
        for entry in entries:
            by_strides.setdefault(_strides(group, entry), []).append(entry)
        for alike in by_strides.values():
            _check_interleaved(group, alike)
        for ours, others in combinations(by_strides.values(), 2):
            _check_ranges(group, ours, others)


def _strides(group: GroupLayout, entry: LayerEntry) -> Strides:
    """(stride, count) of page, head and token, widest stride first."""
    plane = group.planes[entry.plane]
    axes = (
        (plane.page_stride_bytes, group.num_pages),
        (plane.head_stride_bytes, group.num_heads),
        (plane.token_stride_bytes, group.page_tokens),
    )
    return tuple(sorted(((stride, count) for stride, count in axes if count > 1), reverse=True))


def _check_ranges(group: GroupLayout, ours: list[LayerEntry], others: list[LayerEntry]) -> None:
    """Entries of different strides: what each holds at one step of its widest stride is taken as one piece."""
    for one, other in product(ours, others):
        pieces = np.concatenate([_pieces(group, one), _pieces(group, other)])
        pieces = pieces[np.argsort(pieces[:, 0])]
        if (pieces[1:, 0] < pieces[:-1, 1]).any():
            raise _clash(group, one, other, "lie in one another with different strides")


def _pieces(group: GroupLayout, entry: LayerEntry) -> npt.NDArray[np.int64]:
    """(start, end) of each."""
    (stride, count), *inner = _strides(group, entry)
    extent = sum(narrow * (num - 1) for narrow, num in inner) + group.planes[entry.plane].row_bytes
    starts = entry.offset_bytes + np.arange(count, dtype=np.int64) * stride
    return np.stack([starts, starts + extent], axis=1)


def _check_interleaved(group: GroupLayout, entries: list[LayerEntry]) -> None:
    """Entries of equal strides: the distance of two must not be that of two rows of one entry, or nearly."""
    offsets = np.array([entry.offset_bytes for entry in entries], dtype=np.int64)
    row_bytes = np.array([group.planes[entry.plane].row_bytes for entry in entries], dtype=np.int64)
    distance = offsets[None, :] - offsets[:, None]
    clash = np.zeros(distance.shape, dtype=np.bool_)
    strides = _strides(group, entries[0])
    for steps in product((0, 1), repeat=len(strides)):  # the row below or above, along each axis
        rest = distance.copy()
        for (stride, count), step in zip(strides, steps, strict=True):
            rest -= np.clip(rest // stride + step, 1 - count, count - 1) * stride
        clash |= (rest < row_bytes[:, None]) & (rest > -row_bytes[None, :])
    np.fill_diagonal(clash, val=False)
    if clash.any():
        one, other = (entries[int(at)] for at in np.argwhere(clash)[0])
        raise _clash(group, one, other, "share bytes")


def _clash(group: GroupLayout, one: LayerEntry, other: LayerEntry, how: str) -> LayoutError:
    return LayoutError(
        f"group {group.name!r}: plane {one.plane} of layer {one.layer} and plane {other.plane} of layer {other.layer} "
        f"{how}; each needs memory of its own"
    )
