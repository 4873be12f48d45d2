"""Who holds what: the ranks of one side as sources of a rank of the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from kvmsgr.errors import LayoutError, LayoutMismatchError
from kvmsgr_protocol import GroupLayout


class Part(NamedTuple):
    """Layers, ascending, and heads that two ranks both hold."""

    layers: tuple[int, ...]
    heads: range

    def __str__(self) -> str:
        return f"layers {_text(self.layers)}, heads {_text(self.heads)}"


class Share(NamedTuple):
    """A part of a destination rank that comes from one source rank.

    Args:
        sources: Indices of the source ranks that hold it, ascending: interchangeable copies.
        rows_per_position: Rows of one position.
    """

    sources: tuple[int, ...]
    rows_per_position: int


def head_share(total_heads: int, num_ranks: int, rank: int) -> range:
    """Return the heads that one of `num_ranks` tensor-parallel ranks holds: an equal share, or a copy of one head.

    Raises:
        LayoutError: Neither number divides the other.
    """
    if total_heads % num_ranks == 0:
        num_heads = total_heads // num_ranks
        return range(rank * num_heads, (rank + 1) * num_heads)
    if num_ranks % total_heads == 0:
        head = rank // (num_ranks // total_heads)
        return range(head, head + 1)
    raise LayoutError(f"{total_heads} heads cannot be dealt to {num_ranks} ranks: one number must divide the other")


def common_part(one: GroupLayout, other: GroupLayout) -> Part | None:
    """Return what two ranks both hold of a group; None where that is nothing."""
    layers = {entry.layer for entry in one.entries} & {entry.layer for entry in other.entries}
    start = max(one.head_start, other.head_start)
    stop = min(one.head_start + one.num_heads, other.head_start + other.num_heads)
    return Part(tuple(sorted(layers)), range(start, stop)) if layers and start < stop else None


def divide(sources: Sequence[GroupLayout], destination: GroupLayout) -> list[Share]:
    """Divide what a destination rank receives among source ranks.

    Args:
        sources: One group, on each rank of a messenger. They may hold only a part of what the destination does.
        destination: The same group on the destination rank.

    Returns:
        Shares that have no row in common, ordered by first layer and first head.

    Raises:
        LayoutMismatchError: Two ranks hold some of the same rows, but not all: names the ranks and what each holds.
    """
    held: dict[Part, list[int]] = {}
    for index, source in enumerate(sources):
        part = common_part(source, destination)
        if part is not None:
            held.setdefault(part, []).append(index)
    owners: dict[tuple[int, int], Part] = {}
    for other in held if len(held) > 1 else ():
        one = next((owner for row in product(*other) if (owner := owners.setdefault(row, other)) is not other), None)
        if one is not None:
            raise LayoutMismatchError(
                f"group {destination.name!r}: what source ranks {held[one][0]} and {held[other][0]} hold",
                str(one),
                str(other),
                "ranks that hold some of the same rows must hold all of the same",
            )
    num_planes = len(destination.planes)
    return [
        Share(tuple(held[part]), len(part.layers) * len(part.heads) * num_planes)
        for part in sorted(held, key=lambda part: (part.layers[0], part.heads[0]))
    ]


def check_covered(sources: Sequence[GroupLayout], destination: GroupLayout, names: Sequence[str] = ()) -> None:
    """Check that some source holds each layer and head of a destination rank.

    Args:
        sources: One group, on each rank of all messengers that send to the destination.
        destination: The same group on the destination rank.
        names: Of the messengers.

    Raises:
        LayoutMismatchError: Names the first layer that is not there as a whole, and the heads that nobody holds.
    """
    parts = {part for source in sources if (part := common_part(source, destination)) is not None}
    held = [(frozenset(part.layers), part.heads) for part in parts]
    heads = range(destination.head_start, destination.head_start + destination.num_heads)
    for layer in sorted({entry.layer for entry in destination.entries}):
        seen = {head for layers, some in held if layer in layers for head in some}
        if len(seen) < len(heads):
            missing = _text([head for head in heads if head not in seen])
            asked = f" (asked: {', '.join(names)})" if names else ""
            raise LayoutMismatchError(
                f"group {destination.name!r}: heads of layer {layer}",
                _text(heads),
                _text(sorted(seen)),
                text=f"group {destination.name!r}: heads {_text(heads)} of layer {layer} are wanted, and no source "
                f"holds {missing} of it{asked}; a source is missing, or a cache says the wrong head_start= or layers=",
            )


class Balance:
    """How many bytes each source rank was given to send, so that copies share the work.

    Args:
        num_ranks: Ranks of the messenger.

    Attributes:
        given_bytes: Of each rank.
        unique_bytes: Of all, counting what several destination ranks want alike once.
    """

    def __init__(self, num_ranks: int) -> None:
        self.given_bytes = [0] * num_ranks
        self.unique_bytes = 0

    def choose(self, copies: Sequence[int], cost_bytes: int, draw: int) -> int:
        """Give `cost_bytes` to the copy that was given least, and return its rank.

        Args:
            copies: Ranks that hold the same.
            cost_bytes: What is to be sent.
            draw: Any number from 0 on; decides between equals.
        """
        least = min(self.given_bytes[rank] for rank in copies)
        equals = [rank for rank in copies if self.given_bytes[rank] == least]
        chosen = equals[draw % len(equals)]
        self.given_bytes[chosen] += cost_bytes
        return chosen


def _text(numbers: Sequence[int]) -> str:
    """Ascending numbers, short."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
