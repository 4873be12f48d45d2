"""What must be the same on both sides, compared when two messengers meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmsgr.errors import LayoutMismatchError
from kvmsgr_protocol import ContextLayout, GroupLayout


def _compare(owner: str, fields: Iterable[tuple[str, object, object]]) -> None:
    for field, ours, theirs in fields:
        if ours != theirs:
            raise LayoutMismatchError(f"{owner}: {field}", ours, theirs)


def _compare_names(
    what: str, ours: Sequence[GroupLayout | ContextLayout], theirs: Sequence[GroupLayout | ContextLayout]
) -> None:
    _compare("cache", [(what, [item.name for item in ours], [item.name for item in theirs])])


def check_groups(ours: Sequence[GroupLayout], theirs: Sequence[GroupLayout]) -> None:
    """Compare the cache groups of two ranks, in their order. The number of pages and all strides may differ.

    Raises:
        LayoutMismatchError: Names the first field that differs and both values.
    """
    _compare_names("groups", ours, theirs)
    for our, their in zip(ours, theirs, strict=True):
        check_group(our, their)


def check_group(ours: GroupLayout, theirs: GroupLayout) -> None:
    """Compare two cache groups. Which layers and heads a rank holds may differ, and so may page sizes where one divides
    the other.

    Raises:
        LayoutMismatchError: Names the first field that does not fit and both values.
    """
    owner = f"group {ours.name!r}"
    _compare(
        owner,
        [
            ("name", ours.name, theirs.name),
            ("dtype", ours.dtype, theirs.dtype),
            ("item_bytes", ours.item_bytes, theirs.item_bytes),
            ("recurrent", ours.recurrent, theirs.recurrent),
            ("total_heads", ours.total_heads, theirs.total_heads),
            ("number of planes", len(ours.planes), len(theirs.planes)),
            ("row_bytes", [plane.row_bytes for plane in ours.planes], [plane.row_bytes for plane in theirs.planes]),
        ],
    )
    if max(ours.page_tokens, theirs.page_tokens) % min(ours.page_tokens, theirs.page_tokens):
        raise LayoutMismatchError(
            f"{owner}: page_tokens", ours.page_tokens, theirs.page_tokens, "one must be a multiple of the other"
        )


def check_contexts(ours: Sequence[ContextLayout], theirs: Sequence[ContextLayout]) -> None:
    """Compare the context buffers of two ranks, in their order. The number of slots may differ.

    Raises:
        LayoutMismatchError: Names the first field that differs and both values.
    """
    _compare_names("context buffers", ours, theirs)
    for our, their in zip(ours, theirs, strict=True):
        check_context(our, their)


def check_context(ours: ContextLayout, theirs: ContextLayout) -> None:
    """Compare two context buffers.

    Raises:
        LayoutMismatchError: Names the first field that differs and both values.
    """
    _compare(
        f"context buffer {ours.name!r}",
        [
            ("name", ours.name, theirs.name),
            ("dtype", ours.dtype, theirs.dtype),
            ("item_bytes", ours.item_bytes, theirs.item_bytes),
            ("unit_bytes", ours.unit_bytes, theirs.unit_bytes),
            ("num_units", ours.num_units, theirs.num_units),
        ],
    )
