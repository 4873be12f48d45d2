"""Byte ranges of memory, to be registered."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RegionRange:
    """`num_bytes` bytes from `address`."""

    address: int
    num_bytes: int

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.address + self.num_bytes


def merge_ranges(ranges: Iterable[RegionRange]) -> list[RegionRange]:
    """Return the disjoint ranges that cover `ranges`, in order of address.

    Ranges that only touch stay apart: they may be two allocations, which cannot be registered as one.
    """
    merged: list[RegionRange] = []
    for found in sorted(ranges):
        if merged and found.address < merged[-1].end:
            last = merged.pop()
            found = RegionRange(last.address, max(last.end, found.end) - last.address)
        merged.append(found)
    return merged


def locate(regions: Sequence[RegionRange], address: int) -> tuple[int, int]:
    """Return (index, offset) of an address that lies in one of the disjoint, ordered `regions`."""
    index = bisect_right(regions, address, key=lambda region: region.address) - 1
    return index, address - regions[index].address
