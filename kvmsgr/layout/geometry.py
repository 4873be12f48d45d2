"""Describes the cache of one rank from its arrays.

A cache is a strided array over (layer, page, plane, head, token, dim), in any order and in any number of pieces. What
comes out names, for each layer and plane, the place of page 0, and one set of strides for the whole group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


class DescribedGroup(NamedTuple):
    """A cache group by itself.

    Args:
        layout: Its layout; signals count the group's own layers.
        regions: The regions its entries refer to: disjoint, in order of address.
        layers: Global index of each layer, ascending, of those too that have no entry because they share a buffer.
    """

    layout: GroupLayout
    regions: list[RegionRange]
    layers: list[int]


def describe_group(
    parts: Sequence[Sequence[RawArray]],
    dims: str,
    *,
    name: str,
    head_start: int = 0,
    total_heads: int | None = None,
    layers: Sequence[int] | None = None,
    recurrent: bool = False,
) -> DescribedGroup:
    """Describe one cache group of one rank.

    Layers whose arrays have the very same address share a buffer. They have one entry, under the lowest of their
    numbers, which is final when the last of them is.

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
        recurrent: A page holds one state a request, not tokens: "token" may be left out, and "dim" is all of the state
            of one head.

    Raises:
        LayoutError: Names the axis or field, what was seen and what is needed.
    """
    axes = parse_dims(dims, len(parts), recurrent)
    views = group_views(parts, axes, name)
    first = views[0][0]
    numbers = _layer_numbers(layers, len(views[0]) * first.size["layer"], name)
    num_heads = first.size["head"]
    known = "" if total_heads is not None else " (those of the arrays, because total_heads was not given)"
    total_heads = num_heads if total_heads is None else total_heads
    if not 0 <= head_start <= total_heads - num_heads:
        raise LayoutError(
            f"group {name!r}: head_start {head_start} and {num_heads} heads do not fit into total_heads {total_heads}"
            + known
        )
    if recurrent and first.size["token"] > 1:
        raise LayoutError(f"group {name!r}: recurrent, with {first.size['token']} tokens a page; a state has one")

    regions = merge_ranges(view.range() for part in views for view in part)
    planes: list[PlaneLayout] = []
    places: list[list[int]] = []  # [plane][layer] -> address of page 0
    for part in views:
        strides = part[0].stride_bytes
        row_bytes = part[0].size["dim"] * first.array.item_bytes
        for plane_offset in part[0].addresses("plane"):
            planes.append(PlaneLayout(row_bytes, strides["page"], strides["head"], strides["token"]))
            places.append(
                [view.array.address + plane_offset + offset for view in part for offset in view.addresses("layer")]
            )
    buffers: dict[tuple[int, ...], list[int]] = {}  # addresses by plane -> the layers that lie there
    for layer, addresses in zip(numbers, zip(*places, strict=True), strict=True):
        buffers.setdefault(addresses, []).append(layer)
    signals = _signals(numbers)
    entries = [
        LayerEntry(min(sharing), plane, *locate(regions, address), signals[max(sharing)])
        for addresses, sharing in buffers.items()
        for plane, address in enumerate(addresses)
    ]
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
        recurrent=recurrent,
    )
    check_apart(group)
    return DescribedGroup(group, regions, sorted(numbers))


def describe_cache(groups: Sequence[DescribedGroup]) -> tuple[list[GroupLayout], list[RegionRange]]:
    """Put the groups of a rank onto one list of regions and one order of layers.

    Regions that overlap become one (groups may share tensors). Signals count all layers of the rank in ascending order,
    so the largest is the number of bumps of a whole forward pass.

    Raises:
        LayoutError: There is no group, or two have one name.
    """
    names = [group.layout.name for group in groups]
    if not names or len(set(names)) != len(names):
        raise LayoutError(f"a cache has at least one group and each has its own name, seen: {names}")
    merged = merge_ranges(region for group in groups for region in group.regions)
    signals = _signals(layer for group in groups for layer in group.layers)

    def moved(entry: LayerEntry, group: DescribedGroup) -> LayerEntry:
        region, offset_bytes = locate(merged, group.regions[entry.region].address + entry.offset_bytes)
        return LayerEntry(entry.layer, entry.plane, region, offset_bytes, signals[group.layers[entry.signal - 1]])

    return [
        msgspec.structs.replace(group.layout, entries=[moved(entry, group) for entry in group.layout.entries])
        for group in groups
    ], merged


def number_signals(ranks: Sequence[Sequence[GroupLayout]]) -> list[list[GroupLayout]]:
    """Let signals count the layers of all ranks: for one layer counter that all of them share.

    Args:
        ranks: The groups of each rank, as `describe_cache` gives them.

    Raises:
        LayoutError: Layers share buffers, and not in the same way on all ranks: which bump is which cannot be told.
    """
    by_rank = [
        {(i, entry.layer): entry.signal for i, group in enumerate(rank) for entry in group.entries} for rank in ranks
    ]
    if all(signals == by_rank[0] for signals in by_rank):
        return [list(rank) for rank in ranks]
    for index, held in enumerate(by_rank):
        own = _signals(layer for _, layer in held)
        if any(signal != own[layer] for (_, layer), signal in held.items()):
            raise LayoutError(
                f"rank {index} has layers that share buffers, and other layers than other ranks: they cannot have one "
                "layer counter together; give each rank its own"
            )
    union = _signals(layer for held in by_rank for _, layer in held)
    return [
        [
            msgspec.structs.replace(
                group, entries=[msgspec.structs.replace(entry, signal=union[entry.layer]) for entry in group.entries]
            )
            for group in rank
        ]
        for rank in ranks
    ]
