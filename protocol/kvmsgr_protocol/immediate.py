"""The 32 bits that travel with each write: slot (14) | generation (4) | rows - 1 (14).

The target adds the rows to the counter of (slot, generation). A write therefore always carries at least one row.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SLOT_BITS: Final = 14
GENERATION_BITS: Final = 4
ROWS_BITS: Final = 14

NUM_SLOTS: Final = 1 << SLOT_BITS
NUM_GENERATIONS: Final = 1 << GENERATION_BITS
MAX_ROWS: Final = 1 << ROWS_BITS
"""Most rows one write can carry."""


class Immediate(NamedTuple):
    """An immediate taken apart."""

    slot: int
    generation: int
    rows: int


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, outside {low}..{high}")


def counter_index(slot: int, generation: int) -> int:
    """Return the index of the counter of (slot, generation), which is `immediate >> ROWS_BITS`.

    Raises:
        ValueError: One is out of range.
    """
    _check("slot", slot, 0, NUM_SLOTS - 1)
    _check("generation", generation, 0, NUM_GENERATIONS - 1)
    return slot << GENERATION_BITS | generation


def base(slot: int, generation: int) -> int:
    """Return the immediate of (slot, generation) with the row bits zero; adding `rows - 1` completes it.

    Raises:
        ValueError: One is out of range.
    """
    return counter_index(slot, generation) << ROWS_BITS


def pack(slot: int, generation: int, rows: int) -> int:
    """Return the immediate of a write that carries `rows` (1..MAX_ROWS) rows.

    Raises:
        ValueError: One is out of range.
    """
    _check("rows", rows, 1, MAX_ROWS)
    return base(slot, generation) | rows - 1


def unpack(immediate: int) -> Immediate:
    """Take an immediate apart.

    Raises:
        ValueError: It is no unsigned 32-bit number.
    """
    _check("immediate", immediate, 0, (1 << SLOT_BITS + GENERATION_BITS + ROWS_BITS) - 1)
    counter, rows = divmod(immediate, MAX_ROWS)
    slot, generation = divmod(counter, NUM_GENERATIONS)
    return Immediate(slot, generation, rows + 1)
