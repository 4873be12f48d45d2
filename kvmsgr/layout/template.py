"""Templates: the byte runs that move one page, worked out once for a pair of layouts.

The same runs serve every page and every layer: only the bases change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmsgr.layout.rowtable import RowTable
from kvmsgr_protocol import MAX_ROWS

WRITE_COST_BYTES: Final = 16 << 10
"""What a write costs at least, in bytes that could be sent instead."""


def _cost(runs: npt.NDArray[np.uint64]) -> int:
    return int(np.maximum(runs[:, 2], np.uint64(WRITE_COST_BYTES)).sum())


def _edge_runs(table: RowTable, start: int, stop: int, last: bool) -> npt.NDArray[np.uint64]:
    """Runs of the tokens [start, stop), or where `last` and it costs less, of all from `start` on."""
    exact = table.runs(start, stop, stop)
    if not last:
        return exact
    wide = table.runs(start, table.num_tokens, stop)
    # A run that carries fewer rows than it is long cannot be split, so it must fit into one write.
    return wide if _cost(wide) < _cost(exact) and wide[:, 2].max() <= MAX_ROWS * table.row_bytes else exact


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """What to write for a pair of pages, for every entry (a layer, or a plane of a layer).

    Args:
        runs: uint64, shape (num_runs, 4): src_offset, dst_offset, bytes, rows, from the start of each side's page.
        src_page_bytes: Distance between neighbouring source pages.
        dst_page_bytes: Distance between neighbouring destination pages.
        entries: int64, shape (num_entries, 5): src_region, src_base, dst_region, dst_base, signal; ascending by signal.
            A base is an offset in its region; page p of an entry starts at base + p * page bytes.
        row_bytes: Bytes of one row.
        item_bytes: Bytes of one element.
        rows_per_position: Rows of one position over all entries.
        edges: The runs of `edge_runs` for (start, stop, last), from the start of each side's page; remembers them.
    """

    runs: npt.NDArray[np.uint64]
    src_page_bytes: int
    dst_page_bytes: int
    entries: npt.NDArray[np.int64]
    row_bytes: int
    item_bytes: int
    rows_per_position: int
    edges: Callable[[int, int, bool], npt.NDArray[np.uint64]]

    @classmethod
    def build(
        cls,
        table: RowTable,
        src_page_bytes: int,
        dst_page_bytes: int,
        entries: Iterable[tuple[int, int, int, int, int]],
        item_bytes: int,
    ) -> Template:
        """Put a template together from its rows and its entries, in any order."""
        by_signal = np.array(sorted(entries, key=lambda entry: entry[4]), np.int64)
        return cls(
            runs=table.all_runs(),
            src_page_bytes=src_page_bytes,
            dst_page_bytes=dst_page_bytes,
            entries=by_signal,
            row_bytes=table.row_bytes,
            item_bytes=item_bytes,
            rows_per_position=len(table.tokens) // table.num_tokens * len(by_signal),
            edges=lru_cache(maxsize=4096)(partial(_edge_runs, table)),
        )

    @property
    def writes_per_page(self) -> int:
        """Writes of one page over all entries, before neighbouring pages are merged."""
        return len(self.runs) * len(self.entries)

    def edge_runs(self, src_page: int, dst_page: int, start: int, stop: int, last: bool) -> npt.NDArray[np.uint64]:
        """Return the runs for a page of which only the positions [start, stop) are wanted.

        Args:
            src_page: Source page index.
            dst_page: Destination page index.
            start: First position wanted, counted from the start of the page.
            stop: Position after the last one wanted; more than `start`.
            last: The page is the request's last: positions from `stop` on hold nothing, and may be written, uncounted,
                where that costs less than more writes. Positions before `start` are never written.

        Returns:
            uint64, shape (num_runs, 4): src_offset, dst_offset, bytes, rows. Offsets are from the base of an entry. A
            run with fewer rows than bytes // row_bytes must not be split.
        """
        runs = self.edges(start, stop, last)
        shift = np.array([src_page * self.src_page_bytes, dst_page * self.dst_page_bytes, 0, 0], np.uint64)
        return runs + shift
