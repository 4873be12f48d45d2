"""Templates: the byte runs that move one unit between two layouts, worked out once for a pair of them.

A unit is the smaller of the two sides' pages: one page on one side, and one of several equal parts of a page on the
other. The same runs serve every unit and every layer: only the bases change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvmsgr.layout.rowtable import RowTable
from kvmsgr_protocol import MAX_ROWS

WRITE_COST_BYTES: Final = 16 << 10
"""What a write costs at least, in bytes that could be sent instead."""

Runs: TypeAlias = npt.NDArray[np.uint64]
"""Shape (num_runs, 4): src_offset, dst_offset, bytes, rows."""


def _cost(runs: Runs) -> int:
    return int(np.maximum(runs[:, 2], np.uint64(WRITE_COST_BYTES)).sum())


def _edge_runs(table: RowTable, start: int, stop: int, last: bool) -> Runs:
    """Runs of the tokens [start, stop), or where `last` and it costs less, of all from `start` on."""
    exact = table.runs(start, stop, stop)
    if not last:
        return exact
    wide = table.runs(start, table.num_tokens, stop)
    # A run that carries fewer rows than it is long cannot be split, so it must fit into one write.
    return wide if _cost(wide) < _cost(exact) and wide[:, 2].max() <= MAX_ROWS * table.row_bytes else exact


class UnitRuns:
    """The rows of one unit as runs. Templates between equal shapes share one.

    Args:
        table: The rows on both sides, from the start of each side's unit.
    """

    def __init__(self, table: RowTable) -> None:
        self.table = table
        self.runs = table.all_runs()
        self.edges: Callable[[int, int, bool], Runs] = lru_cache(maxsize=4096)(partial(_edge_runs, table))
        """The runs of (start, stop, last), as `Template.edge_runs` wants them; remembered."""


class PageSteps(NamedTuple):
    """How far units of one side lie apart.

    Args:
        page_bytes: Distance between neighbouring pages.
        units: Units of a page.
        unit_bytes: Distance between neighbouring units of a page; 0 where a page is one unit.
    """

    page_bytes: int
    units: int
    unit_bytes: int

    def offset(self, unit: int) -> int:
        """Offset of a unit from page 0; units count through all pages."""
        page, part = divmod(unit, self.units)
        return page * self.page_bytes + part * self.unit_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """What to write for a pair of units, for every entry (a layer, or a plane of a layer).

    Args:
        runs: uint64, shape (num_runs, 4): src_offset, dst_offset, bytes, rows, from the start of each side's unit.
        src_page: Where the source's units start: unit u of an entry at base + `src_page.offset(u)`.
        dst_page: The same for the destination. A page is one unit on at least one side.
        unit_tokens: Tokens of a unit: those of the smaller page.
        entries: int64, shape (num_entries, 5): src_region, src_base, dst_region, dst_base, signal; ascending by signal.
            A base is an offset in its region.
        row_bytes: Bytes of one row.
        item_bytes: Bytes of one element.
        rows_per_position: Rows of one position over all entries.
        edges: The runs of `edge_runs` for (start, stop, last), from the start of each side's unit.
    """

    runs: Runs
    src_page: PageSteps
    dst_page: PageSteps
    unit_tokens: int
    entries: npt.NDArray[np.int64]
    row_bytes: int
    item_bytes: int
    rows_per_position: int
    edges: Callable[[int, int, bool], Runs]

    @classmethod
    def build(
        cls,
        unit: UnitRuns,
        src_page: PageSteps,
        dst_page: PageSteps,
        entries: Iterable[tuple[int, int, int, int, int]],
        item_bytes: int,
    ) -> Template:
        """Put a template together from its runs and its entries, in any order."""
        by_signal = np.array(sorted(entries, key=lambda entry: entry[4]), np.int64)
        table = unit.table
        return cls(
            runs=unit.runs,
            src_page=src_page,
            dst_page=dst_page,
            unit_tokens=table.num_tokens,
            entries=by_signal,
            row_bytes=table.row_bytes,
            item_bytes=item_bytes,
            rows_per_position=len(table.tokens) // table.num_tokens * len(by_signal),
            edges=unit.edges,
        )

    @property
    def src_page_bytes(self) -> int:
        """Distance between neighbouring source pages."""
        return self.src_page.page_bytes

    @property
    def src_units(self) -> int:
        """Units of a source page."""
        return self.src_page.units

    @property
    def src_unit_bytes(self) -> int:
        """Distance between neighbouring units of a source page; 0 where there is one."""
        return self.src_page.unit_bytes

    @property
    def dst_page_bytes(self) -> int:
        """Distance between neighbouring destination pages."""
        return self.dst_page.page_bytes

    @property
    def dst_units(self) -> int:
        """Units of a destination page."""
        return self.dst_page.units

    @property
    def dst_unit_bytes(self) -> int:
        """Distance between neighbouring units of a destination page; 0 where there is one."""
        return self.dst_page.unit_bytes

    @property
    def writes_per_unit(self) -> int:
        """Writes of one unit over all entries, before neighbours are merged."""
        return len(self.runs) * len(self.entries)

    @property
    def writes_per_page(self) -> int:
        """Writes of one destination page over all entries, before neighbours are merged."""
        return self.writes_per_unit * self.dst_units

    def edge_runs(self, src_unit: int, dst_unit: int, start: int, stop: int, last: bool) -> Runs:
        """Return the runs for a unit of which only the positions [start, stop) are wanted.

        Args:
            src_unit: Source unit index.
            dst_unit: Destination unit index.
            start: First position wanted, counted from the start of the unit.
            stop: Position after the last one wanted; more than `start`.
            last: The unit is the request's last: positions from `stop` on hold nothing, and may be written, uncounted,
                where that costs less than more writes. Positions before `start` are never written.

        Returns:
            uint64, shape (num_runs, 4): src_offset, dst_offset, bytes, rows. Offsets are from the base of an entry. A
            run with fewer rows than bytes // row_bytes must not be split.
        """
        shift = np.array([self.src_page.offset(src_unit), self.dst_page.offset(dst_unit), 0, 0], np.uint64)
        return self.edges(start, stop, last) + shift
