"""Packing of immediates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr_protocol import MAX_ROWS, NUM_GENERATIONS, NUM_SLOTS, immediate

SLOTS = st.integers(0, NUM_SLOTS - 1)
GENERATIONS = st.integers(0, NUM_GENERATIONS - 1)
ROWS = st.integers(1, MAX_ROWS)


def test_known_values() -> None:
    assert immediate.pack(0, 0, 1) == 0
    assert immediate.pack(1, 0, 1) == 1 << 18
    assert immediate.pack(0, 1, 1) == 1 << 14
    assert immediate.pack(2, 3, 5) == 2 << 18 | 3 << 14 | 4
    assert immediate.pack(NUM_SLOTS - 1, NUM_GENERATIONS - 1, MAX_ROWS) == 0xFFFFFFFF


@given(SLOTS, GENERATIONS, ROWS)
def test_unpack_undoes_pack(slot: int, generation: int, rows: int) -> None:
    packed = immediate.pack(slot, generation, rows)
    assert immediate.unpack(packed) == (slot, generation, rows)
    assert packed >> immediate.ROWS_BITS == immediate.counter_index(slot, generation)
    assert packed == immediate.base(slot, generation) + rows - 1


@given(st.integers(0, 0xFFFFFFFF))
def test_pack_undoes_unpack(packed: int) -> None:
    assert immediate.pack(*immediate.unpack(packed)) == packed


@pytest.mark.parametrize(
    ("slot", "generation", "rows", "message"),
    [
        (-1, 0, 1, "slot is -1, outside 0..16383"),
        (NUM_SLOTS, 0, 1, "slot is 16384, outside 0..16383"),
        (0, 16, 1, "generation is 16, outside 0..15"),
        (0, 0, 0, "rows is 0, outside 1..16384"),
        (0, 0, MAX_ROWS + 1, "rows is 16385, outside 1..16384"),
    ],
)
def test_out_of_range_is_refused_with_value_and_range(slot: int, generation: int, rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        immediate.pack(slot, generation, rows)


@pytest.mark.parametrize("packed", [-1, 1 << 32])
def test_unpack_takes_32_bits(packed: int) -> None:
    with pytest.raises(ValueError, match=f"immediate is {packed}, outside 0..4294967295"):
        immediate.unpack(packed)
