"""The pages of one side of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmsgr.errors import LayoutError

Pages: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""Page indices in order of position."""

_Change: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""Indices in the table, and the page and the first position that each had before."""


class PageTable:
    """The pages of one side, by the index of the page in the prompt.

    Args:
        side: "source" or "destination", for errors.
        num_pages: Pages of the group.
        num_positions: Positions to move.
        page_tokens: Tokens of a page.
    """

    def __init__(self, side: str, num_pages: int, num_positions: int, page_tokens: int) -> None:
        self._side, self._num_pages = side, num_pages
        self._num_positions, self._page_tokens = num_positions, page_tokens
        length = -(-num_positions // page_tokens)
        self.pages = np.full(length, -1, np.int32)
        self.num_known = 0
        self._first = np.full(length, num_positions, np.int64)  # first position held in each page; num_positions: none
        self._changes: list[_Change] = []

    def add(self, first_token: int, pages: Pages, again: bool) -> None:
        """Enter the pages of a span. `again`: a page may be given a second time, if it is the same one."""
        given = np.asarray(pages)
        if first_token < 0 or given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise LayoutError(
                f"{self._side} span from position {first_token}, pages of type {given.dtype} and shape {given.shape}: "
                "needed is a position from 0 on and a flat list of integers"
            )
        lo = first_token // self._page_tokens
        given = given[: len(self.pages) - lo] if first_token < self._num_positions else given[:0]
        if not given.size:
            return
        hi = lo + len(given)
        self._reject((given < 0) | (given >= self._num_pages), lo, given, f"the group has {self._num_pages} pages")
        known, first = self.pages[lo:hi], self._first[lo:hi]
        clash = (known >= 0) & ((known != given) | (not again))
        self._reject(clash, lo, given, "another span has given the page of this position already")
        starts = np.arange(lo, hi) * self._page_tokens
        starts[0] = first_token
        changed = np.flatnonzero(starts < first)
        self._changes.append((changed + lo, known[changed], first[changed]))
        self.num_known += int(np.count_nonzero(known[changed] < 0))
        known[changed], first[changed] = given[changed], starts[changed]

    def _reject(self, bad: npt.NDArray[np.bool_], lo: int, given: npt.NDArray[np.integer], why: str) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            position = (lo + index) * self._page_tokens
            raise LayoutError(f"{self._side} page {given[index]} for the positions from {position} on: {why}")

    def mark(self) -> int:
        """Where the table stands, for `restore`."""
        return len(self._changes)

    def restore(self, mark: int) -> None:
        """Take back what was added since the mark."""
        while len(self._changes) > mark:
            changed, pages, first = self._changes.pop()
            self.pages[changed], self._first[changed] = pages, first
            self.num_known -= int(np.count_nonzero(pages < 0))

    def units(self, lo: int, hi: int, units: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return for the units [lo, hi) of the prompt, `units` to a page: the unit's index in the cache, and the first
        position that its page holds. An index means nothing where that is `num_positions`."""
        if units == 1:
            return self.pages[lo:hi], self._first[lo:hi]
        start, stop = lo // units, -(-hi // units)
        wanted = slice(lo - start * units, hi - start * units)
        first_units = self.pages[start:stop] * np.int32(units)
        parts = np.add.outer(first_units, np.arange(units, dtype=np.int32)).ravel()
        return parts[wanted], np.repeat(self._first[start:stop], units)[wanted]
