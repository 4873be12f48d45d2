"""What a chunk is written as, expanded slowly and plainly: the reading that `ext/core/plan.c` is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvmsgr.fabric.interface import PageUnits
from kvmsgr_protocol.immediate import MAX_ROWS

MAX_PAGE_BYTES, MAX_UNITS = 1 << 32, 1 << 16


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie together on both sides, and the rows in them."""

    src: int
    dst: int
    num_bytes: int
    rows: int

    def follows(self, other: Run) -> bool:
        """Whether it begins where the other ends, on both sides."""
        return (self.src, self.dst) == (other.src + other.num_bytes, other.dst + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the bases of one (layer, plane) are, and the bumps that release it."""

    src_region: int
    src_base: int
    dst_region: int
    dst_base: int
    signal: int


@dataclass(frozen=True, slots=True)
class Template:
    """What is common to all transfers between one pair of layouts. Rooms are the bytes after each entry's bases."""

    link: int
    runs: tuple[Run, ...]
    src_page: PageUnits
    dst_page: PageUnits
    entries: tuple[Entry, ...]
    rooms: tuple[tuple[int, int], ...]
    row_bytes: int
    item_bytes: int


def expand(
    template: Template, pages: Iterable[Sequence[int]], edges: Iterable[Sequence[int]], max_write_bytes: int
) -> list[Run]:
    """The writes of one entry, relative to its bases; every entry has the same.

    Raises:
        ValueError: A write would leave its region, or there is nothing to move.
    """
    writes: list[Run] = []
    for run in _placed(template, pages, edges):
        last = writes[-1] if writes else None
        if last is not None and run.follows(last) and _fits(last, run, max_write_bytes):
            writes[-1] = Run(last.src, last.dst, last.num_bytes + run.num_bytes, last.rows + run.rows)
        else:
            writes += _split(run, template.row_bytes, max_write_bytes)
    if not writes:
        raise ValueError("neither page pairs nor edges: there is nothing to move")
    for index, write in enumerate(writes):
        _check_rooms(template, index, write)
    return writes


def _placed(template: Template, pages: Iterable[Sequence[int]], edges: Iterable[Sequence[int]]) -> Iterator[Run]:
    for index, (src_unit, dst_unit) in enumerate(pages):
        if src_unit < 0 or dst_unit < 0:
            raise ValueError(f"page pair {index} is ({src_unit}, {dst_unit}); pages count from 0")
        src, dst = _place(template.src_page, src_unit), _place(template.dst_page, dst_unit)
        for run in template.runs:
            yield Run(src + run.src, dst + run.dst, run.num_bytes, run.rows)
    for index, edge in enumerate(edges):
        run = Run(*edge)
        check_run(run, f"edge {index}")
        yield run


def _place(page: PageUnits, unit: int) -> int:
    page_bytes, units, unit_bytes = page
    return unit // units * page_bytes + unit % units * unit_bytes


def check_page(page: PageUnits, side: str) -> None:
    """Refuse sizes that are out of range."""
    page_bytes, units, unit_bytes = page
    if not (0 <= page_bytes <= MAX_PAGE_BYTES and 0 <= unit_bytes <= MAX_PAGE_BYTES and 1 <= units <= MAX_UNITS):
        raise ValueError(
            f"{side} pages of {page_bytes} bytes with {units} units of {unit_bytes} bytes: want at most 4 GiB each and "
            f"1 to {MAX_UNITS} units"
        )


def check_run(run: Run, name: str) -> None:
    """Refuse a run without bytes or rows, or with rows of less than a byte."""
    if not 1 <= run.rows <= run.num_bytes < 1 << 32:
        raise ValueError(f"{name}: {run.rows} rows in {run.num_bytes} bytes; want 1 <= rows <= bytes < 2^32")


def _fits(last: Run, run: Run, max_write_bytes: int) -> bool:
    return last.num_bytes + run.num_bytes <= max_write_bytes and last.rows + run.rows <= MAX_ROWS


def _split(run: Run, row_bytes: int, max_write_bytes: int) -> Iterator[Run]:
    """Cut a run that is too long for one write, between rows. Its last piece takes what follows the last row."""
    if run.num_bytes <= max_write_bytes and run.rows <= MAX_ROWS:
        yield run
        return
    if run.num_bytes < run.rows * row_bytes:
        raise ValueError(
            f"{run.rows} rows of {row_bytes} bytes do not fit a run of {run.num_bytes} bytes, which must be split"
        )
    piece = min(max(max_write_bytes // row_bytes, 1), MAX_ROWS)
    for first in range(0, run.rows, piece):
        rows, at = min(piece, run.rows - first), first * row_bytes
        num_bytes = rows * row_bytes if first + rows < run.rows else run.num_bytes - at
        yield Run(run.src + at, run.dst + at, num_bytes, rows)


def _check_rooms(template: Template, index: int, write: Run) -> None:
    for entry, rooms in enumerate(template.rooms):
        for side, at, room in zip(("source", "destination"), (write.src, write.dst), rooms, strict=True):
            if at + write.num_bytes > room:
                raise ValueError(
                    f"write {index} of entry {entry} leaves its {side} region: "
                    f"bytes [{at}, {at + write.num_bytes}) of {room}"
                )
