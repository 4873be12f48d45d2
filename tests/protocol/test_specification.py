"""The worked examples of the specification are right, and its links lead somewhere."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmsgr_protocol import (
    DEFAULT_MAX_FRAME_BYTES,
    Accept,
    GroupLayout,
    Span,
    encode,
    expected_rows,
    immediate,
    rows_per_position,
)
from kvmsgr_protocol import pack_pages as pages
from tests.layout.memory import Shape, memories
from tests.protocol.samples import context, group
from tools.specification.__main__ import ROOT
from tools.specification.facts import FACTS

TEXT = (ROOT / "protocol" / "SPECIFICATION.md").read_text()
FLAT = " ".join(TEXT.split())


def address(layout: GroupLayout, layer: int, plane: int, page: int, head: int, token: int) -> tuple[int, int]:
    """Region and offset of a row, as section 5 says."""
    (entry,) = (entry for entry in layout.entries if (entry.layer, entry.plane) == (layer, plane))
    strides = layout.planes[entry.plane]
    return entry.region, (
        entry.offset_bytes
        + page * strides.page_stride_bytes
        + (head - layout.head_start) * strides.head_stride_bytes
        + token * strides.token_stride_bytes
    )


def test_the_frame() -> None:
    frame = encode(Accept("r", 1)).hex(" ")
    assert f"{frame[:11]}\n{frame[12:]}\n" in TEXT
    assert DEFAULT_MAX_FRAME_BYTES == 2**24
    assert "At most 16 MiB (2^24 bytes)" in FLAT


def test_the_immediates() -> None:
    assert f"= {immediate.pack(2, 3, 5)} = {immediate.pack(2, 3, 5):#010x}." in FLAT
    assert immediate.pack(16383, 15, 16384) == 0xFFFFFFFF


def test_the_rows() -> None:
    def rows(first_token: int, with_context: bool = False) -> int:
        buffers = [context(num_units=3)] if with_context else []
        return expected_rows(11, [Span(0, first_token, pages([1, 2]))], [group()], buffers)

    assert f"= **{rows(4)} rows** from a prefiller that holds everything" in FLAT
    assert f"With a context buffer of 3 units: {rows(4, with_context=True)}." in FLAT
    assert f"positions 6 to 9, {rows(6)} rows" in FLAT


def test_the_rows_of_a_leg() -> None:
    def rows(*sources: GroupLayout) -> int:
        return expected_rows(11, [Span(0, 4, pages([1, 2]))], [group()], rows=[rows_per_position(group(), sources)])

    head = replace(group(num_heads=1), head_start=1, total_heads=2)
    later = group(num_layers=6)
    later = replace(later, entries=[entry for entry in later.entries if entry.layer > 0])
    assert f"head 1 alone, on one rank or on four copies: {rows(head)};" in FLAT
    assert rows(*[head] * 4) == rows(head)
    assert f"layers 1 to 5: {rows(later)}." in FLAT
    recurrent = replace(group(page_tokens=1), recurrent=True)
    state = expected_rows(11, [Span(0, 0, pages([1]))], [recurrent])
    assert f"A recurrent group of these heads, layers and planes: {state}." in FLAT


def test_the_address() -> None:
    strides = group().planes[0]
    assert (strides.page_stride_bytes, strides.head_stride_bytes, strides.token_stride_bytes) == (64, 32, 8)
    assert f"base + {address(group(), 1, 1, 7, 1, 3)[1]}." in FLAT


@given(st.data())
def test_an_address_is_where_the_row_lies(data: st.DataObject) -> None:
    shape = Shape(num_layers=2, num_heads=3, page_tokens=4, widths=(2, 5))
    memory = data.draw(memories(shape, num_pages=3))
    layer, plane, page, head, token = (data.draw(st.integers(0, size - 1)) for size in (2, 2, 3, 3, 4))
    memory.arena[:] = 0
    row = memory.rows[layer][plane][page, head, token]
    row[:] = np.arange(1, len(row) + 1)
    region, offset = address(memory.group, layer, plane, page, memory.group.head_start + head, token)
    start = memory.offset(region, offset)
    found = memory.arena[start : start + memory.group.planes[plane].row_bytes]
    assert found.tobytes() == row.tobytes()
    assert np.count_nonzero(memory.arena) == np.count_nonzero(found)


def test_every_message_is_spoken_of() -> None:
    unspoken = [kind.__name__ for kind in FACTS if f"`{kind.__name__}`" not in TEXT]
    assert not unspoken


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / "protocol" / link).exists()
