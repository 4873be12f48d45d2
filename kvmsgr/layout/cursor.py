"""Which pages of one request can be sent, as its prefill goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvmsgr.errors import LayoutError

Pages: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""Page indices in order of position."""

Mark: TypeAlias = tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64]]


class PageWrites(NamedTuple):
    """Pages that became final.

    Args:
        pairs: int32, shape (num_pairs, 2): source and destination page, wanted as a whole.
        edges: (src_page, dst_page, start, stop, last) for pages of which only some positions are wanted, as
            `Template.edge_runs` takes them.
        num_positions: Positions of all these pages; times a template's `rows_per_position` these are its rows.
    """

    pairs: npt.NDArray[np.int32]
    edges: list[tuple[int, int, int, int, bool]]
    num_positions: int


def page_array(packed: bytes) -> npt.NDArray[np.int32]:
    """View the packed pages of a span message as an array; a length that is no multiple of 4 is a ValueError."""
    return np.frombuffer(packed, "<i4")


class _PageTable:
    """The pages of one side, by the index of the page in the prompt."""

    def __init__(self, side: str, num_pages: int, num_positions: int, page_tokens: int) -> None:
        self._side, self._num_pages = side, num_pages
        self._num_positions, self._page_tokens = num_positions, page_tokens
        length = -(-num_positions // page_tokens)
        self.pages = np.full(length, -1, np.int32)
        self.first = np.full(length, num_positions, np.int64)
        """First position held in each page; num_positions: none."""

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
        known = self.pages[lo:hi]
        clash = (known >= 0) & ((known != given) | (not again))
        self._reject(clash, lo, given, "another span has given the page of this position already")
        self.pages[lo:hi] = given
        starts = np.arange(lo, hi) * self._page_tokens
        starts[0] = first_token
        self.first[lo:hi] = np.minimum(self.first[lo:hi], starts)

    def _reject(self, bad: npt.NDArray[np.bool_], lo: int, given: npt.NDArray[np.integer], why: str) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            position = (lo + index) * self._page_tokens
            raise LayoutError(f"{self._side} page {given[index]} for the positions from {position} on: {why}")


class PageCursor:
    """Follows one request through one cache group: which destination pages are final and not sent yet.

    Each page is given out once, when all its positions are computed or when it is the request's last.

    Args:
        num_positions: Positions to move: the prompt's length less one.
        dst_spans: (first_token, pages) of each destination span. Positions outside them are not moved.
        page_tokens: Tokens of a page, on both sides.
        num_src_pages: Pages of the source group.
        num_dst_pages: Pages of the destination group.

    Raises:
        LayoutError: Destination spans overlap, name a page twice or name one that is not there.
    """

    def __init__(
        self,
        num_positions: int,
        dst_spans: Iterable[tuple[int, Pages]],
        page_tokens: int,
        *,
        num_src_pages: int,
        num_dst_pages: int,
    ) -> None:
        self.num_positions, self.page_tokens = num_positions, page_tokens
        self._src = _PageTable("source", num_src_pages, num_positions, page_tokens)
        self._dst = dst = _PageTable("destination", num_dst_pages, num_positions, page_tokens)
        for first_token, pages in dst_spans:
            dst.add(first_token, pages, again=False)
        given = dst.pages[dst.pages >= 0]
        unique, counts = np.unique(given, return_counts=True)
        if len(unique) < len(given):
            raise LayoutError(f"destination page {unique[counts > 1][0]} is named twice: its positions would overwrite")
        starts = np.arange(len(dst.pages)) * page_tokens
        self._stops = np.minimum(starts + page_tokens, num_positions)
        wanted = dst.first < self._stops
        whole = wanted & (dst.first == starts) & (self._stops - starts == page_tokens)
        self._whole, self._edge = whole, wanted & ~whole
        self._next = 0

    @property
    def finished(self) -> bool:
        """Whether every page was given out."""
        return self._next == len(self._dst.pages)

    @property
    def num_sources(self) -> int:
        """Source pages that were named so far."""
        return int((self._src.pages >= 0).sum())

    def mark(self) -> Mark:
        """Where the cursor stands, for `restore`."""
        return self._next, self._src.pages.copy(), self._src.first.copy()

    def restore(self, mark: Mark) -> None:
        """Go back to a mark, as if nothing had been added or given out since."""
        self._next, self._src.pages, self._src.first = mark

    def add_source(self, first_token: int, pages: Pages) -> None:
        """Say which source pages hold the positions from `first_token` (it may lie inside the first page) on.

        Raises:
            LayoutError: A page is not there, or not the one that was given for the same positions before.
        """
        self._src.add(first_token, pages, again=True)

    def advance(self, stop: int) -> PageWrites:
        """Take note that all positions below `stop` are computed, and return the pages that are final by it.

        Beyond `num_positions` nothing is moved. Going back gives nothing again.

        Raises:
            LayoutError: Names the first position that has no source page; nothing was given out.
        """
        stop = min(stop, self.num_positions)
        lo, num_pages = self._next, len(self._dst.pages)
        hi = max(lo, num_pages if stop == self.num_positions else stop // self.page_tokens)
        src, dst, first = self._src.pages[lo:hi], self._dst.pages[lo:hi], self._dst.first[lo:hi]
        whole, edge = self._whole[lo:hi], np.flatnonzero(self._edge[lo:hi])
        missing = self._src.first[lo:hi] > first
        if missing.any():
            raise LayoutError(f"position {first[np.argmax(missing)]} is computed, and no source page was given for it")
        pairs = np.empty((np.count_nonzero(whole), 2), np.int32)
        pairs[:, 0], pairs[:, 1] = src[whole], dst[whole]
        edges = []
        for index in edge.tolist():
            origin = (lo + index) * self.page_tokens
            start, end = int(first[index]) - origin, int(self._stops[lo + index]) - origin
            edges.append((int(src[index]), int(dst[index]), start, end, lo + index == num_pages - 1))
        self._next = hi
        num_positions = len(pairs) * self.page_tokens + sum(end - start for _, _, start, end, _ in edges)
        return PageWrites(pairs, edges, num_positions)
