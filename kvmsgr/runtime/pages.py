"""Which destination pages may be written to by somebody."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvmsgr.errors import LayoutError
from kvmsgr_protocol import Span


class PageGuard:
    """The pages of one cache group. A page has one writer at a time: giving it to a second request is refused."""

    def __init__(self, name: str, num_pages: int) -> None:
        self._name = name
        self._held = np.zeros(num_pages, dtype=np.bool_)

    @staticmethod
    def hold_all(guards: Sequence[PageGuard], spans: Sequence[Span]) -> _Held:
        """Hold the pages of all spans, or none of them.

        Raises:
            LayoutError: A page does not exist, or is held.
        """
        held = _Held(guards)
        with held:
            for span in spans:
                guards[span.group].hold(span)
                held.spans.append(span)
            held.kept = True
        held.kept = False
        return held

    def hold(self, span: Span) -> None:
        pages = _pages(span)
        if len(pages) == 0:
            return
        if pages.min() < 0 or pages.max() >= len(self._held):
            raise LayoutError(
                f"group {self._name!r}: pages {pages.min()}..{pages.max()} were given, there are {len(self._held)}"
            )
        taken = pages[self._held[pages]]
        if len(taken):
            raise LayoutError(
                f"group {self._name!r}: page {taken[0]} may still be written to by another request; "
                "give other pages, or wait for released() of that request"
            )
        if len(np.unique(pages)) != len(pages):
            raise LayoutError(f"group {self._name!r}: a page is given twice in one span")
        self._held[pages] = True

    def release(self, span: Span) -> None:
        self._held[_pages(span)] = False

    @property
    def num_held(self) -> int:
        return int(self._held.sum())


class _Held:
    """Pages that are given back unless somebody keeps them."""

    def __init__(self, guards: Sequence[PageGuard]) -> None:
        self.spans: list[Span] = []
        self.kept = False
        self._guards = guards

    def keep(self) -> None:
        self.kept = True

    def __enter__(self) -> _Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.kept:
            for span in self.spans:
                self._guards[span.group].release(span)


def _pages(span: Span) -> npt.NDArray[np.int32]:
    return np.frombuffer(span.pages, dtype="<i4")
