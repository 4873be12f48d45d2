"""What layer words release, and how steps end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvmsgr._ext import native
from tests.native.loopback import IMMEDIATE, NO_EDGES, NUM_LAYERS, PAGE_ROWS, Pair

NET = next(name for name in ("tcp", "net") if name in native.providers())
SOON_NS = 1_000_000_000


def when_there_is_room(begin: Callable[[], int]) -> int:
    """Tries again until a ring slot has come back; for those that come back without a record."""
    limit_ns = native.monotonic_ns() + 10**10
    while native.monotonic_ns() < limit_ns:
        try:
            return begin()
        except native.RingFullError:
            continue
    raise AssertionError("no ring slot came back")


def until_asleep(pair: Pair) -> None:
    """It sleeps only when its connections are not young any more: for two seconds."""
    limit_ns = native.monotonic_ns() + 10**10
    sleeps = pair.source.poller.stats()["sleeps"]
    while pair.source.poller.stats()["sleeps"] < sleeps + 2:
        assert native.monotonic_ns() < limit_ns


def test_a_step_ends_when_the_next_one_starts(pair: Pair) -> None:
    first, second = pair.begin([(0, 0)]), pair.begin([(1, 1)])
    assert second == first + 1
    pair.run_step(first)
    pair.source.counter.start(second)
    assert pair.source.wait(native.STEP_ENDED)[1:5:3] == (0, NUM_LAYERS)


def test_fewer_bumps_are_a_fault_and_stop_what_waits(pair: Pair) -> None:
    first, second = pair.begin([(0, 0)], tag=1), pair.begin([(1, 1)], tag=2)
    pair.expect_rows((NUM_LAYERS - 1) * PAGE_ROWS)
    pair.run_step(first, NUM_LAYERS - 1)
    pair.target.wait(native.REACHED)
    pair.source.counter.start(second)
    _, counter, ticket, _, extra = pair.source.wait(native.STEP_FAULT)
    assert (counter, ticket, extra >> 32, extra & 0xFFFFFFFF) == (0, first, NUM_LAYERS - 1, native.FEWER)
    assert pair.source.wait(native.STOPPED, 1)[2] == (NUM_LAYERS - 1) * PAGE_ROWS


def test_more_bumps_are_a_fault_once(pair: Pair) -> None:
    first, second = pair.begin([(0, 0)]), pair.begin([(1, 1)])
    pair.run_step(first, NUM_LAYERS + 1)
    assert pair.source.wait(native.STEP_FAULT)[4] == (NUM_LAYERS + 1) << 32 | native.MORE
    pair.source.counter.bump()
    pair.run_step(second)
    third = pair.begin([(2, 2)])
    pair.source.counter.start(third)
    assert pair.source.wait(native.STEP_ENDED)[2] == second
    assert not [record for record in pair.source.seen if record[0] == native.STEP_FAULT]


def test_a_step_that_never_starts_ends_at_its_deadline(pair: Pair) -> None:
    ticket = pair.begin([(0, 0)], tag=3, deadline_s=0.02)
    assert pair.source.wait(native.STEP_FAULT)[2:5:2] == (ticket, native.DEADLINE)
    assert pair.source.wait(native.STOPPED, 3)[2] == 0


def test_a_complete_step_ends_well_at_its_deadline(pair: Pair) -> None:
    ticket = pair.begin([(0, 0)], deadline_s=0.05)
    pair.run_step(ticket)
    assert pair.source.wait(native.STEP_ENDED)[2:5:2] == (ticket, NUM_LAYERS)


def test_steps_without_transfers_are_checked(pair: Pair) -> None:
    tickets = [pair.begin_nothing() for _ in range(2)]
    pair.source.counter.start(tickets[1])
    assert pair.source.wait(native.STEP_FAULT)[2] == tickets[0]


def test_forwards_without_a_ticket_release_nothing(pair: Pair) -> None:
    ticket = pair.begin([(0, 0)])
    pair.run_step(0, 2 * NUM_LAYERS)
    assert pair.source.counter.ticket == 0
    pair.expect(1)
    pair.run_step(ticket)
    pair.target.wait(native.REACHED)
    pair.run_step(0)
    assert pair.source.counter.bumps == NUM_LAYERS


def test_an_abandoned_step_gives_everything_back(pair: Pair) -> None:
    num_slots = pair.source.counter.num_slots
    tickets = [pair.begin([(0, 0)], tag=tag) for tag in range(num_slots)]
    with pytest.raises(native.RingFullError, match=f"{num_slots} steps"):
        pair.begin([(1, 1)])
    for tag, ticket in enumerate(tickets):
        pair.source.poller.abandon(0, ticket)
        assert pair.source.wait(native.STOPPED)[1:3] == (tag, 0)
    pair.source.poller.abandon(0, tickets[0])  # long gone: no harm
    ticket = pair.begin([(1, 1)])
    assert ticket == tickets[-1] + 1
    pair.expect(1)
    pair.run_step(ticket)
    pair.target.wait(native.REACHED)
    pair.assert_moved([(1, 1)])


def test_a_stale_word_in_the_ring_slot_releases_nothing(pair: Pair) -> None:
    num_slots = pair.source.counter.num_slots
    stale = pair.begin([(0, 0)])
    pair.run_step(stale)
    pair.source.wait(native.SENT)
    for _ in range(num_slots - 1):
        ticket = pair.begin([(1, 1)])
        pair.source.poller.abandon(0, ticket)
        pair.source.wait(native.STOPPED)
    pair.source.poller.abandon(0, stale)
    ticket = when_there_is_room(lambda: pair.begin([(2, 2)]))
    assert ticket % num_slots == stale % num_slots
    pair.source.poller.abandon(0, ticket)
    assert pair.source.wait(native.STOPPED)[2] == 0
    assert not pair.target.pages[:, 2].any()


def test_records_that_find_the_ring_full_keep_their_order(pair: Pair) -> None:
    num_steps = 9000
    for _ in range(num_steps):
        when_there_is_room(lambda: pair.begin_nothing(num_bumps=0))
    tickets: list[int] = []
    while len(tickets) < num_steps:
        tickets.append(pair.source.wait(native.STEP_ENDED)[2])
    assert tickets == list(range(1, num_steps + 1))
    assert pair.source.poller.stats()["lost_records"] == 0


def test_a_poller_that_sleeps_hears_of_joins_and_of_surplus_bumps() -> None:
    """The last step has shown all, no later one starts and its deadline is far: nothing keeps the poller awake."""
    with Pair(NET) as pair:
        pair.expect(2)
        ticket = pair.begin([(0, 0)], tag=1)
        pair.run_step(ticket)
        pair.source.wait(native.SENT, 1)
        until_asleep(pair)
        order = (0, pair.link, pair.template, IMMEDIATE, 2, 0, 0, 1, 0, 0)
        orders, pages = np.array([order], dtype=np.int64), np.array([[1, 1]], dtype=np.int32)
        joined_ns = native.monotonic_ns()
        pair.source.poller.join_step([(0, ticket)], orders, pages, NO_EDGES)
        _, _, rows, t_ns, _ = pair.source.wait(native.SENT, 2)
        assert rows == NUM_LAYERS * PAGE_ROWS
        assert t_ns - joined_ns < SOON_NS
        pair.target.wait(native.REACHED)
        pair.assert_moved([(1, 1)])
        until_asleep(pair)
        assert not pair.source.drain(native.STEP_FAULT)
        bumped_ns = native.monotonic_ns()
        pair.source.counter.bump()
        _, counter, faulted, t_ns, extra = pair.source.wait(native.STEP_FAULT)
        assert (counter, faulted, extra) == (0, ticket, (NUM_LAYERS + 1) << 32 | native.MORE)
        assert t_ns - bumped_ns < SOON_NS


def test_a_surplus_bump_is_named_before_the_step_that_follows_starts(pair: Pair) -> None:
    """The one after it has been announced, and goes on waiting."""
    first = pair.begin([(0, 0)], tag=1)
    second = pair.begin([(1, 1)], tag=2)
    pair.run_step(first, NUM_LAYERS)
    pair.source.wait(native.SENT, 1)
    pair.source.counter.bump()
    assert pair.source.wait(native.STEP_FAULT)[2:5:2] == (first, (NUM_LAYERS + 1) << 32 | native.MORE)
    assert pair.source.counter.bumps_of(second) is None
    assert not pair.source.drain(native.SENT, native.STOPPED)
