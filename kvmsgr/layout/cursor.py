"""Which units of one request can be sent, as its prefill goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvmsgr.errors import LayoutError
from kvmsgr.layout.pagetable import Pages, PageTable

MAX_UNITS: Final = 2**31
"""Units of a group on one rank: an index is an int32."""

Mark: TypeAlias = tuple[int, int]
"""Units given out, and what the table of source pages was given."""


class PageWrites(NamedTuple):
    """Units that became final. Unit `page * units + k` is the k-th part of a page.

    Args:
        pairs: int32, shape (num_pairs, 2): source and destination unit, wanted as a whole.
        edges: (src_unit, dst_unit, start, stop, last) for units of which only some positions are wanted, as
            `Template.edge_runs` takes them.
        num_positions: Positions of all these units; times a template's `rows_per_position` these are its rows.
    """

    pairs: npt.NDArray[np.int32]
    edges: list[tuple[int, int, int, int, bool]]
    num_positions: int


class PageCursor:
    """Follows one request through one cache group: which units of its pages are final and not sent yet.

    A unit is the smaller of a source page and a destination page. Each is given out once, when all its positions are
    computed or when it is the request's last. A recurrent group has one unit, final with the last position.

    Args:
        num_positions: Positions to move: the prompt's length less one.
        dst_spans: (first_token, pages) of each destination span. Positions outside them are not moved.
        src_page_tokens: Tokens of a source page.
        dst_page_tokens: Tokens of a destination page; a multiple or a divisor of `src_page_tokens`.
        num_src_pages: Pages of the source group.
        num_dst_pages: Pages of the destination group.
        recurrent: The page holds the state after the last position: at most one at each side, from position 0.

    Raises:
        LayoutError: Destination spans overlap, name a page twice or name one that is not there; or there are more units
            than the native layer can number.
    """

    def __init__(
        self,
        num_positions: int,
        dst_spans: Iterable[tuple[int, Pages]],
        src_page_tokens: int,
        dst_page_tokens: int,
        *,
        num_src_pages: int,
        num_dst_pages: int,
        recurrent: bool = False,
    ) -> None:
        self.num_positions, self._recurrent = num_positions, recurrent
        if recurrent:  # whatever it took to get there, the state is one unit and counts as one position
            src_page_tokens = dst_page_tokens = max(num_positions, 1)
        self._unit_tokens = unit_tokens = min(src_page_tokens, dst_page_tokens)
        self._unit_positions = 1 if recurrent else unit_tokens
        self._src_units, dst_units = src_page_tokens // unit_tokens, dst_page_tokens // unit_tokens
        _check_numbers("source", num_src_pages, self._src_units)
        _check_numbers("destination", num_dst_pages, dst_units)
        self._src = PageTable("source", num_src_pages, num_positions, src_page_tokens)
        self._num_given = 0
        dst = PageTable("destination", num_dst_pages, num_positions, dst_page_tokens)
        for first_token, pages in dst_spans:
            if recurrent and (first_token or np.size(pages) > 1):
                raise LayoutError(
                    f"destination span from position {first_token} with {np.size(pages)} pages: a recurrent group has "
                    "one page, from position 0"
                )
            dst.add(first_token, pages, again=False)
        _check_once(dst.pages[dst.pages >= 0])
        starts = np.arange(0, num_positions, unit_tokens)
        self._stops = np.minimum(starts + unit_tokens, num_positions)
        self._dst, first = dst.units(0, len(starts), dst_units)
        first = np.maximum(first, starts)
        wanted = first < self._stops
        self._first = np.where(wanted, first, num_positions)
        self._whole = wanted & (first == starts) & (self._stops - starts == unit_tokens)
        self._edge = wanted & ~self._whole

    @property
    def finished(self) -> bool:
        """Whether every unit was given out."""
        return self._num_given == len(self._dst)

    @property
    def num_sources(self) -> int:
        """Source pages that were named so far."""
        return self._src.num_known

    def mark(self) -> Mark:
        """Where the cursor stands, for `restore`. Costs nothing."""
        return self._num_given, self._src.mark()

    def restore(self, mark: Mark) -> None:
        """Go back to a mark, as if nothing had been added or given out since. Newer marks mean nothing from then on."""
        self._num_given, sources = mark
        self._src.restore(sources)

    def add_source(self, first_token: int, pages: Pages) -> None:
        """Say which source pages hold the positions from `first_token` (it may lie inside the first page) on.

        Of a recurrent group this is the page with the state. It may be named for any position, and must stay the same.

        Raises:
            LayoutError: A page is not there, or not the one that was given for the same positions before.
        """
        if self._recurrent:
            if np.size(pages) > 1:
                raise LayoutError(f"source span with {np.size(pages)} pages: a recurrent group has one page")
            first_token = min(first_token, 0)
        self._src.add(first_token, pages, again=True)

    def advance(self, stop: int) -> PageWrites:
        """Take note that all positions below `stop` are computed, and return the units that are final by it.

        Beyond `num_positions` nothing is moved. Going back gives nothing again.

        Raises:
            LayoutError: Names the first position that has no source page; nothing was given out.
        """
        stop = min(stop, self.num_positions)
        lo, num_units = self._num_given, len(self._dst)
        hi = max(lo, num_units if stop == self.num_positions else stop // self._unit_tokens)
        dst, first, whole = self._dst[lo:hi], self._first[lo:hi], self._whole[lo:hi]
        src, held_from = self._src.units(lo, hi, self._src_units)
        missing = held_from > first
        if missing.any():
            raise LayoutError(f"position {first[np.argmax(missing)]} is computed, and no source page was given for it")
        pairs = np.empty((np.count_nonzero(whole), 2), np.int32)
        pairs[:, 0], pairs[:, 1] = src[whole], dst[whole]
        edges = []
        for index in np.flatnonzero(self._edge[lo:hi]).tolist():
            origin = (lo + index) * self._unit_tokens
            start, end = int(first[index]) - origin, int(self._stops[lo + index]) - origin
            edges.append((int(src[index]), int(dst[index]), start, end, lo + index == num_units - 1))
        self._num_given = hi
        num_positions = len(pairs) * self._unit_positions + sum(end - start for _, _, start, end, _ in edges)
        return PageWrites(pairs, edges, num_positions)


def page_array(packed: bytes) -> npt.NDArray[np.int32]:
    """View the packed pages of a span message as an array; a length that is no multiple of 4 is a ValueError."""
    return np.frombuffer(packed, "<i4")


def _check_numbers(side: str, num_pages: int, units: int) -> None:
    if num_pages * units > MAX_UNITS:
        raise LayoutError(
            f"{num_pages} {side} pages of {units} units each: more than {MAX_UNITS} units cannot be numbered"
        )


def _check_once(pages: npt.NDArray[np.int32]) -> None:
    ordered = np.sort(pages)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        raise LayoutError(f"destination page {ordered[np.argmax(twice)]} is named twice: its positions would overwrite")
