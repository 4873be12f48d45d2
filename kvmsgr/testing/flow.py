"""Conformance: in which order writes go, how many at a time, and when they are said to have gone."""

from __future__ import annotations

import pytest

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import RingFullError

from .fabrics import FabricUnderTest
from .pair import SCATTERED, Pair
from .side import IMMEDIATE, NUM_LAYERS, NUM_PAGES, PAGE_BYTES, PAGE_ROWS, ROWS_A_PAGE


class Flow:
    def test_layers_go_as_they_are_bumped(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(2 * PAGE_ROWS)
            ticket = pair.begin([(0, 0)])
            pair.source.run_step(ticket, 2)
            pair.target.wait(records.REACHED)
            pair.source.wait_rounds()
            pair.target.wait_rounds()
            landed = pair.target.copy()
            assert landed[:2, 0].all()
            assert not landed[2:].any()
            pair.source.poller.abandon(0, ticket)
            assert pair.source.wait(records.STOPPED)[2] == 2 * PAGE_ROWS

    def test_entries_are_posted_in_the_order_of_their_signals(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.source.poller.trace(16)
            pair.target.expect(2 * ROWS_A_PAGE)
            pair.source.run_step(pair.begin([(0, 1), (5, 5)], tag=9))
            pair.source.wait(records.SENT)
            marks = pair.source.poller.take_trace()
            assert [mark[:2] for mark in marks] == [(9, layer) for layer in range(NUM_LAYERS)]
            assert all(entry < bumps <= NUM_LAYERS for _, entry, bumps, _ in marks)

    def test_neighbours_are_merged(self, fabric: FabricUnderTest) -> None:
        pairs = [(page, page + 1) for page in range(NUM_PAGES - 1)]
        with Pair(fabric) as pair:
            pair.target.expect(len(pairs) * ROWS_A_PAGE)
            pair.begin(pairs, ready=True, num_bumps=0)
            pair.target.wait(records.REACHED)
            assert pair.source.wait(records.SENT)[4] == NUM_LAYERS
            pair.assert_moved(pairs)

    def test_merging_stops_at_the_limit(self, fabric: FabricUnderTest) -> None:
        pairs = [(page, page) for page in range(10)]
        with Pair(fabric, max_write_bytes=4 * PAGE_BYTES) as pair:
            pair.target.expect(len(pairs) * ROWS_A_PAGE)
            pair.begin(pairs, ready=True, num_bumps=0)
            pair.target.wait(records.REACHED)
            assert pair.source.wait(records.SENT)[4] == 3 * NUM_LAYERS
            pair.assert_moved(pairs)

    @pytest.mark.parametrize(("window", "link_bytes"), [(1, 1 << 20), (64, 1), (3, 2 * PAGE_BYTES)])
    def test_small_windows_still_move_everything(self, fabric: FabricUnderTest, window: int, link_bytes: int) -> None:
        with Pair(fabric, window=window, link_bytes=link_bytes) as pair:
            pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
            pair.send(1)
            pair.target.wait(records.REACHED)
            pair.assert_moved(SCATTERED)

    def test_no_more_than_the_window_is_in_flight(self, fabric: FabricUnderTest) -> None:
        window = 4
        with Pair(fabric, window=window) as pair:
            pair.warm_up()
            pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
            before = pair.source.stats()["posted_writes"]
            pair.source.hold(True)
            pair.send(1)
            pair.source.wait_stat("posted_writes", before + window)
            pair.source.wait_rounds()
            assert pair.source.stats()["posted_writes"] == before + window
            pair.source.hold(False)
            pair.target.wait(records.REACHED)
            pair.assert_moved(SCATTERED)

    @pytest.mark.slow
    def test_t32_busy_queues_lose_nothing_and_stay_in_their_bounds(self, fabric: FabricUnderTest) -> None:
        """A queue of 64 entries, 5120 operations and a receiver that polls slowly."""
        num_transfers, window, peak = 20, 32, 0
        num_writes = num_transfers * NUM_PAGES * NUM_LAYERS
        with Pair(fabric, window=window, cq_entries=64) as pair:
            pair.target.disturb(1, slow_ns=100_000)
            pair.target.expect(num_transfers * NUM_PAGES * ROWS_A_PAGE)
            pair.send(num_transfers)
            while (stats := pair.source.stats())["completed_writes"] < num_writes:
                peak = max(peak, stats["posted_writes"] - stats["completed_writes"])
                pair.source.wait_stat("completed_writes", min(stats["completed_writes"] + 1, num_writes))
            assert 0 < peak <= window
            pair.target.wait(records.REACHED)
            landed = pair.target.stats()
            assert (landed["landed_writes"], landed["strays"], landed["errors"]) == (num_writes, 0, 0)
            pair.assert_moved(SCATTERED)

    def test_a_small_transfer_does_not_wait_for_a_large_one(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, window=4) as pair:
            pair.target.expect((NUM_PAGES + 1) * ROWS_A_PAGE)
            large = ((pair.link, pair.template, IMMEDIATE, 1, True), SCATTERED)
            small = ((pair.link, pair.template, IMMEDIATE, 2, True), [(0, 0)])
            pair.source.begin([large, small], num_bumps=0)
            assert [pair.source.wait(records.SENT)[1] for _ in range(2)] == [2, 1]

    def test_sent_waits_for_the_last_local_completion(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.warm_up()
            pair.target.expect(ROWS_A_PAGE)
            before = pair.source.stats()
            pair.source.hold(True)
            pair.begin([(0, 0)], ready=True, num_bumps=0)
            pair.source.wait_stat("posted_writes", before["posted_writes"] + NUM_LAYERS)
            pair.source.wait_rounds()
            assert not pair.source.seen(records.SENT)
            assert pair.source.stats()["completed_writes"] == before["completed_writes"]
            pair.source.hold(False)
            assert pair.source.wait(records.SENT)[2] == ROWS_A_PAGE
            pair.target.wait(records.REACHED)

    def test_a_held_target_counts_nothing_and_loses_nothing(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
            pair.target.hold(True)
            pair.target.wait_rounds()
            pair.send(1)
            pair.source.wait_rounds(40)
            assert pair.target.slot_rows() == 0
            pair.target.hold(False)
            pair.target.wait(records.REACHED)
            pair.assert_moved(SCATTERED)

    def test_stop_drops_what_is_not_posted(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            ticket = pair.begin([(0, 0)], tag=4)
            pair.source.poller.stop(pair.link, 4)
            assert pair.source.wait(records.STOPPED, 4)[2] == 0
            pair.source.run_step(ticket)
            pair.target.expect(ROWS_A_PAGE)
            pair.source.run_step(pair.begin([(1, 1)], tag=5))
            pair.target.wait(records.REACHED)
            assert pair.source.wait(records.STEP_ENDED)[2] == ticket
            assert not pair.target.copy()[:, 0].any()

    def test_what_was_stopped_on_the_way_says_exactly_what_it_posted(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, window=2) as pair:
            stop_halfway(pair)

    def test_an_abandoned_step_gives_everything_back(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            num_slots = pair.source.counter.num_slots
            tickets = [pair.begin([(0, 0)], tag=tag) for tag in range(num_slots)]
            with pytest.raises(RingFullError, match=f"{num_slots} steps"):
                pair.begin([(1, 1)])
            for tag, ticket in enumerate(tickets):
                pair.source.poller.abandon(0, ticket)
                assert pair.source.wait(records.STOPPED)[1:3] == (tag, 0)
            pair.source.wait_rounds()  # where several threads watch, each gives it back
            ticket = pair.begin([(1, 1)])
            assert ticket == tickets[-1] + 1
            pair.target.expect(ROWS_A_PAGE)
            pair.source.run_step(ticket)
            pair.target.wait(records.REACHED)

    def test_fewer_and_more_signals_are_faults(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            first, second, third = (pair.begin([(page, page)], tag=page) for page in range(3))
            pair.source.run_step(first, NUM_LAYERS - 1)
            pair.source.counter.start(second)
            fault = pair.source.wait(records.STEP_FAULT)
            assert records.step_fault(0, first, fault[4], NUM_LAYERS).startswith(
                f"step {first} of layer counter 0 was over after 3 of 4"
            )
            pair.source.wait(records.STOPPED, 0)
            pair.source.poller.resume_counter(0, first)
            pair.source.run_step(second, NUM_LAYERS + 1)
            assert pair.source.wait(records.STEP_FAULT)[2] == second
            pair.source.counter.start(third)
            pair.source.wait(records.SENT, 1)
            assert not pair.source.seen(records.STEP_FAULT, records.STEP_ENDED)


def stop_halfway(pair: Pair) -> None:
    """Stop a transfer while half of its layers go, and see that its rows posted are those that land."""
    pair.target.expect(1 << 40)
    pair.source.run_step(pair.begin(SCATTERED, tag=4), NUM_LAYERS // 2)
    pair.source.wait_stat("posted_writes", 20)
    pair.source.poller.stop(pair.link, 4)
    rows = pair.source.wait(records.STOPPED, 4)[2]
    assert 0 < rows <= NUM_PAGES * ROWS_A_PAGE // 2
    pair.target.wait_stat("landed_rows", rows)
    pair.source.wait_rounds()
    pair.target.wait_rounds()
    assert pair.target.slot_rows() == rows
