"""Conformance: one endpoint for all peers, and how it is exchanged for another one."""

from __future__ import annotations

import pytest

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import LINK_HELD, PORT_CLOSED

from .fabrics import FabricUnderTest
from .fences import need_fence
from .pair import SCATTERED, Pair
from .side import NUM_PAGES, ROWS_A_PAGE

FIRST_PORT = 1
ALL_ROWS = NUM_PAGES * ROWS_A_PAGE


class Rotations:
    def test_a_live_link_is_moved_and_goes_on(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, shared_endpoint=True) as pair:
            pair.warm_up()
            pair.target.expect(3 * ALL_ROWS)
            old = pair.target.place(pair.target_link)
            port = pair.target.rotate()
            new = pair.target.place(pair.target_link)
            assert new.address != old.address
            assert new.regions[0][:2] == old.regions[0][:2]
            assert new.regions[0][2] != old.regions[0][2]

            before = pair.source.stats()["posted_writes"]
            pair.source.hold(True)
            pair.send(1)
            pair.source.wait_stat("posted_writes", before + 1)
            pair.source.retarget(pair.link, new)
            pair.source.wait_rounds()
            assert not pair.source.seen(LINK_HELD), "something is in flight"
            pair.source.hold(False)
            pair.source.wait(LINK_HELD, pair.link)
            pair.send(1)
            posted = pair.source.stats()["posted_writes"]
            pair.source.wait_rounds()
            assert pair.source.stats()["posted_writes"] == posted, "it is held"
            pair.target.wait_stat("landed_writes", posted)
            pair.source.poller.resume_link(pair.link)
            pair.target.poller.close_port(FIRST_PORT)
            pair.target.wait(PORT_CLOSED, FIRST_PORT)
            pair.send(1)
            pair.target.wait(records.REACHED)
            pair.assert_moved(SCATTERED)
            assert port != FIRST_PORT
            assert not pair.source.seen(records.LINK_FAILED)
            assert not pair.target.seen(records.LINK_FAILED, records.STRAY)

    def test_a_link_sends_through_the_new_port_by_itself(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, shared_endpoint=True, window=4) as pair:
            pair.target.expect(6 * ALL_ROWS)
            pair.send(3)
            pair.source.rotate()
            pair.send(3)
            ended = [pair.source.wait(records.SENT)[1] for _ in range(6)]
            assert sorted(ended) == [0, 0, 1, 1, 2, 2]
            pair.source.poller.close_port(FIRST_PORT)
            pair.source.wait(PORT_CLOSED, FIRST_PORT)
            pair.target.wait(records.REACHED)
            pair.assert_moved(SCATTERED)

    def test_regions_may_not_change_on_the_way(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, shared_endpoint=True) as pair:
            place = pair.target.place(pair.target_link)
            base, num_bytes, key = place.regions[0]
            with pytest.raises(ValueError, match="region"):
                pair.source.retarget(pair.link, place._replace(regions=[(base, num_bytes - 1, key)]))

    @pytest.mark.slow
    def test_what_is_left_behind_is_fenced(self, fabric: FabricUnderTest) -> None:
        """A peer that does not move writes into the old port until that is closed, and nowhere afterwards."""
        need_fence(fabric)
        with Pair(fabric, shared_endpoint=True, closes_under_traffic=True, op_timeout_ns=500_000_000) as pair:
            pair.warm_up()
            pair.target.expect(20 * ALL_ROWS)
            pair.send(20)
            pair.target.until_landed(1)
            pair.target.begin_closing(pair.target_link)
            pair.target.rotate()
            pair.target.close_port(FIRST_PORT)
            pair.target.wait(records.LINK_CLOSED, pair.target_link)
            pair.target.clear()
            rows = pair.target.slot_rows()
            pair.source.wait_rounds(30)
            pair.target.wait_rounds(30)
            assert pair.target.is_clear()
            assert pair.target.slot_rows() == rows
            pair.source.poller.close()
            pair.target.wait_rounds()
            assert pair.target.is_clear()

    def test_without_a_fence_a_quiet_link_closes_at_once(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, shared_endpoint=True) as pair:
            pair.source.poller.close_link(pair.link, fence=False)
            pair.source.wait(records.LINK_CLOSED, pair.link)
            pair.target.poller.close_link(pair.target_link)
            pair.target.wait_rounds()
            assert not pair.target.seen(records.LINK_CLOSED), "it waits for its port"
            pair.target.rotate()
            pair.target.close_port(FIRST_PORT)
            pair.target.wait(records.LINK_CLOSED, pair.target_link)
