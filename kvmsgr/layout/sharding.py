"""Who holds what: the ranks of one side as sources of a rank of the other."""

from __future__ import annotations

from typing import NamedTuple

from kvmsgr_protocol import GroupLayout


class Part(NamedTuple):
    """Layers, ascending, and heads that two ranks both hold."""

    layers: tuple[int, ...]
    heads: range


def common_part(one: GroupLayout, other: GroupLayout) -> Part | None:
    """Return what two ranks both hold of a group; None where that is nothing."""
    layers = {entry.layer for entry in one.entries} & {entry.layer for entry in other.entries}
    start = max(one.head_start, other.head_start)
    stop = min(one.head_start + one.num_heads, other.head_start + other.num_heads)
    return Part(tuple(sorted(layers)), range(start, stop)) if layers and start < stop else None
