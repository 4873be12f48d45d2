"""How a rank's cache lies in memory, as one side tells the other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .bounds import (
    MAX_ENDPOINTS,
    MAX_ENTRIES,
    MAX_GROUPS,
    MAX_REGIONS,
    U31,
    U63,
    U64,
    Generation,
    Name,
    Positive,
    Slot,
)


class Region(Struct, frozen=True):
    """A region of a rank's memory as one endpoint offers it.

    Args:
        base: Address to put into a write for the region's first byte.
        key: The remote key.
    """

    base: U64
    key: U64


class Beat(Struct, frozen=True):
    """Where heartbeats go: a write of 8 bytes and one row into a cell, counted like every other, on a slot granted for
    heartbeats alone.

    Args:
        base: Address to put into the write. Nobody reads what is there.
        key: The remote key.
        slot, generation: What the write carries in its immediate.
    """

    base: U64
    key: U64
    slot: Slot
    generation: Generation


class Endpoint(Struct, frozen=True):
    """A fabric address: one network interface of a rank. Through each of them all of the rank's memory can be written.

    Args:
        provider: libfabric provider by name.
        address: Its address as the provider writes it.
        regions: The rank's regions, in the order of `RankAttach.region_bytes`.
        window: Operations the receiver of this message may have outstanding towards it, whichever of its own endpoints
            they leave from, heartbeats not counted.
        beat: Where its heartbeats go; any endpoint of the receiver of this message may send them.
    """

    provider: Name
    address: Annotated[bytes, Meta(max_length=1024)]
    regions: Annotated[list[Region], Meta(max_length=MAX_REGIONS)]
    window: Positive
    beat: Beat


class PlaneLayout(Struct, frozen=True):
    """Strides of one plane: its row (page, head, token) starts at the entry's offset plus index times stride of each.

    Args:
        row_bytes: Bytes of one row (one token, one head).
        page_stride_bytes: Distance between neighbouring pages.
        head_stride_bytes: Distance between neighbouring heads; 0 where there is one head.
        token_stride_bytes: Distance between neighbouring tokens of a page; 0 where a page has one token.
    """

    row_bytes: Positive
    page_stride_bytes: U63
    head_stride_bytes: U63
    token_stride_bytes: U63


class LayerEntry(Struct, frozen=True):
    """Where one plane of one layer lies.

    Args:
        layer: Global index of the layer.
        plane: Index into the group's planes.
        region: Index into the rank's regions.
        offset_bytes: Offset in the region of page 0, first head, token 0.
        signal: The layer is final once the layer counter shows this many bumps.
    """

    layer: U31
    plane: U31
    region: U31
    offset_bytes: U63
    signal: Positive


class GroupLayout(Struct, frozen=True):
    """One cache group on one rank: layers that share page geometry.

    Args:
        name: Name of the group, the same on all sides.
        dtype: Element type by name, compared as text.
        item_bytes: Bytes of one element.
        page_tokens: Tokens a page holds.
        num_pages: Pages of the group on this rank.
        head_start: Global index of this rank's first head.
        num_heads: Heads this rank holds.
        total_heads: Heads of the model's layer.
        planes: K and V, or one latent plane.
        entries: One for each (layer, plane).
        recurrent: A page holds the state after the last prefilled token, one row a head, layer and plane, whatever the
            prompt's length; `page_tokens` is 1.
    """

    name: Name
    dtype: Name
    item_bytes: Positive
    page_tokens: Positive
    num_pages: Positive
    head_start: U31
    num_heads: Positive
    total_heads: Positive
    planes: Annotated[list[PlaneLayout], Meta(min_length=1, max_length=16)]
    entries: Annotated[list[LayerEntry], Meta(min_length=1, max_length=MAX_ENTRIES)]
    recurrent: bool = False

    def __post_init__(self) -> None:
        if self.recurrent and self.page_tokens != 1:
            raise ValueError(f"group {self.name!r}: recurrent, with pages of {self.page_tokens} tokens; they have one")
        if self.head_start + self.num_heads > self.total_heads:
            raise ValueError(
                f"group {self.name!r}: heads {self.head_start}..{self.head_start + self.num_heads - 1} "
                f"of a total of {self.total_heads}"
            )
        declared = {(entry.layer, entry.plane) for entry in self.entries}
        needed = {(entry.layer, plane) for entry in self.entries for plane in range(len(self.planes))}
        if declared != needed or len(declared) != len(self.entries):
            raise ValueError(f"group {self.name!r}: each layer needs one entry for each of {len(self.planes)} planes")


class ContextLayout(Struct, frozen=True):
    """A context buffer: slots of equal size, each `num_units` units of `unit_bytes`, which are never split.

    Args:
        name: Name of the buffer, the same on all sides.
        dtype: Element type by name, compared as text.
        item_bytes: Bytes of one element.
        unit_bytes: Bytes of one unit.
        num_units: Units in a slot. The units of a slot lie side by side.
        num_slots: Slots; a request uses one.
        slot_stride_bytes: Distance between neighbouring slots.
        region: Index into the rank's regions.
        offset_bytes: Offset of slot 0 in the region.
    """

    name: Name
    dtype: Name
    item_bytes: Positive
    unit_bytes: Positive
    num_units: Positive
    num_slots: Positive
    slot_stride_bytes: U63
    region: U31
    offset_bytes: U63


class RankAttach(Struct, frozen=True):
    """One rank: its layout, and how to write into it.

    Args:
        rank: Its number within the node.
        groups: Its cache groups.
        region_bytes: Length of each region of its memory.
        endpoints: Its fabric addresses, one a network interface.
        context: Its context buffers.
    """

    rank: U31
    groups: Annotated[list[GroupLayout], Meta(max_length=MAX_GROUPS)]
    region_bytes: Annotated[list[U63], Meta(max_length=MAX_REGIONS)]
    endpoints: Annotated[list[Endpoint], Meta(min_length=1, max_length=MAX_ENDPOINTS)]
    context: Annotated[list[ContextLayout], Meta(max_length=64)] = []

    def __post_init__(self) -> None:
        used = [entry.region for group in self.groups for entry in group.entries]
        used += [buffer.region for buffer in self.context]
        if used and max(used) >= len(self.region_bytes):
            raise ValueError(f"rank {self.rank}: region {max(used)} is named, there are {len(self.region_bytes)}")
        for endpoint in self.endpoints:
            if len(endpoint.regions) != len(self.region_bytes):
                raise ValueError(
                    f"rank {self.rank}: an endpoint has {len(endpoint.regions)} of {len(self.region_bytes)} regions"
                )
