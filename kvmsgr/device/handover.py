"""From arrays in a worker's shared memory to the same arrays in the lead's mapping of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from kvmsgr.errors import LayoutError
from kvmsgr.types import RawArray

from .arrays import raw_array
from .cache import Cache, CacheGroup, ContextBuffer, Rank
from .shared import Exportable
from .worker_messages import OfferedMemory, Publish, SharedArray, SharedContext, SharedGroup


def describe_rank(rank: Rank, memories: Sequence[Exportable]) -> Publish:
    """Say where the arrays of a rank lie in its memories.

    Raises:
        LayoutError: An array lies outside of them; the message names it.
    """
    return Publish(
        memories=tuple(OfferedMemory(memory.kind, memory.num_bytes) for memory in memories),
        groups=tuple(
            SharedGroup(
                name=group.name,
                parts=tuple(
                    tuple(
                        _place(array, memories, f"group {group.name!r}, part {part_index}, array {index}")
                        for index, array in enumerate(part)
                    )
                    for part_index, part in enumerate(group.parts)
                ),
                dims=group.dims,
                head_start=group.head_start,
                total_heads=group.total_heads,
                layers=group.layers,
                recurrent=group.recurrent,
            )
            for group in rank.cache.groups
        ),
        context=tuple(
            SharedContext(buffer.name, _place(raw_array(buffer.array), memories, f"context buffer {buffer.name!r}"))
            for buffer in rank.context
        ),
        interfaces=tuple(rank.interfaces),
    )


def build_rank(message: Publish, memories: Sequence[Exportable]) -> Rank:
    """The rank as the process sees it that has mapped the memories, which are kept mapped as long as the rank is used.

    Raises:
        LayoutError: An array would lie outside of its memory; the message names it.
    """
    keep_alive = tuple(memory.mapping for memory in memories)
    return Rank(
        cache=Cache(
            [
                CacheGroup(
                    name=group.name,
                    parts=tuple(
                        tuple(
                            _rebased(array, memories, f"group {group.name!r}, part {part_index}, array {index}")
                            for index, array in enumerate(part)
                        )
                        for part_index, part in enumerate(group.parts)
                    ),
                    dims=group.dims,
                    keep_alive=keep_alive,  # of each group: context buffers have none of their own
                    head_start=group.head_start,
                    total_heads=group.total_heads,
                    layers=group.layers,
                    recurrent=group.recurrent,
                )
                for group in message.groups
            ]
        ),
        context=[
            ContextBuffer(buffer.name, _rebased(buffer.array, memories, f"context buffer {buffer.name!r}"))
            for buffer in message.context
        ],
        interfaces=message.interfaces,
    )


def _reach(array: RawArray | SharedArray, what: str) -> tuple[int, int]:
    """First byte and end of what an array reaches, counted from its first element."""
    if len(array.shape) != len(array.strides_bytes) or min(array.shape, default=0) < 1:
        raise LayoutError(
            f"{what} has shape {array.shape} and strides {array.strides_bytes}; as many as axes are needed, none empty"
        )
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides_bytes, strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + array.item_bytes


def _place(array: RawArray, memories: Sequence[Exportable], what: str) -> SharedArray:
    first, end = (array.address + offset for offset in _reach(array, what))
    for index, memory in enumerate(memories):
        if memory.address <= first and end <= memory.address + memory.num_bytes:
            offset_bytes = array.address - memory.address
            return SharedArray(index, offset_bytes, array.shape, array.strides_bytes, array.dtype, array.item_bytes)
    raise LayoutError(
        f"{what} reaches from {first:#x} to {end:#x}, outside of the memories that are handed over ("
        + (", ".join(f"{m.address:#x} to {m.address + m.num_bytes:#x}" for m in memories) or "none")
        + "): allocate it in a SharedMemory, and publish that"
    )


def _rebased(array: SharedArray, memories: Sequence[Exportable], what: str) -> RawArray:
    if array.memory >= len(memories):
        raise LayoutError(f"{what} lies in memory {array.memory}; {len(memories)} were handed over")
    memory = memories[array.memory]
    first, end = (array.offset_bytes + offset for offset in _reach(array, what))
    # The product too: an axis with stride 0 reaches nowhere, however long it is.
    if first < 0 or end > memory.num_bytes or prod(array.shape) * array.item_bytes > memory.num_bytes:
        raise LayoutError(
            f"{what} has shape {array.shape} and reaches from byte {first} to {end} of memory {array.memory}, "
            f"which has {memory.num_bytes}"
        )
    return RawArray(
        memory.address + array.offset_bytes, array.shape, array.strides_bytes, array.dtype, array.item_bytes
    )
