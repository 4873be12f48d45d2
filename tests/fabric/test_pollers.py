"""Several polling threads as one poller: what the conformance suite does not see from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from kvmsgr._ext import native
from kvmsgr.fabric import records
from kvmsgr.fabric.interface import PORT_CLOSED, PORT_FAILED, PORT_OPENED, LayerCounter, Poller, Record, RingFullError
from kvmsgr.fabric.libfabric import NativePoller, providers
from kvmsgr.fabric.pollers import PollerGroup
from kvmsgr.testing.fabrics import LibfabricGroup
from kvmsgr.testing.interfaces import split
from kvmsgr.testing.pair import SCATTERED, Pair
from kvmsgr.testing.side import NUM_LAYERS, NUM_PAGES, ROWS_A_PAGE, Side

NET = next(name for name in ("tcp", "net") if name in providers())
ALL_ROWS = NUM_PAGES * ROWS_A_PAGE
SLOW_NS = 900_000_000


class Shown(LibfabricGroup):
    """Shows the pollers of its groups, the source's first."""

    def __init__(self) -> None:
        super().__init__(NET)
        self.groups: list[PollerGroup] = []

    def poller(self, *arguments: object, **more: object) -> Poller:
        group = super().poller(*arguments, **more)  # type: ignore[arg-type]  # as they came
        assert isinstance(group, PollerGroup)
        self.groups.append(group)
        return group

    @property
    def sources(self) -> Sequence[NativePoller]:
        return self.groups[0]._pollers


def test_a_shared_step_is_said_to_be_over_once_both_are_through_with_it() -> None:
    fabric = Shown()
    with Pair(fabric, nics=(2, 2)) as pair:
        pair.target.expect(2 * ALL_ROWS)
        tickets = [pair.source.begin(split(pair)) for _ in range(2)]
        for ticket in tickets:
            pair.source.run_step(ticket)
        assert pair.source.wait(records.STEP_ENDED)[1:5:3] == (0, NUM_LAYERS)
        pair.target.wait(records.REACHED)
        assert [poller.stats()["posted_rows"] for poller in fabric.sources] == [ALL_ROWS, ALL_ROWS]
        pair.source.poller.abandon(0, tickets[1])
        pair.source.wait_rounds()
        assert not pair.source.seen(records.STEP_ENDED, records.STEP_FAULT)


def test_a_ring_slot_waits_for_the_poller_that_is_behind() -> None:
    """It has not read yet what the slot says of its own step."""
    fabric = Shown()
    with Pair(fabric, nics=(2, 2)) as pair:
        num_slots = pair.source.counter.num_slots
        first = pair.source.begin(split(pair))
        for _ in range(num_slots - 1):
            pair.source.begin([])
        behind = fabric.sources[1]
        behind.disturb(1, slow_ns=SLOW_NS)
        before = behind.stats()["rounds"]
        pair.source.until(lambda: behind.stats()["rounds"] > before, "the slow poller begins a pause")
        before = behind.stats()["rounds"]
        fabric.sources[0].abandon(0, first)  # one of the two is through with it
        pair.source.wait(records.STOPPED)
        with pytest.raises(RingFullError, match=f"{num_slots} steps of layer counter 0"):
            pair.source.begin([])
        assert behind.stats()["rounds"] == before, "it was too slow a machine to see anything"
        behind.disturb(1)
        behind.abandon(0, first)
        pair.source.wait(records.STOPPED)
        assert pair.source.begin([]) == first + num_slots


