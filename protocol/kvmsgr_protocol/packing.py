"""Token ids and page indices as packed little-endian bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

ITEM_BYTES: Final = 4

_TOKEN_LIMIT: Final = 1 << 32
_PAGE_LIMIT: Final = 1 << 31


def _pack(name: str, limit: int, values: Sequence[int]) -> bytes:
    for index, value in _outliers(values, limit):
        raise ValueError(f"{name}[{index}] is {value}, needed is 0..{limit - 1}")
    return struct.pack(f"<{len(values)}I", *values)


def _outliers(values: Sequence[int], limit: int) -> Iterable[tuple[int, int]]:
    """Index and value of what is out of range; the usual case, nothing, is found at the speed of min and max."""
    if len(values) and not 0 <= min(values) <= max(values) < limit:
        yield from ((index, value) for index, value in enumerate(values) if not 0 <= value < limit)


def _unpack(name: str, data: bytes) -> tuple[int, ...]:
    if len(data) % ITEM_BYTES:
        raise ValueError(f"{name} has {len(data)} bytes, needed is a multiple of {ITEM_BYTES}")
    return struct.unpack(f"<{len(data) // ITEM_BYTES}I", data)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32.

    Raises:
        ValueError: An id is out of range.
    """
    return _pack("tokens", _TOKEN_LIMIT, tokens)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Undo `pack_tokens`.

    Raises:
        ValueError: The length is no multiple of 4.
    """
    return _unpack("tokens", data)


def pack_pages(pages: Sequence[int]) -> bytes:
    """Pack page indices as little-endian int32.

    Raises:
        ValueError: An index is negative or too large.
    """
    return _pack("pages", _PAGE_LIMIT, pages)


def unpack_pages(data: bytes) -> tuple[int, ...]:
    """Undo `pack_pages`.

    Raises:
        ValueError: The length is no multiple of 4, or an index is negative.
    """
    pages = _unpack("pages", data)
    for index, page in _outliers(pages, _PAGE_LIMIT):
        raise ValueError(f"pages[{index}] is {page - 2 * _PAGE_LIMIT}, a page index is not negative")
    return pages
