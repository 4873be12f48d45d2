"""Immediate slots, context slots, attempt numbers: who has which, and when one may be used again."""

from __future__ import annotations

from collections import deque

from kvmsgr_protocol import NUM_GENERATIONS, NUM_SLOTS


class SlotPool:
    """Immediate slots of one messenger. The receiver owns them.

    A slot is handed out with its next generation and comes back only when no write that carries it can land, so the
    pool never needs to ask. Freed slots queue up behind the others: a late write of a peer that broke the rules
    meets its own counter for as long as possible.

    Args:
        first_slot, first_generation: Random for each incarnation, so that a restarted messenger does not count what
            was meant for the old one.
        num_slots: How many slots this messenger uses; at most 2^14.
    """

    def __init__(self, first_slot: int, first_generation: int, num_slots: int = NUM_SLOTS) -> None:
        if not 0 < num_slots <= NUM_SLOTS:
            raise ValueError(f"num_slots must be in 1..{NUM_SLOTS}, not {num_slots}")
        self._free = deque((first_slot + i) % NUM_SLOTS for i in range(num_slots))
        self._generation: dict[int, int] = {}
        self._first_generation = first_generation
        self._held: set[int] = set()

    def take(self) -> tuple[int, int] | None:
        """A free (slot, generation), or None when every slot is held."""
        if not self._free:
            return None
        slot = self._free.popleft()
        generation = self._generation.get(slot, self._first_generation) % NUM_GENERATIONS
        self._generation[slot] = generation + 1
        self._held.add(slot)
        return slot, generation

    def give(self, slot: int) -> None:
        """Give back a slot that no write can reach any more."""
        if slot not in self._held:
            raise ValueError(f"slot {slot} is not held: it was given back twice, or never taken")
        self._held.remove(slot)
        self._free.append(slot)

    @property
    def num_held(self) -> int:
        return len(self._held)


class IndexPool:
    """Indices 0..num-1, handed out oldest first."""

    def __init__(self, num: int) -> None:
        self._free = deque(range(num))
        self._held: set[int] = set()

    def take(self) -> int | None:
        """A free index, or None when every one is held."""
        if not self._free:
            return None
        index = self._free.popleft()
        self._held.add(index)
        return index

    def give(self, index: int) -> None:
        """Give an index back."""
        if index not in self._held:
            raise ValueError(f"index {index} is not held: it was given back twice, or never taken")
        self._held.remove(index)
        self._free.append(index)

    @property
    def num_held(self) -> int:
        return len(self._held)


class AttemptNumbers:
    """Numbers of attempts: no two alive share an entry `number % num_entries` of a table, and none is used twice before
    `limit`, a multiple of `num_entries`."""

    def __init__(self, num_entries: int, limit: int = 1 << 62) -> None:
        self._num_entries, self._limit = num_entries, limit
        self._next = 0
        self._held: set[int] = set()

    def take(self) -> int | None:
        """A new number, or None when every entry is held."""
        if len(self._held) == self._num_entries:
            return None
        while self._next % self._num_entries in self._held:
            self._next += 1
        number = self._next % self._limit
        self._next = number + 1
        self._held.add(number % self._num_entries)
        return number

    def give(self, number: int) -> None:
        """The attempt is over: its entry may be used again."""
        if number % self._num_entries not in self._held:
            raise ValueError(f"attempt {number} is not alive: it was given back twice, or never taken")
        self._held.remove(number % self._num_entries)
