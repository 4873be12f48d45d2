"""Slots, indices and attempt numbers are never given to two owners."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvmsgr.core.slots import AttemptNumbers, IndexPool, SlotPool
from kvmsgr_protocol import NUM_GENERATIONS, NUM_SLOTS


class SlotStory(RuleBasedStateMachine):
    """Takes and gives in any order, over few slots."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(NUM_SLOTS - 2, 13, num_slots=5)
        self.held: dict[int, int] = {}
        self.last: dict[int, int] = {}

    @rule()
    def take(self) -> None:
        taken = self.pool.take()
        if len(self.held) == 5:
            assert taken is None, "a slot was given out that is held"
            return
        assert taken is not None
        slot, generation = taken
        assert slot not in self.held
        assert 0 <= slot < NUM_SLOTS
        if slot in self.last:
            assert generation == (self.last[slot] + 1) % NUM_GENERATIONS, "a late write would meet the new counter"
        self.held[slot] = self.last[slot] = generation

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[slot]
        self.pool.give(slot)
        assert self.pool.num_held == len(self.held)


TestSlotStory = SlotStory.TestCase


def test_a_freed_slot_waits_behind_all_others() -> None:
    pool = SlotPool(0, 0, num_slots=4)
    taken = pool.take()
    assert taken == (0, 0)
    pool.give(0)
    assert [pool.take() for _ in range(4)] == [(1, 0), (2, 0), (3, 0), (0, 1)]


@pytest.mark.parametrize("num_slots", [0, -1, NUM_SLOTS + 1])
def test_a_pool_of_an_impossible_size_is_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match=str(num_slots)):
        SlotPool(0, 0, num_slots)


def test_giving_twice_is_named() -> None:
    pool = SlotPool(7, 0, num_slots=2)
    pool.take()
    pool.give(7)
    with pytest.raises(ValueError, match="slot 7"):
        pool.give(7)
    indices = IndexPool(1)
    with pytest.raises(ValueError, match="index 0"):
        indices.give(0)
    attempts = AttemptNumbers(4)
    with pytest.raises(ValueError, match="attempt 3"):
        attempts.give(3)


def test_indices_run_out_and_come_back() -> None:
    indices = IndexPool(2)
    assert [indices.take() for _ in range(3)] == [0, 1, None]
    indices.give(1)
    assert indices.num_held == 1
    assert indices.take() == 1


def test_attempts_are_never_numbered_twice_and_pass_entries_that_are_held() -> None:
    attempts = AttemptNumbers(3)
    assert [attempts.take() for _ in range(4)] == [0, 1, 2, None]
    attempts.give(0)
    attempts.give(2)
    assert attempts.take() == 3
    assert attempts.take() == 5  # 4 shares the entry of 1, which is alive
    assert attempts.take() is None
