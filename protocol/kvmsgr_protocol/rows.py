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


def _kv_rows(num_tokens: int, spans: Iterable[Span], index: int, group: GroupLayout) -> int:
    """Rows of one group: positions x heads x (layer, plane) entries."""
    received = (span_positions(span, group.page_tokens, num_tokens) for span in spans)
    covered = sorted((positions for positions in received if positions), key=lambda positions: positions.start)
    for before, after in pairwise(covered):
        if after.start < before.stop:
            raise ValueError(
                f"spans of group {index} ({group.name!r}) overlap: positions {before.start}..{before.stop - 1} "
                f"and {after.start}..{after.stop - 1}"
            )
    return sum(map(len, covered)) * group.num_heads * len(group.entries)


def expected_rows(
    num_tokens: int, spans: Sequence[Span], groups: Sequence[GroupLayout], context: Sequence[ContextLayout] = ()
) -> int:
    """Return the rows one destination rank receives for a request.

    Args:
        num_tokens: Length of the prompt. Its last position is never received, so a prompt of one token has no rows, and
            no context either: nothing is prefilled for it.
        spans: The destination pages on the rank.
        groups: The rank's cache groups.
        context: The context buffers that are wanted; empty for none.

    Raises:
        ValueError: A span names no group, or spans of one group overlap.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}, a prompt has at least 1")
    for span in spans:
        if span.group >= len(groups):
            raise ValueError(f"a span names group {span.group}, there are {len(groups)}")
    if num_tokens == 1:
        return 0
    rows = sum(buffer.num_units for buffer in context)
    for index, group in enumerate(groups):
        rows += _kv_rows(num_tokens, (span for span in spans if span.group == index), index, group)
    return rows
