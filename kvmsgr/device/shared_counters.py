"""Layer counters that worker processes bump and the lead's polling thread watches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from kvmsgr._ext.native import LayerCounter

from .shared import SharedMemory

_ALIGNMENT = 64  # a cache line: neighbours are bumped by other processes


class SharedCounters(Sequence[LayerCounter]):
    """Layer counters of one messenger in one piece of shared memory.

    Args:
        num_counters: How many.
        num_slots: Steps that may be outstanding at a time on each.
    """

    def __init__(self, num_counters: int, num_slots: int = 64) -> None:
        self.counter_bytes = -(-LayerCounter.size_bytes(num_slots) // _ALIGNMENT) * _ALIGNMENT
        self.memory = SharedMemory.allocate(num_counters * self.counter_bytes)
        self._counters = [
            LayerCounter(num_slots, memory=_part(self.memory, self.counter_bytes, index))
            for index in range(num_counters)
        ]

    @overload
    def __getitem__(self, index: int) -> LayerCounter: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerCounter]: ...
    def __getitem__(self, index: int | slice) -> LayerCounter | Sequence[LayerCounter]:
        return self._counters[index]

    def __len__(self) -> int:
        return len(self._counters)

    @staticmethod
    def attach(memory: SharedMemory, counter_bytes: int, index: int) -> LayerCounter:
        """Counter `index` of memory that holds counters of another process."""
        return LayerCounter.attach(_part(memory, counter_bytes, index))


def _part(memory: SharedMemory, counter_bytes: int, index: int) -> memoryview:
    return memory.buffer.data[index * counter_bytes : (index + 1) * counter_bytes]
