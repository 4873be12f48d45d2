"""Describes the cache of one rank from its arrays.

A cache is a strided array over (layer, page, plane, head, token, dim), in any order and in any number of pieces. What
comes out names, for each layer and plane, the place of page 0, and one set of strides for the whole group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvmsgr.errors import LayoutError
from kvmsgr.layout.overlap import check_apart
from kvmsgr.layout.regions import RegionRange, locate, merge_ranges
from kvmsgr.layout.views import group_views, parse_dims
from kvmsgr.types import RawArray
from kvmsgr_protocol import GroupLayout, LayerEntry, PlaneLayout


def _layer_numbers(layers: Sequence[int] | None, num_layers: int, name: str) -> list[int]:
    numbers = list(range(num_layers)) if layers is None else [int(layer) for layer in layers]
    if len(numbers) != num_layers:
        raise LayoutError(f"group {name!r}: layers names {len(numbers)} layers, the arrays hold {num_layers}")
    if len(set(numbers)) != num_layers or min(numbers) < 0:
        raise LayoutError(f"group {name!r}: layers {numbers} must be different and not negative")
    return numbers


def _signals(layers: Iterable[int]) -> dict[int, int]:
    """Bumps after which each layer is final: layers finish in ascending order."""
    return {layer: order + 1 for order, layer in enumerate(sorted(set(layers)))}


def describe_group(
    parts: Sequence[Sequence[RawArray]],
    dims: str,
    *,
    name: str,
    head_start: int = 0,
    total_heads: int | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[GroupLayout, list[RegionRange]]:
    """Describe one cache group of one rank.

    Args:
        parts: A part is one array that holds all layers (an axis "layer" in `dims`) or one array a layer. Several parts
            are a plane each (K and V in separate tensors), and may differ in "dim" and in strides.
        dims: Axis names of every array, outermost first, e.g. "page plane head token dim" (HND) or
            "layer page token head dim" (NHD). "dim" is the last and contiguous; "page" and "token" are required.
            Without "head" there is one head, without "plane" one plane a part.
        name: Name of the group, the same on all sides.
        head_start: Global index of the first head.
        total_heads: Heads of the model; None: those of the arrays.
        layers: Global index of each layer, in the order of the arrays; None: 0, 1, ...

    Returns:
        The layout, and the regions its entries refer to: disjoint, in order of address.

    Raises:
        LayoutError: Names the axis or field, what was seen and what is needed.
    """
    axes = parse_dims(dims, len(parts))
    views = group_views(parts, axes, name)
    first = views[0][0]
    numbers = _layer_numbers(layers, len(views[0]) * first.size["layer"], name)
    num_heads = first.size["head"]
    total_heads = num_heads if total_heads is None else total_heads
    if not 0 <= head_start <= total_heads - num_heads:
        raise LayoutError(
            f"group {name!r}: head_start {head_start} and {num_heads} heads do not fit into total_heads {total_heads}"
        )

    regions = merge_ranges(view.range() for part in views for view in part)
    signals = _signals(numbers)
    planes: list[PlaneLayout] = []
    entries: list[LayerEntry] = []
    for part in views:
        strides = part[0].stride_bytes
        places = [view.array.address + offset for view in part for offset in view.addresses("layer")]
        for plane_offset in part[0].addresses("plane"):
            for layer, place in zip(numbers, places, strict=True):
                region, offset_bytes = locate(regions, place + plane_offset)
                entries.append(LayerEntry(layer, len(planes), region, offset_bytes, signals[layer]))
            row_bytes = part[0].size["dim"] * first.array.item_bytes
            planes.append(PlaneLayout(row_bytes, strides["page"], strides["head"], strides["token"]))
    group = GroupLayout(
        name=name,
        dtype=first.array.dtype,
        item_bytes=first.array.item_bytes,
        page_tokens=first.size["token"],
        num_pages=first.size["page"],
        head_start=head_start,
        num_heads=num_heads,
        total_heads=total_heads,
        planes=planes,
        entries=sorted(entries, key=lambda entry: (entry.signal, entry.plane)),
    )
    check_apart(group)
    return group, regions


def describe_cache(
    groups: Sequence[tuple[GroupLayout, Sequence[RegionRange]]],
) -> tuple[list[GroupLayout], list[RegionRange]]:
    """Put groups as `describe_group` gives them onto one list of regions and one order of layers.

    Regions that overlap become one (groups may share tensors). Signals count all layers of the rank in ascending order,
    so the largest is the number of bumps of a whole forward pass.

    Raises:
        LayoutError: There is no group, or two have one name.
    """
    names = [group.name for group, _ in groups]
    if not names or len(set(names)) != len(names):
        raise LayoutError(f"a cache has at least one group and each has its own name, seen: {names}")
    merged = merge_ranges(region for _, regions in groups for region in regions)
    signals = _signals(entry.layer for group, _ in groups for entry in group.entries)

    def moved(entry: LayerEntry, regions: Sequence[RegionRange]) -> LayerEntry:
        region, offset_bytes = locate(merged, regions[entry.region].address + entry.offset_bytes)
        return LayerEntry(entry.layer, entry.plane, region, offset_bytes, signals[entry.layer])

    return [
        msgspec.structs.replace(group, entries=[moved(entry, regions) for entry in group.entries])
        for group, regions in groups
    ], merged
