"""The in-process fabric: the faults that only it has, its clock, and its plans beside the native ones."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmsgr.fabric import records
from kvmsgr.fabric.inprocess import Air, InProcessPoller, current_air, use_air
from kvmsgr.fabric.inprocess.driver import Driver
from kvmsgr.fabric.interface import FAILED_COMPLETION, FAILED_TIMEOUT, Poller
from kvmsgr.fabric.libfabric import FabricSettings, NativePoller, open_fabric
from kvmsgr.testing.fabrics import InProcess, Libfabric
from kvmsgr.testing.pair import SCATTERED, Pair
from kvmsgr.testing.side import IMMEDIATE, NUM_LAYERS, NUM_PAGES, ROWS_A_PAGE, WHOLE


@pytest.fixture
def fabric() -> InProcess:
    return InProcess(1)


@pytest.fixture
def pair(fabric: InProcess) -> Iterator[Pair]:
    with Pair(fabric) as pair:
        yield pair
    assert len(fabric.air) == 0, "endpoints were left open"


def target_address(pair: Pair) -> bytes:
    return pair.target.poller.link_address(pair.target_link)


def inprocess(poller: Poller) -> InProcessPoller:
    return cast(InProcessPoller, poller)


def test_both_fabrics_are_what_the_runtime_asks_for(pair: Pair) -> None:
    assert isinstance(pair.source.poller, Poller)
    missing = [name for name in vars(Poller) if not name.startswith("_") and not hasattr(NativePoller, name)]
    assert missing == []


# What is in the air


def test_held_writes_complete_if_asked_and_land_when_released(pair: Pair, fabric: InProcess) -> None:
    fabric.air.hold(target_address(pair))
    pair.target.expect(ROWS_A_PAGE)
    pair.begin([(0, 0)], ready=True, num_bumps=0)
    assert pair.source.wait(records.SENT)[2] == ROWS_A_PAGE, "local completion says nothing of the target"
    pair.target.wait_rounds()
    assert len(fabric.air.flights(target_address(pair))) == NUM_LAYERS
    assert pair.target.is_clear()
    pair.source.memory[:] = 0  # its pages have been given to others: what was read is what lands
    fabric.air.release(target_address(pair))
    pair.target.wait(records.REACHED)
    assert pair.target.copy()[:, 0].all()
    assert fabric.air.flights() == []


def test_held_writes_without_completions_keep_their_source_pages(pair: Pair, fabric: InProcess) -> None:
    fabric.air.hold(target_address(pair), completes=False)
    pair.target.expect(ROWS_A_PAGE)
    pair.begin([(0, 0)], ready=True, num_bumps=0)
    pair.source.wait_stat("posted_writes", NUM_LAYERS)
    pair.source.wait_rounds()
    assert not pair.source.seen(records.SENT)
    pair.source.memory[:] = 9
    fabric.air.release(target_address(pair))
    pair.source.wait(records.SENT)
    assert (pair.target.copy()[:, 0] == 9).all(), "the source is read until the write is complete"


def test_a_close_drops_what_is_in_the_air_for_good(pair: Pair, fabric: InProcess) -> None:
    fabric.air.hold(target_address(pair))
    pair.begin(SCATTERED, ready=True, num_bumps=0)
    pair.source.wait_stat("posted_writes", 20)
    pair.target.close_link(pair.target_link)
    assert fabric.air.flights() == []
    assert pair.source.wait(records.LINK_FAILED)[2] in (errno.ECONNRESET, errno.ENOTCONN)
    pair.target.wait_rounds()
    assert pair.target.is_clear()


def test_a_completion_that_fails_may_have_landed(pair: Pair) -> None:
    pair.target.expect(ROWS_A_PAGE)
    pair.source.poller.inject("error", 2)
    pair.begin([(0, 0)], ready=True, num_bumps=0)
    assert pair.source.wait(records.LINK_FAILED)[2:5:2] == (errno.EIO, FAILED_COMPLETION)
    pair.target.wait(records.REACHED)


def test_one_that_vanished_neither_completes_nor_polls(fabric: InProcess) -> None:
    with Pair(fabric, op_timeout_ns=20_000_000, window=4) as pair:
        pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
        inprocess(pair.target.poller).vanish()
        pair.begin(SCATTERED, ready=True, num_bumps=0)
        assert pair.source.wait(records.LINK_FAILED)[2:5:2] == (errno.ETIMEDOUT, FAILED_TIMEOUT)
        assert len(fabric.air.flights()) == 4, "the window"
        pair.source.close_link(pair.link)
        assert pair.target.is_clear()


def test_a_full_air_is_tried_again(fabric: InProcess) -> None:
    with Pair(fabric, window=1000) as pair:
        pair.target.expect(4 * NUM_PAGES * ROWS_A_PAGE)
        fabric.air.hold(target_address(pair))
        pair.send(4)
        pair.source.wait_stat("again", 1)
        fabric.air.release(target_address(pair))
        pair.target.wait(records.REACHED)
        pair.assert_moved(SCATTERED)


def test_the_same_seed_takes_the_same_way() -> None:
    def order(seed: int) -> list[int]:
        seen = []
        with Pair(InProcess(seed, any_order=True)) as pair:
            pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
            land = pair.target.poller.stats
            pair.send(2)
            while len(seen) < 200:
                inprocess(pair.source.poller).pump()
                inprocess(pair.target.poller).pump()
                seen.append(land()["landed_rows"])
        return seen

    assert order(3) == order(3)
    assert order(3) != order(4)


# Time


def test_the_driver_goes_by_the_clock_of_its_loop() -> None:
    """A step runs out of time when its loop says so, and nobody pumps."""

    async def main() -> tuple[int, ...]:
        with Pair(InProcess(1)) as pair:
            driver = Driver(inprocess(pair.source.poller), asyncio.get_running_loop())
            arrived = asyncio.Event()
            asyncio.get_running_loop().add_reader(pair.source.poller.fd, arrived.set)
            nothing = np.zeros((0, 10), np.int64), np.zeros((0, 2), np.int32), np.zeros((0, 4), np.uint64)
            pair.source.poller.begin_step([(0, 1)], *nothing, 20_000_000)
            await asyncio.wait_for(arrived.wait(), 10)
            asyncio.get_running_loop().remove_reader(pair.source.poller.fd)
            del driver
            return pair.source.wait(records.STEP_FAULT)[:3]

    assert asyncio.run(main()) == (records.STEP_FAULT, 0, 1)


def test_messengers_are_opened_in_the_air_that_is_in_use(tmp_path: Path) -> None:
    settings = FabricSettings(
        "inprocess", True, [None], "ab" * 16, 64, 0.5, 2.0, 5.0, "auto", [(1, None)], None, str(tmp_path)
    )
    before, mine = current_air(), Air(5)
    with use_air(mine):
        opened = open_fabric(settings, [])
        assert inprocess(opened.poller).air is mine
        assert opened.choice.provider == "inprocess"
        opened.close()
    assert current_air() is before
    assert list(tmp_path.iterdir()) == []


# Plans: two readings of the same orders


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int]], int]:
    """Runs within a page (of rows of 16 bytes), page pairs, and the longest write."""
    rows = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    runs, at = [], 0
    for num_rows in rows:
        at += draw(st.sampled_from([0, 0, 16]))
        shift = draw(st.sampled_from([0, 0, 32]))
        runs.append([at, (at + shift) % 512, 16 * num_rows, num_rows])
        at += 16 * num_rows
    sources = draw(st.lists(st.integers(0, 20), min_size=1, max_size=12))
    pairs = [(page, page + 1 if draw(st.booleans()) else 40 + index) for index, page in enumerate(sources)]
    return runs, pairs, draw(st.sampled_from([16, 40, 64, 200, 1 << 20]))


def moved(fabric: InProcess | Libfabric, plan: tuple[list[list[int]], list[tuple[int, int]], int]) -> object:
    runs, pairs, max_write_bytes = plan
    with Pair(fabric, max_write_bytes=max_write_bytes, window=1) as pair:
        entries = np.array([[0, 0, 0, 0, 0]], dtype=np.int64)
        template = pair.source.poller.add_template(
            pair.link, np.array(runs, dtype=np.uint64), (384, 3, 128), WHOLE, entries, 16, 2
        )
        pair.target.expect(1 << 40)
        pair.source.begin([((pair.link, template, IMMEDIATE, 1, True), pairs)], 0)
        rows, writes = pair.source.wait(records.SENT)[2:5:2]
        pair.target.wait_stat("landed_rows", rows)
        return rows, writes, pair.target.copy().tobytes()


@settings(max_examples=25, deadline=None)
@given(plans())
@pytest.mark.slow
def test_both_expand_plans_into_the_same_writes(plan: tuple[list[list[int]], list[tuple[int, int]], int]) -> None:
    assert moved(InProcess(1), plan) == moved(Libfabric("net"), plan)
