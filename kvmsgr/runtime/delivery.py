"""What of one request goes from which rank of ours to which of the peer's, and which of its pages are next."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvmsgr.errors import LayoutError, LayoutMismatchError
from kvmsgr.layout import Balance, PageCursor, PageWrites, page_array
from kvmsgr_protocol import Dispatch, expected_rows, group_positions

from .pages import page_indices
from .routes import Armed, Routes

if TYPE_CHECKING:
    from kvmsgr.device.cache import Memory
    from kvmsgr.layout.cursor import Mark
    from kvmsgr.types import Span
    from kvmsgr_protocol import RankSpans


class Route(NamedTuple):
    """A rank of ours that writes what it holds of a group to a rank of the peer's."""

    source: int
    target: int
    group: int


class _Stream:
    """The pages of one group for those ranks of the peer that have given the same ones."""

    def __init__(self, group: int, cursor: PageCursor, num_positions: int) -> None:
        self.group = group
        self.cursor = cursor
        self.num_positions = num_positions
        self.targets: list[int] = []
        self.routes: list[Route] = []


class Delivery:
    """The plan of one request.

    Args:
        memory: Ours.
        routes: The plan between the two messengers.
        dispatch: What the peer asks for.

    Raises:
        LayoutError: The peer names pages or ranks that it does not have, or one twice.
    """

    def __init__(self, memory: Memory, routes: Routes, dispatch: Dispatch) -> None:
        self._routes = routes
        self._dispatch = dispatch
        self._streams: dict[tuple[object, ...], _Stream] = {}
        self._context: list[tuple[int, int, str]] = []
        self._num_groups = len(memory.groups)
        self._memory = memory
        for target in dispatch.ranks:
            for index in range(self._num_groups):
                if routes.shares[target.rank][index]:
                    self._add_target(target, index)

    def _add_target(self, target: RankSpans, index: int) -> None:
        theirs = self._routes.ranks[target.rank].groups[index]
        spans = [span for span in target.spans if span.group == index]
        key = (index, theirs.page_tokens, theirs.num_pages, *((span.first_token, span.pages) for span in spans))
        if key not in self._streams:
            ours = self._memory.groups[index]
            cursor = PageCursor(
                self._dispatch.num_tokens - 1,
                [(span.first_token, page_array(span.pages)) for span in spans],
                ours.page_tokens,
                theirs.page_tokens,
                num_src_pages=min(rank.groups[index].num_pages for rank in self._memory.ranks),
                num_dst_pages=theirs.num_pages,
                recurrent=ours.recurrent,
            )
            num_positions = group_positions(self._dispatch.num_tokens, spans, index, theirs)
            self._streams[key] = _Stream(index, cursor, num_positions)
        self._streams[key].targets.append(target.rank)

    def choose(self, ranks: Collection[int], balance: Balance) -> None:
        """Take one source for everything that several of our ranks hold. Nothing has been planned before.

        Args:
            ranks: Those of ours that hold this request.
            balance: Spreads the bytes over them.

        Raises:
            LayoutMismatchError: What these ranks hold is not enough.
        """
        wanted = [
            (
                stream,
                target,
                _held_by(
                    ranks, share.sources, f"rank {target} of the decoder wants its part of cache group {stream.group}"
                ),
            )
            for stream in self._streams.values()
            for target in stream.targets
            for share in self._routes.shares[target][stream.group]
        ]
        with_context = self._dispatch.ranks if self._dispatch.context_slot >= 0 else ()
        buffers = [
            (
                _held_by(
                    ranks,
                    self._routes.holders(layout.name, target.rank),
                    f"rank {target.rank} of the decoder wants context {layout.name!r}",
                ),
                target.rank,
                layout.name,
            )
            for target in with_context
            for layout in self._routes.ranks[target.rank].context
        ]
        for stream in self._streams.values():  # from here on nothing fails: `balance` has no bytes of what is not sent
            stream.routes = []
        for stream, target, copies in wanted:
            stream.routes.append(Route(self._choose(copies, target, stream, balance), target, stream.group))
        balance.unique_bytes += self._unique_bytes()
        self._context = [
            (self._choose(copies, target, None, balance), target, name) for copies, target, name in buffers
        ]

    def _choose(self, copies: Sequence[int], target: int, stream: _Stream | None, balance: Balance) -> int:
        num_bytes = 0
        if stream is not None:
            num_bytes = stream.num_positions * self._routes.bytes_per_position(copies[0], target, stream.group)
        draw = f"{self._dispatch.request_id}/{target}/{'context' if stream is None else stream.group}"
        return balance.choose(copies, num_bytes, zlib.crc32(draw.encode()))  # the same for the same requests

    def _unique_bytes(self) -> int:
        """What is sent, each row once."""
        by_group: dict[int, list[_Stream]] = {}
        for stream in self._streams.values():
            by_group.setdefault(stream.group, []).append(stream)
        return sum(
            max(stream.num_positions for stream in streams)
            * self._routes.unique_bytes_per_position(
                group, frozenset(target for stream in streams for target in stream.targets)
            )
            for group, streams in by_group.items()
        )

    # The pages

    @property
    def num_sources(self) -> int:
        """Source pages that were named so far, on one rank."""
        seen: dict[int, int] = {}
        for stream in self._streams.values():
            seen[stream.group] = max(seen.get(stream.group, 0), stream.cursor.num_sources)
        return sum(seen.values())

    def mark(self) -> list[Mark]:
        """Where it stands, for `restore`."""
        return [stream.cursor.mark() for stream in self._streams.values()]

    def restore(self, marks: Sequence[Mark]) -> None:
        """Go back to a mark, as if nothing had been added or given out since."""
        for stream, mark in zip(self._streams.values(), marks, strict=True):
            stream.cursor.restore(mark)

    def add_source(self, span: Span) -> None:
        """Say which source pages hold the positions of a span.

        Raises:
            LayoutError: There is no such group or page, or the page was given otherwise before.
        """
        if not 0 <= span.group < self._num_groups:
            known = list(range(self._num_groups))
            raise LayoutError(f"a span names cache group {span.group}; the groups here are {known}")
        pages = page_indices(span.pages)
        for stream in self._streams.values():
            if stream.group == span.group:
                stream.cursor.add_source(span.first_token, pages)

    def advance(self, stop: int) -> Iterator[tuple[PageWrites, list[tuple[int, Armed]]]]:
        """Take note that all positions below `stop` are computed. Gives the pages that are final by it, and the
        templates that move them, each with its source rank.

        Raises:
            LayoutError: A position has no source page.
        """
        for stream in self._streams.values():
            writes = stream.cursor.advance(stop)
            if len(writes.pairs) or writes.edges:
                yield (
                    writes,
                    [(route.source, armed) for route in stream.routes for armed in self._routes.templates[route]],
                )

    def context(self) -> Iterator[tuple[int, Armed]]:
        """What moves the context buffers."""
        for source, target, name in self._context:
            yield source, self._routes.context[source, target][name]


def _held_by(ranks: Collection[int], holders: Sequence[int], wanted: str) -> tuple[int, ...]:
    """The ranks of `holders` that are to hold it.

    Raises:
        LayoutMismatchError: There is none.
    """
    copies = tuple(source for source in holders if source in ranks)
    if not copies:
        named, have = sorted(ranks), sorted(holders)
        raise LayoutMismatchError(
            "ranks",
            named,
            have,
            text=f"{wanted} from one of our ranks {have}, and the request was accepted with ranks {named}; name in "
            "accept() all that hold it, or none for all",
        )
    return copies


def leg_rows(routes: Routes, dispatch: Dispatch) -> int:
    """The rows that our ranks have for a request.

    Raises:
        ValueError: Its spans name no group, or overlap.
    """
    total = 0
    for target in dispatch.ranks:
        rank = routes.ranks[target.rank]
        context = rank.context if dispatch.context_slot >= 0 else ()
        rows = routes.rows_of(target.rank)
        total += expected_rows(dispatch.num_tokens, target.spans, rank.groups, context, rows)
    return total
