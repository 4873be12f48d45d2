"""A layer counter in memory that another process has mapped, and bumps."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmsgr._ext import native
from tests.native.loopback import IMMEDIATE, NUM_LAYERS, PAGE_ROWS, Pair

NUM_SLOTS = 8
WORKER = """
import mmap, sys
from kvmsgr._ext import native
with mmap.mmap(int(sys.argv[1]), 0) as memory:
    counter = native.LayerCounter.attach(memory)
    counter.start(int(sys.argv[2]))
    for _ in range(int(sys.argv[3])):
        counter.bump()
    del counter
"""


@pytest.fixture
def memory() -> Iterator[tuple[int, mmap.mmap]]:
    """Of a file that a child may inherit."""
    file = os.memfd_create("counter")
    os.ftruncate(file, mmap.PAGESIZE)
    yield file, mmap.mmap(file, mmap.PAGESIZE)
    os.close(file)


def bump_elsewhere(file: int, ticket: int, num_bumps: int) -> None:
    command = [sys.executable, "-c", WORKER, *map(str, (file, ticket, num_bumps))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, pass_fds=[file], env=environment, cwd=Path(__file__).parents[2])


def test_bumps_of_another_process_release_layers(memory: tuple[int, mmap.mmap], provider: str) -> None:
    file, mapped = memory
    mapped[:] = b"\xff" * len(mapped)  # whatever was there before
    counter = native.LayerCounter(NUM_SLOTS, memory=mapped)
    with Pair(provider) as pair:
        index = pair.source.poller.add_counter(counter)
        order = [[0, pair.link, pair.template, IMMEDIATE, 1, 0, 0, 1, 0, 0]]
        (ticket,) = pair.arm([(index, NUM_LAYERS)], order, [(0, 0)])
        pair.expect(1)
        bump_elsewhere(file, ticket, NUM_LAYERS - 1)
        pair.wait_landed("landed_rows", (NUM_LAYERS - 1) * PAGE_ROWS)
        assert (counter.ticket, counter.bumps) == (ticket, NUM_LAYERS - 1)
        with pytest.raises(BufferError):
            mapped.close()  # it is kept while the counter lives
        bump_elsewhere(file, ticket, NUM_LAYERS)
        pair.target.wait(native.REACHED)
        pair.assert_moved([(0, 0)])


def test_a_worker_that_scribbles_over_it_harms_nobody_else(memory: tuple[int, mmap.mmap]) -> None:
    """The poller keeps by itself how many slots there are, and so does whoever asks for bumps."""
    _, mapped = memory
    counter = native.LayerCounter(NUM_SLOTS, memory=mapped)
    with Pair("net") as pair:
        index = pair.source.poller.add_counter(counter)
        order = [[0, pair.link, pair.template, IMMEDIATE, 1, 0, 0, 1, 0, 0]]
        for value in (0, 255):
            mapped[:] = bytes([value]) * len(mapped)
            assert (counter.bumps_of(1 << 39), counter.num_slots) == (None, NUM_SLOTS)
            pair.arm([(index, NUM_LAYERS)], order, [(0, 0)])
            rounds = pair.source.poller.stats()["rounds"]
            while pair.source.poller.stats()["rounds"] < rounds + 50:
                pass
        pair.expect(1)
        pair.run_step(pair.begin([(1, 1)]))
        pair.target.wait(native.REACHED)
        pair.assert_moved([(1, 1)])


def test_both_processes_see_the_same_counter(memory: tuple[int, mmap.mmap]) -> None:
    file, mapped = memory
    counter = native.LayerCounter(NUM_SLOTS, memory=memoryview(mapped)[64:])
    counter.start(3)
    counter.bump()
    other = native.LayerCounter.attach(memoryview(mapped)[64:])
    assert (other.num_slots, other.ticket, other.bumps) == (NUM_SLOTS, 3, 1)
    assert other.address == counter.address
    other.bump()
    assert counter.bumps_of(3) == 2
    del counter, other
    with mmap.mmap(file, mmap.PAGESIZE) as again:
        kept = native.LayerCounter.attach(memoryview(again)[64:])
        assert kept.bumps == 2, "it outlives its makers"
        del kept


def test_memory_that_will_not_do_is_refused(memory: tuple[int, mmap.mmap]) -> None:
    _, mapped = memory
    view = memoryview(mapped)
    need = native.LayerCounter.size_bytes(NUM_SLOTS)
    assert need == 64 + 8 * NUM_SLOTS
    for wrong in (view[: need - 1], view[8:]):
        with pytest.raises(ValueError, match="multiple of 64"):
            native.LayerCounter(NUM_SLOTS, memory=wrong)
    with pytest.raises(BufferError):
        native.LayerCounter(NUM_SLOTS, memory=bytes(need))
    with pytest.raises(ValueError, match="no layer counter in these 4096 bytes"):
        native.LayerCounter.attach(mapped)
    native.LayerCounter(2 * NUM_SLOTS, memory=view)
    with pytest.raises(ValueError, match="it would have 16 slots"):
        native.LayerCounter.attach(view[:need])
    for num_slots in (0, 4097):
        with pytest.raises(ValueError, match="1 to 4096"):
            native.LayerCounter.size_bytes(num_slots)


@pytest.mark.parametrize("scribble", [0, 0x7FFFFFF1, 0xFFFFFFFF])
def test_what_another_process_writes_into_it_cannot_end_this_one(memory: tuple[int, mmap.mmap], scribble: int) -> None:
    _, mapped = memory
    counter = native.LayerCounter(NUM_SLOTS, memory=mapped)
    with mmap.mmap(memory[0], 0) as elsewhere:
        elsewhere[8:12] = scribble.to_bytes(4, "little")  # the number of slots
    assert counter.num_slots == NUM_SLOTS
    with Pair("net") as pair:
        pair.source.poller.add_counter(counter)
        counter.start(1)
        counter.bump()
        assert counter.bumps_of(1) == 1
