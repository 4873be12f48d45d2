"""Caches of any shape in one block of bytes, and a mover that knows arrays instead of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvmsgr.layout import RegionRange, Template, describe_group
from kvmsgr.types import RawArray
from kvmsgr_protocol import GroupLayout

ITEM = np.dtype(np.uint16)
AXES = ("layer", "page", "plane", "head", "token")


def raw(array: npt.NDArray[Any], dtype: str = "bfloat16") -> RawArray:
    """An array as the layout package takes it."""
    return RawArray(array.ctypes.data, array.shape, array.strides, dtype, array.itemsize)


@dataclass(frozen=True)
class Shape:
    """What a rank holds.

    Args:
        num_layers: Layers.
        num_heads: Heads.
        page_tokens: Tokens of a page.
        widths: Elements of a row, by plane.
        first_layer: Global index of the first layer.
        head_start: Global index of the first head.
        total_heads: Heads of the model; None: those of this rank.
    """

    num_layers: int
    num_heads: int
    page_tokens: int
    widths: tuple[int, ...]
    first_layer: int = 0
    head_start: int = 0
    total_heads: int | None = None

    @property
    def cells(self) -> set[tuple[int, int]]:
        """(layer, head) of everything, by global index."""
        layers = range(self.first_layer, self.first_layer + self.num_layers)
        return set(product(layers, range(self.head_start, self.head_start + self.num_heads)))


@dataclass(frozen=True)
class Memory:
    """A cache in one block of bytes.

    Args:
        arena: The bytes.
        shape: What it holds.
        rows: [layer][plane] -> view of shape (page, head, token, dim).
        group: Its description.
        regions: Its regions.
    """

    arena: npt.NDArray[np.uint8]
    shape: Shape
    rows: list[list[npt.NDArray[np.uint16]]]
    group: GroupLayout
    regions: list[RegionRange]

    def cell(self, layer: int, head: int) -> list[npt.NDArray[np.uint16]]:
        """By plane: view of shape (page, token, dim)."""
        planes = self.rows[layer - self.shape.first_layer]
        return [rows[:, head - self.shape.head_start] for rows in planes]

    def offset(self, region: int, base: int) -> int:
        """Place in the arena of an offset in a region."""
        return self.regions[region].address - self.arena.ctypes.data + base


@st.composite
def memories(draw: st.DrawFn, shape: Shape, num_pages: int) -> Memory:
    """A cache of `shape`: axes in any order, padding anywhere, in one tensor or many."""
    apart = len(set(shape.widths)) > 1 or draw(st.booleans(), label="planes apart")
    stacked = draw(st.booleans(), label="layers in one tensor")
    sizes = dict(
        zip(AXES, (shape.num_layers, num_pages, len(shape.widths), shape.num_heads, shape.page_tokens), strict=True)
    )
    hidden = {axis for axis, absent in (("layer", not stacked), ("plane", apart)) if absent}
    for axis in ("head", "plane"):
        if sizes[axis] == 1 and draw(st.booleans(), label=f"no {axis}"):
            hidden.add(axis)
    axes = draw(st.permutations([axis for axis in AXES if axis not in hidden]), label="axes")
    pads = [draw(st.sampled_from([0, 0, 0, 1]), label=f"pad {axis}") for axis in (*axes, "dim")]

    arena = np.zeros(1 << 20, np.uint8)
    end = 64
    rows: list[list[npt.NDArray[np.uint16]]] = [[] for _ in range(shape.num_layers)]
    parts: list[list[RawArray]] = []
    for width in shape.widths if apart else shape.widths[:1]:
        wanted = (*(sizes[axis] for axis in axes), width)
        padded = [size + pad for size, pad in zip(wanted, pads, strict=True)]
        part = []
        for index in range(1 if stacked else shape.num_layers):
            whole = np.ndarray(padded, ITEM, arena.data, end)
            end += whole.nbytes + draw(st.sampled_from([0, 2, 64]), label="gap")
            array = whole[tuple(slice(size) for size in wanted)]
            part.append(raw(array))
            order = [*(axis for axis in AXES if axis not in axes), *axes]
            every_axis = np.expand_dims(array, tuple(range(len(AXES) - len(axes))))
            ordered = every_axis.transpose(*(order.index(axis) for axis in AXES), len(AXES))
            for offset, of_layer in enumerate(ordered):
                rows[index + offset] += list(of_layer.transpose(1, 0, 2, 3, 4))
        parts.append(part)
    assert end <= len(arena)
    group, regions, _ = describe_group(
        parts,
        " ".join((*axes, "dim")),
        name="kv",
        head_start=shape.head_start,
        total_heads=shape.total_heads,
        layers=range(shape.first_layer, shape.first_layer + shape.num_layers),
    )
    return Memory(arena, shape, rows, group, regions)


def fill(memory: Memory, seed: int) -> None:
    """Give every byte of the arena an own-looking value, gaps and padding too."""
    memory.arena[:] = np.random.default_rng(seed).integers(1, 255, len(memory.arena), np.uint8)


class Wire:
    """Carries out runs as the native layer would, and notes what was written."""

    def __init__(self, src: Memory, dst: Memory) -> None:
        self.src, self.dst = src, dst
        self.times_written = np.zeros(len(dst.arena), np.int64)
        self.rows = 0
        self.writes = 0

    def carry(self, template: Template, pairs: npt.NDArray[np.int32], edges: Sequence[npt.NDArray[np.uint64]]) -> None:
        """Write the whole units and the edge runs, for every entry."""
        runs = [
            (template.src_page.offset(src_unit) + src, template.dst_page.offset(dst_unit) + dst, num_bytes, rows)
            for src_unit, dst_unit in pairs.tolist()
            for src, dst, num_bytes, rows in template.runs.tolist()
        ]
        runs += [tuple(run) for edge in edges for run in edge.tolist()]
        for src_region, src_base, dst_region, dst_base, _ in template.entries.tolist():
            for src_offset, dst_offset, num_bytes, rows in runs:
                assert rows >= 1
                assert num_bytes >= rows * template.row_bytes
                assert src_base + src_offset + num_bytes <= self.src.regions[src_region].num_bytes
                assert dst_base + dst_offset + num_bytes <= self.dst.regions[dst_region].num_bytes
                start = self.src.offset(src_region, src_base + src_offset)
                into = self.dst.offset(dst_region, dst_base + dst_offset)
                self.dst.arena[into : into + num_bytes] = self.src.arena[start : start + num_bytes]
                self.times_written[into : into + num_bytes] += 1
                self.rows += rows
                self.writes += 1


def move(
    src: Memory, dst: Memory, places: Sequence[tuple[tuple[int, int], tuple[int, int]]]
) -> tuple[npt.NDArray[np.uint8], int]:
    """Move (page, token) at the source to (page, token) at the destination, element by element, into a copy of it.

    Returns:
        The destination's bytes afterwards, and the rows moved.
    """
    before = dst.arena.copy()
    rows = 0
    for layer, head in src.shape.cells & dst.shape.cells:
        for src_rows, dst_rows in zip(src.cell(layer, head), dst.cell(layer, head), strict=True):
            for src_place, dst_place in places:
                dst_rows[dst_place] = src_rows[src_place]
                rows += 1
    after = dst.arena.copy()
    dst.arena[:] = before
    return after, rows


def mask(memory: Memory, cells: set[tuple[int, int]], places: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which bytes of the arena belong to the (page, token) places of some (layer, head) cells."""
    before = memory.arena.copy()
    memory.arena[:] = 0
    for layer, head in cells:
        for rows in memory.cell(layer, head):
            for place in places:
                rows[place] = 0xFFFF
    found = memory.arena > 0
    memory.arena[:] = before
    return found
