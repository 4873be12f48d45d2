"""How many rows a request has: a property of its destination alone, so that both sides can tell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from .layouts import ContextLayout, GroupLayout
from .messages import Span


def span_positions(span: Span, page_tokens: int, num_tokens: int) -> range:
    """Return the positions of a prompt of `num_tokens` that `span` receives.

    Page k of the span holds the page-aligned positions from `(first_token // page_tokens + k) * page_tokens`. Positions
    below `first_token` and the prompt's last position are not received.
    """
    end = (span.first_token // page_tokens + span.num_pages) * page_tokens
    return range(span.first_token, max(span.first_token, min(end, num_tokens - 1)))


def rows_per_position(group: GroupLayout, sources: Iterable[GroupLayout] | None = None) -> int:
    """Return the rows that one position of a group has: heads x layers x planes.

    Args:
        group: The group on the destination rank.
        sources: The same group on each rank of a prefiller: only layers and heads that one of them holds are counted,
            each once. None: all.
    """
    if sources is None:
        return group.num_heads * len(group.entries)
    layers = {entry.layer for entry in group.entries}
    heads = range(group.head_start, group.head_start + group.num_heads)
    shards = {
        (frozenset(entry.layer for entry in source.entries), source.head_start, source.num_heads) for source in sources
    }
    cells = {
        (layer, head)
        for held, start, num in shards
        for head in range(max(heads.start, start), min(heads.stop, start + num))
        for layer in held & layers
    }
    return len(cells) * len(group.planes)


def group_positions(num_tokens: int, spans: Iterable[Span], index: int, group: GroupLayout) -> int:
    """Return the positions that the spans of group `index` receive; of a recurrent group, its pages: one or none.

    Raises:
        ValueError: Spans of the group overlap, or a recurrent group is given more than one page.
    """
    own = [span for span in spans if span.group == index]
    if group.recurrent:
        num_pages = sum(span.num_pages for span in own)
        if num_pages > 1 or any(span.first_token for span in own):
            raise ValueError(
                f"group {index} ({group.name!r}) is recurrent: {num_pages} pages, first_token "
                f"{[span.first_token for span in own]}; it takes one page, from position 0"
            )
        return num_pages if num_tokens > 1 else 0
    covered = sorted(
        filter(None, (span_positions(span, group.page_tokens, num_tokens) for span in own)),
        key=lambda positions: positions.start,
    )
    for before, after in pairwise(covered):
        if after.start < before.stop:
            raise ValueError(
                f"spans of group {index} ({group.name!r}) overlap: positions {before.start}..{before.stop - 1} "
                f"and {after.start}..{after.stop - 1}"
            )
    return sum(map(len, covered))


def expected_rows(
    num_tokens: int,
    spans: Sequence[Span],
    groups: Sequence[GroupLayout],
    context: Sequence[ContextLayout] = (),
    rows: Sequence[int] | None = None,
) -> int:
    """Return the rows one destination rank receives for a request.

    Args:
        num_tokens: Length of the prompt. Its last position is never received, so a prompt of one token has no rows, and
            no context either: nothing is prefilled for it.
        spans: The destination pages on the rank.
        groups: The rank's cache groups.
        context: The context buffers that are wanted; empty for none.
        rows: Rows of one position, by group, as `rows_per_position` gives them for one leg; None: all of them.

    Raises:
        ValueError: A span names no group, spans of one group overlap, or a recurrent group has more than one page.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}, a prompt has at least 1")
    for span in spans:
        if span.group >= len(groups):
            raise ValueError(f"a span names group {span.group}, there are {len(groups)}")
    if num_tokens == 1:
        return 0
    if rows is None:
        rows = [rows_per_position(group) for group in groups]
    total = sum(buffer.num_units for buffer in context)
    for index, (group, a_position) in enumerate(zip(groups, rows, strict=True)):
        total += group_positions(num_tokens, spans, index, group) * a_position
    return total