def test_a_join_waits_for_the_step_in_the_poller_that_is_behind() -> None:
    """In the other one that step is complete and over."""
    fabric = Shown()
    with Pair(fabric, nics=(2, 2)) as pair:
        behind = fabric.sources[1]
        behind.disturb(1, slow_ns=SLOW_NS)
        before = behind.stats()["rounds"]
        pair.source.until(lambda: behind.stats()["rounds"] > before, "the slow poller begins a pause")
        before = behind.stats()["rounds"]
        pair.target.expect(ALL_ROWS)
        ticket = pair.source.begin([])
        pair.source.run_step(ticket)
        pair.source.counter.start(pair.source.begin([]))
        pair.source.join([(0, ticket)], [(0, *transfer) for transfer in split(pair)])
        assert pair.source.wait(records.SENT)[1:3] == (0, ALL_ROWS // 2)
        assert behind.stats()["rounds"] == before, "it was too slow a machine to see anything"
        behind.disturb(1)
        assert pair.source.wait(records.SENT)[1:3] == (1, ALL_ROWS // 2)
        pair.target.wait(records.REACHED)
        pair.assert_moved(SCATTERED)


def test_a_join_is_lost_in_each_poller_that_has_to_do_with_it() -> None:
    """Each of these says so, and no other."""
    fabric = Shown()
    with Pair(fabric, nics=(2, 2)) as pair:
        (first, pairs), (second, _) = split(pair, [(0, 0)])
        never_begun = 7
        for transfers, lost in [([first], [0]), ([second], [1]), ([first, second], [0, 1])]:
            pair.source.join([(0, never_begun)], [(0, order, pairs) for order in transfers])
            for tag in lost:
                pair.source.wait(records.STOPPED, tag)
            assert [pair.source.wait(records.JOIN_LOST, tag)[1:3] for tag in lost] == [(tag, 7) for tag in lost]
        pair.source.wait_rounds()
        assert not pair.source.seen(records.JOIN_LOST, records.STOPPED)
        other = fabric.groups[0].add_counter(LayerCounter(4), nics=[1])
        with pytest.raises(ValueError, match=f"layer counter {other} is not watched for link {pair.links[0]}"):
            pair.source.join([(other, 1)], [(0, first, pairs)])


def test_what_one_poller_cannot_take_is_armed_in_none() -> None:
    fabric = Shown()
    with Pair(fabric, nics=(2, 2)) as pair:
        good, bad = split(pair, [(0, 0)], ready=True)
        with pytest.raises(ValueError, match=r"transfer 1: .* leaves its source region"):
            pair.source.begin([good, (bad[0], [(NUM_PAGES, 0)])])
        fabric.sources[1].close()
        with pytest.raises(RuntimeError, match="closed"):
            pair.source.begin([good])
        fabric.sources[0].stats()
        assert not any(poller.stats()["posted_writes"] for poller in fabric.sources)
        assert pair.source.seen(records.SENT, records.STOPPED) == []


def test_a_counter_of_one_interface_lives_with_its_poller() -> None:
    fabric = Shown()
    with Pair(fabric, nics=(2, 2)) as pair:
        group, other = fabric.groups[0], LayerCounter(4)
        with pytest.raises(ValueError, match="interface 2 of 2"):
            group.add_counter(LayerCounter(4), nics=[2])
        index = group.add_counter(other, nics=[1])
        (first, pairs), (second, _) = split(pair)
        with pytest.raises(ValueError, match=f"layer counter {index} is not watched for link {pair.links[0]}"):
            pair.source.arm([(index, NUM_LAYERS)], [(0, first, pairs)])
        pair.target.expect(ALL_ROWS // 2)
        tickets = [pair.source.arm([(index, NUM_LAYERS)], [(0, second, pairs)])[0] for _ in range(4)]
        assert tickets == [1, 2, 3, 4]  # what was refused has cost none
        native.begin_step(  # the first poller is not asked, whatever it waits for
            fabric.sources,
            [(0, 1, 1)],
            np.zeros((0, 10), np.int64),
            np.zeros((0, 2), np.int32),
            np.zeros((0, 4), np.uint64),
            1,
        )
        other.start(1)
        for _ in range(NUM_LAYERS):
            other.bump()
        pair.target.wait(records.REACHED)
        other.start(2)
        assert pair.source.wait(records.STEP_ENDED, index)[2] == 1


def test_pollers_of_another_messenger_do_not_go_together() -> None:
    fabric = Shown()
    with Pair(fabric, nics=(2, 2)):
        ours, theirs = (group._pollers for group in fabric.groups)
        nothing = np.zeros((0, 10), np.int64), np.zeros((0, 2), np.int32), np.zeros((0, 4), np.uint64)
        with pytest.raises(ValueError, match="another one in each poller"):
            native.begin_step([ours[0], theirs[1]], [(0, 1, 3)], *nothing, 1)
        with pytest.raises(ValueError, match="poller 0 of 2 was made as 1 of 2"):
            native.begin_step([ours[1], ours[0]], [(0, 1, 3)], *nothing, 1)
        with pytest.raises(ValueError, match="no poller watches"):
            native.begin_step(ours, [(0, 1, 0)], *nothing, 1)


def test_rounds_are_those_that_all_have_gone() -> None:
    """So that one that is stuck is noticed, whatever the others do."""
    fabric = Shown()
    with Pair(fabric, nics=(2, 2)) as pair:
        pair.source.wait_rounds()
        fast, slow = fabric.sources
        slow.disturb(1, slow_ns=SLOW_NS)
        slowed, running = slow.stats()["rounds"], fast.stats()["rounds"]
        before = pair.source.stats()["rounds"]
        pair.source.until(lambda: fast.stats()["rounds"] > running + 1000, "the other goes on")
        gone = pair.source.stats()["rounds"] - before
        assert gone < slow.stats()["rounds"] - slowed + 20  # some were not counted yet before
        slow.disturb(1)
        pair.source.wait_rounds()


def test_faults_of_one_write_are_the_first_pollers() -> None:
    with Pair(LibfabricGroup(NET), nics=(2, 2)) as pair:
        pair.source.poller.trace(64)
        pair.target.expect(2 * ROWS_A_PAGE // 2 - 16)
        pair.source.poller.inject("drop", 1)
        pair.source.begin(split(pair, [(1, 1)], ready=True), num_bumps=0)
        for _ in range(2):
            pair.source.wait(records.SENT)
        pair.target.until_landed(3 * 16)
        assert not pair.target.copy()[0, 1].any()
        marks = pair.source.poller.take_trace()
        assert sorted(mark[0] for mark in marks) == [0, 0, 1, 1]
        assert [mark[3] for mark in marks] == sorted(mark[3] for mark in marks)


# With pollers that say what a test wants


class Told:
    """A poller as far as `PollerGroup.take` looks: it hands out what it is given."""

    def __init__(self, said: Sequence[Record] = ()) -> None:
        self.said = list(said)
        self.state = native.StateFile(None)
        self.real = native.Poller(NET, self.state)
        self.fd, self.has_port = self.real.fd, True

    def take(self, max_records: int) -> list[Record]:
        taken, self.said = self.said[:max_records], self.said[max_records:]
        return taken

    def close_port(self) -> None:
        if not self.has_port:
            raise KeyError

    def close(self) -> None:
        self.real.close()
        self.state.close()


def group_of(*told: Told) -> PollerGroup:
    return PollerGroup(lambda index: cast(NativePoller, told[index]), [1] * len(told))


def record(kind: int, ident: int = 0, value: int = 0) -> Record:
    return kind, ident, value, 0, 0


def test_records_are_taken_in_turns_and_in_order() -> None:
    group = group_of(
        Told([record(records.SENT, tag) for tag in range(5)]),
        Told([record(records.SENT, tag) for tag in range(10, 13)]),
    )
    taken = [[tag for _, tag, *_ in group.take(2)] for _ in range(5)]
    assert taken == [[0, 1], [10, 11], [2, 3], [12, 4], []]
    group.close()


def test_a_port_is_open_when_all_have_it() -> None:
    one, other = Told([record(PORT_OPENED, 7)]), Told([record(records.SENT, 1)])
    group = group_of(one, other)
    assert [said[0] for said in group.take()] == [records.SENT]
    other.said = [record(PORT_OPENED, 3)]
    assert [said[:2] for said in group.take()] == [(PORT_OPENED, 2)]
    with pytest.raises(KeyError, match="the one to close is port 1"):
        group.close_port(2)
    group.close_port(1)
    one.said = [record(PORT_CLOSED, 6)]
    assert not group.take()
    other.said = [record(PORT_CLOSED, 2), record(PORT_OPENED, 4)]
    assert [said[:2] for said in group.take()] == [(PORT_CLOSED, 1)]
    one.said = [record(PORT_OPENED, 8)]
    assert [said[:2] for said in group.take()] == [(PORT_OPENED, 3)]
    group.close()


def test_a_port_that_one_cannot_open_is_open_for_none() -> None:
    one, other = Told([record(PORT_OPENED, 2)]), Told([record(PORT_FAILED, 0, 24)])
    group = group_of(one, other)
    assert [said[:3] for said in group.take()] == [(PORT_FAILED, 0, 24)]
    other.has_port = False
    group.close_port()
    one.said = [record(PORT_CLOSED, 1), record(PORT_FAILED, 5, 1)]
    assert [said[:2] for said in group.take()] == [(PORT_CLOSED, 1), (PORT_FAILED, 5)], "one that stays open is said"
    one.has_port = False
    with pytest.raises(KeyError, match="not open"):
        group.close_port()
    group.close()


def test_records_that_are_not_for_the_outside_hide_no_others() -> None:
    one = Told([record(PORT_OPENED, 2), record(records.SENT, 4)])
    group = group_of(one, Told())
    assert [said[:2] for said in group.take(1)] == [(records.SENT, 4)]
    group.close()


def test_those_that_were_opened_are_closed_when_one_cannot_be() -> None:
    state, opened = native.StateFile(None), list[NativePoller]()

    def open_one(index: int) -> NativePoller:
        opened.append(native.Poller("no-such-provider" if index else NET, state, index=index, num_pollers=2))
        return opened[-1]

    with pytest.raises(native.NativeError, match="no-such-provider"):
        PollerGroup(open_one, [1, 1])
    assert [poller.closed for poller in opened] == [True]
    state.close()


def test_regions_have_the_same_number_in_all() -> None:
    side = Side(LibfabricGroup(NET), 3)
    extra = np.zeros(64, np.uint8)
    for expected, nics in enumerate([[1], [0, 2], [2]], 1):
        assert side.poller.register(extra.ctypes.data, extra.nbytes, nics=nics) == expected
    links = [side.open_link(nic, num) for nic, num in [(0, 2), (1, 2), (2, 3)]]
    assert len(set(links)) == 3
    assert [len(side.poller.link_regions(link)) for link in links] == [2, 2, 3]
    side.close()
