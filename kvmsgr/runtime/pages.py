"""Which destination pages may be written to by somebody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmsgr.errors import LayoutError
from kvmsgr_protocol import GroupLayout, Span, span_positions


class PageGuard:
    """The pages of one cache group. A page has one writer at a time: giving it to a second request is refused."""

    def __init__(self, name: str, num_pages: int) -> None:
        self.name = name
        self.num_pages = num_pages
        self._held = np.zeros(num_pages, dtype=np.bool_)

    def hold(self, span: Span) -> None:
        pages = _pages(span)
        if len(pages) == 0:
            return
        if pages.min() < 0 or pages.max() >= len(self._held):
            raise LayoutError(
                f"group {self.name!r}: pages {pages.min()}..{pages.max()} were given, there are {len(self._held)}"
            )
        taken = pages[self._held[pages]]
        if len(taken):
            raise LayoutError(
                f"group {self.name!r}: page {taken[0]} may still be written to by another request; "
                "give other pages, or wait for released() of that request"
            )
        if len(np.unique(pages)) != len(pages):
            raise LayoutError(f"group {self.name!r}: a page is given twice in one span")
        self._held[pages] = True

    def release(self, span: Span) -> None:
        self._held[_pages(span)] = False

    @property
    def num_held(self) -> int:
        return int(self._held.sum())


def hold_all(guards: Sequence[PageGuard], spans: Sequence[Span]) -> None:
    """Hold the pages of all spans, or none of them.

    Raises:
        LayoutError: A page does not exist, or is held.
    """
    held: list[Span] = []
    try:
        for span in spans:
            guards[span.group].hold(span)
            held.append(span)
    except LayoutError:
        release_all(guards, held)
        raise


def release_all(guards: Sequence[PageGuard], spans: Sequence[Span]) -> None:
    for span in spans:
        guards[span.group].release(span)


def check_cover(groups: Sequence[GroupLayout], spans: Sequence[Span], num_tokens: int) -> None:
    """Check that the pages of each group go on without a gap up to the last position that is moved.

    They may begin anywhere: what lies before is there already, or outside the group's window. That all of it is there
    must be said, by a span without pages.

    Raises:
        LayoutError: Positions would be missing at the end or in the middle, pages lie beyond the prompt, or a group is
            not mentioned.
    """
    if num_tokens == 1:
        return  # nothing is moved
    for index, group in enumerate(groups):
        of_group = sorted((span for span in spans if span.group == index), key=lambda span: span.first_token)
        if not of_group:
            first = 0 if group.recurrent else num_tokens - 1
            raise LayoutError(
                f"group {group.name!r}: no span says where it goes; if all of it is there already, say so by "
                f"Span({index}, {first}, [])"
            )
        if group.recurrent:
            continue  # its one page is the end of the prompt
        late = of_group[-1]
        if late.num_pages and late.first_token >= num_tokens:
            raise LayoutError(
                f"group {group.name!r}: a span gives {late.num_pages} pages from position {late.first_token} on, where "
                f"nothing comes: the prompt has {num_tokens} tokens"
            )
        ranges = [span_positions(span, group.page_tokens, num_tokens) for span in of_group]
        ends = [*(positions.start for positions in ranges[1:]), num_tokens - 1]
        for positions, wanted in zip(ranges, ends, strict=False):
            if positions.stop < min(wanted, num_tokens - 1):
                raise LayoutError(
                    f"group {group.name!r}: pages are given up to position {positions.stop}, and not from there to "
                    f"{min(wanted, num_tokens - 1)} (the prompt has {num_tokens} tokens, all but the last are moved)"
                )


def page_indices(pages: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Page indices as int32.

    Raises:
        LayoutError: They are no integers, not in one row, or out of range.
    """
    array = np.asarray(pages)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise LayoutError(f"pages have type {array.dtype} and shape {array.shape}; a row of integers is needed")
    if array.min() < 0 or array.max() >= 1 << 31:
        raise LayoutError(f"pages {array.min()}..{array.max()} were given; a page index is 0..{(1 << 31) - 1}")
    return array.astype(np.int32)


def _pages(span: Span) -> npt.NDArray[np.int32]:
    return np.frombuffer(span.pages, dtype="<i4")
