"""Conformance: how links end, and that nothing lands once they have ended."""

from __future__ import annotations

import errno

import pytest

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import FAILED_COMPLETION, FAILED_LEASE, FAILED_POST

from .fabrics import FabricUnderTest
from .pair import SCATTERED, Pair
from .side import NUM_PAGES, ROWS_A_PAGE

MANY = 60
SLOW_NS = 1_000_000
LEASE_NS = 500_000_000


def need_fence(fabric: FabricUnderTest) -> None:
    if not fabric.fence_proven:
        pytest.skip(f"closing an endpoint under traffic is not proven safe on {fabric.name}")


class Fences:
    def test_closing_stops_what_waits_and_reports_it_first(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.begin([(0, 0)], tag=1)
            pair.begin([(1, 1)], tag=2)
            pair.source.close_link(pair.link)
            assert [record[1:3] for record in pair.source.seen(records.STOPPED)] == [(1, 0), (2, 0)]
            with pytest.raises(ValueError, match="has no template"):
                pair.begin([(2, 2)])
            with pytest.raises(KeyError, match=f"link {pair.link} is not open"):
                pair.source.poller.close_link(pair.link)

    def test_a_closed_link_makes_room_for_another(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            for page in range(3):
                pair.source.close_link(pair.link)
                pair.target.close_link(pair.target_link)
                before = pair.link
                pair.connect()
                assert pair.link != before
                pair.target.expect(ROWS_A_PAGE)
                pair.source.run_step(pair.begin([(page, page)]))
                pair.target.wait(records.REACHED)
                pair.source.wait(records.SENT)
                pair.assert_moved([(page, page)])

    @pytest.mark.parametrize("held", [False, True], ids=["landing", "held"])
    @pytest.mark.slow
    def test_nothing_lands_after_a_link_has_closed(self, fabric: FabricUnderTest, held: bool) -> None:
        need_fence(fabric)
        with Pair(fabric, closes_under_traffic=True, op_timeout_ns=500_000_000) as pair:
            pair.target.expect(MANY * NUM_PAGES * ROWS_A_PAGE)
            if held:
                pair.warm_up()
                pair.target.hold(True)
                pair.target.wait_rounds()
            posted = pair.source.stats()["posted_writes"]
            pair.source.disturb(0, slow_ns=SLOW_NS)  # or all of it may have landed before anything is closed
            pair.send(MANY)
            pair.source.wait_stat("posted_writes", posted + 16)
            rows = pair.target.close_under_traffic(pair.target_link, held=held)
            assert rows < MANY * NUM_PAGES * ROWS_A_PAGE
            assert held or rows > 0
            pair.source.wait_rounds(30)
            pair.source.close_link(pair.link)
            pair.target.wait_rounds(30)
            assert pair.target.is_clear()
            assert pair.target.slot_rows() == rows
            ended = [record[1] for record in pair.source.seen(records.SENT, records.STOPPED)]
            assert sorted(ended) == list(range(MANY)), "every transfer ends once"

    @pytest.mark.slow
    def test_a_closed_source_reads_its_memory_no_more(self, fabric: FabricUnderTest) -> None:
        """Pages may be given to others once it has closed: their bytes must never travel."""
        need_fence(fabric)
        with Pair(fabric, closes_under_traffic=True) as pair:
            pair.target.expect(MANY * NUM_PAGES * ROWS_A_PAGE)
            pair.warm_up()
            pair.target.hold(True)
            pair.target.wait_rounds()
            pair.source.memory[:] = 1
            posted = pair.source.stats()["posted_writes"]
            pair.send(MANY)
            pair.source.wait_stat("posted_writes", posted + 16)
            pair.source.close_link(pair.link)
            pair.source.memory[:] = 255
            pair.target.hold(False)
            pair.target.wait_rounds(30)
            assert pair.target.copy().max() <= 1

    @pytest.mark.slow
    def test_a_stale_key_reaches_nothing(self, fabric: FabricUnderTest) -> None:
        """Not even at a new endpoint of the same region."""
        need_fence(fabric)
        with Pair(fabric, closes_under_traffic=True, op_timeout_ns=500_000_000) as pair:
            pair.target.expect(NUM_PAGES * ROWS_A_PAGE)
            old = pair.target.place(pair.target_link)
            new_link, link = pair.target.open_link(), pair.source.open_link()
            new = pair.target.place(new_link)
            assert [region[2] for region in old.regions] != [region[2] for region in new.regions]
            pair.target.close_link(pair.target_link)
            pair.source.connect(link, new._replace(regions=old.regions), 64)
            pair.target.connect(new_link, pair.source.place(link), 64)
            pair.link, pair.template = link, pair.source.add_template(link)
            pair.send(1, [(0, 0)])
            pair.source.until(
                lambda: bool(pair.source.seen(records.SENT, records.STOPPED)), "the transfer ended one way or another"
            )
            pair.target.wait_rounds(30)
            assert pair.target.is_clear()
            assert pair.target.slot_rows() == 0

    def test_other_links_live_on_when_one_closes(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            doomed, doomed_target = pair.link, pair.target_link
            pair.connect()
            pair.target.expect(2 * NUM_PAGES * ROWS_A_PAGE)
            pair.send(1)
            pair.source.poller.close_link(doomed)
            pair.target.poller.close_link(doomed_target)
            pair.send(1)
            pair.target.wait(records.REACHED)
            pair.source.wait(records.LINK_CLOSED, doomed)
            pair.assert_moved(SCATTERED)

    def test_closing_the_poller_ends_every_transfer(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            ticket = pair.begin([(0, 0)], tag=6)
            pair.source.poller.close()
            pair.source.poller.close()
            assert pair.source.wait(records.STOPPED, 6)[2] == 0
            pair.source.wait(records.LINK_CLOSED, pair.link)
            with pytest.raises(RuntimeError, match="the poller is closed"):
                pair.source.poller.abandon(0, ticket)

    @pytest.mark.slow
    def test_a_lease_lasts_as_long_as_heartbeats_come(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, heartbeat_ns=LEASE_NS // 10, lease_ns=LEASE_NS) as pair:
            for side in (pair.source, pair.target):
                side.wait_stat("beats_heard", 13)
                assert not side.seen(records.LINK_FAILED, records.STRAY)
            pair.source.close_link(pair.link)
            failed = pair.target.wait(records.LINK_FAILED, pair.target_link)
            assert failed[4] in (FAILED_LEASE, FAILED_COMPLETION, FAILED_POST)

    @pytest.mark.slow
    def test_a_peer_that_is_not_heard_of_is_given_up(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, heartbeat_ns=LEASE_NS // 10, lease_ns=LEASE_NS) as pair:
            link, nobody = pair.source.open_link(), pair.target.open_link()
            pair.source.connect(link, pair.target.place(nobody), 1)
            assert pair.source.wait(records.LINK_FAILED, link)[2:5:2] == (errno.ETIMEDOUT, FAILED_LEASE)
            assert not pair.source.seen(records.LINK_FAILED)
