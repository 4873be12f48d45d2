"""Conformance: several network interfaces a side, links with several targets, and steps on several layer counters."""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt
import pytest

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import (
    FAILED_LEASE,
    LINK_HELD,
    PORT_CLOSED,
    LayerCounter,
    PageUnits,
    RingFullError,
)

from .fabrics import FabricUnderTest
from .fences import MANY, SLOW_NS, need_fence
from .pair import SCATTERED, Pair, join
from .side import (
    IMMEDIATE,
    LAYER_BYTES,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_ROWS,
    ROW_BYTES,
    ROWS_A_PAGE,
    Order,
    Pairs,
    Side,
)

ALL_ROWS = NUM_PAGES * ROWS_A_PAGE
FIRST_PORT = 1
HEARTBEAT_NS, LEASE_BEATS = 50_000_000, 40
NICS = [(2, 2), (1, 2), (2, 1), (3, 2)]
WIDE = pytest.mark.parametrize("nics", NICS, ids=["2:2", "1:2", "2:1", "3:2"])


def split(pair: Pair, pairs: Pairs = SCATTERED, *, ready: bool = False) -> list[tuple[Order, Pairs]]:
    """A transfer of all layers: layer l goes by link l to endpoint l, modulo how many there are. Tags are 0, 1, ..."""
    num_links, num_targets = pair.nics
    ways: dict[tuple[int, int], list[int]] = {}
    for layer in range(NUM_LAYERS):
        ways.setdefault((layer % num_links, layer % num_targets), []).append(layer)
    transfers = []
    for tag, ((index, target), layers) in enumerate(ways.items()):
        link = pair.links[index]
        template = pair.source.add_template(link, layers, target=target)
        transfers.append(((link, template, IMMEDIATE, tag, ready), pairs))
    return transfers


class Interfaces:
    @WIDE
    def test_a_transfer_is_split_over_interfaces(self, fabric: FabricUnderTest, nics: tuple[int, int]) -> None:
        with Pair(fabric, nics=nics) as pair:
            transfers = split(pair)
            pair.target.expect(ALL_ROWS)
            pair.source.run_step(pair.source.begin(transfers))
            assert pair.target.wait(records.REACHED)[2] == ALL_ROWS
            sent = [pair.source.wait(records.SENT)[1:3] for _ in transfers]
            assert sorted(tag for tag, _ in sent) == list(range(len(transfers)))
            assert sum(rows for _, rows in sent) == ALL_ROWS
            pair.assert_moved(SCATTERED)
            assert not pair.target.seen(records.OVERFLOW, records.STRAY)

    def test_memory_may_be_on_some_interfaces_alone(self, fabric: FabricUnderTest) -> None:
        source, target = Side(fabric, 2), Side(fabric, 2)
        extra = [np.full(PAGE_BYTES, byte, dtype=np.uint8) for byte in (7, 0)]
        for side, memory in zip((source, target), extra, strict=True):
            with pytest.raises(ValueError, match="interface"):
                side.poller.register(memory.ctypes.data, memory.nbytes, nics=[2])
            assert side.poller.register(memory.ctypes.data, memory.nbytes, nics=[1]) == 1
            with pytest.raises(ValueError, match="2 keys for 2 regions and a cell"):
                side.open_link(1)
            with pytest.raises(ValueError, match="interface 2 of 2"):
                side.open_link(2)
        links, target_links = ([side.open_link(nic, 1 + nic) for nic in range(2)] for side in (source, target))
        assert [len(target.place(link).regions) for link in target_links] == [1, 2]
        join(source, links, target, target_links, 8)
        join(target, target_links, source, links, 8)
        runs = np.array([[0, 0, PAGE_BYTES, PAGE_ROWS]], dtype=np.uint64)
        entries = np.array([[1, 0, 2, 0, 0]], dtype=np.int64)  # after the one region of the first endpoint come two
        page = (PAGE_BYTES, 1, 0)
        with pytest.raises(ValueError, match="source region 1 is not registered on the interface of link"):
            source.poller.add_template(links[0], runs, page, page, entries, ROW_BYTES, 2)
        template = source.poller.add_template(links[1], runs, page, page, entries, ROW_BYTES, 2)
        target.expect(PAGE_ROWS)
        source.begin([((links[1], template, IMMEDIATE, 1, True), [(0, 0)])], 0)
        target.wait(records.REACHED)
        source.wait(records.SENT)
        assert (extra[1] == 7).all()
        source.close()
        target.close()

    @pytest.mark.parametrize("direction", ["64 to 16", "16 to 64"])
    def test_pages_of_different_sizes(self, fabric: FabricUnderTest, direction: str) -> None:
        """Two planes a page, one behind the other; a unit is 16 tokens of one plane."""
        large: PageUnits = (8 * PAGE_BYTES, 4, PAGE_BYTES)
        small: PageUnits = (2 * PAGE_BYTES, 1, 0)
        pages = (large, small) if direction == "64 to 16" else (small, large)
        pairs = [(2, 0), (3, 1), (4, 2), (5, 3), (31, 8), (0, 31), (17, 9), (6, 15)]
        with Pair(fabric) as pair:
            runs = np.array([[0, 0, PAGE_BYTES, PAGE_ROWS]], dtype=np.uint64)
            entries = np.zeros((NUM_LAYERS, 2, 5), dtype=np.int64)
            layers, planes = np.indices(entries.shape[:2])
            for side, (_, units, _) in enumerate(pages):
                entries[..., 1 + 2 * side] = layers * LAYER_BYTES + planes * units * PAGE_BYTES
            entries[..., 4] = layers + 1
            raw = entries.reshape(-1, 5)
            template = pair.source.poller.add_template(pair.link, runs, *pages, raw, ROW_BYTES, 2)
            num_rows = len(pairs) * 2 * ROWS_A_PAGE
            pair.target.expect(num_rows)
            pair.source.run_step(pair.source.begin([((pair.link, template, IMMEDIATE, 1, False), pairs)]))
            assert pair.target.wait(records.REACHED)[2] == num_rows
            sent, found = units_of(pair.source.pages, pages[0]), units_of(pair.target.copy(), pages[1])
            expected = np.zeros_like(found)
            for src, dst in pairs:
                expected[:, :, dst] = sent[:, :, src]
            np.testing.assert_array_equal(found, expected)

    def test_each_part_of_a_step_releases_its_own(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, nics=(2, 2)) as pair:
            other = LayerCounter(8)
            pair.source.poller.add_counter(other)
            (first, pairs), (second, _) = split(pair)
            pair.target.expect(ALL_ROWS)
            bumps = [(0, NUM_LAYERS), (1, NUM_LAYERS)]
            tickets = pair.source.arm(bumps, [(0, first, pairs), (1, second, pairs)])
            other.start(tickets[1])
            for _ in range(NUM_LAYERS):
                other.bump()
            assert pair.source.wait(records.SENT)[1:3] == (1, ALL_ROWS // 2)
            pair.target.until_landed(ALL_ROWS // 2)
            pair.source.wait_rounds()
            assert not pair.target.copy()[0::2].any()
            pair.source.run_step(tickets[0])
            assert pair.source.wait(records.SENT)[1:3] == (0, ALL_ROWS // 2)
            pair.target.wait(records.REACHED)
            pair.assert_moved(SCATTERED)

    def test_a_step_is_armed_on_all_of_its_counters_or_on_none(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            other = LayerCounter(2)
            pair.source.poller.add_counter(other)
            order = (pair.link, pair.template, IMMEDIATE, 1, True)
            tickets = [pair.source.arm([(1, 1)], [])[0] for _ in range(2)]
            both = [(0, NUM_LAYERS), (1, NUM_LAYERS)]
            with pytest.raises(RingFullError, match="2 steps of layer counter 1"):
                pair.source.arm(both, [(0, order, [(0, 0)])])
            pair.source.wait_rounds()
            assert not pair.source.stats()["posted_writes"]
            for ticket in tickets:
                pair.source.poller.abandon(1, ticket)
            pair.source.wait_rounds()
            with pytest.raises(ValueError, match="transfer 1: part 2 of a step of 2"):
                pair.source.arm(both, [(0, order, [(0, 0)]), (2, order, [(0, 0)])])
            pair.target.expect(ROWS_A_PAGE)
            assert pair.source.arm(both, [(0, order, [(0, 0)])]) == [1, tickets[-1] + 1]
            pair.target.wait(records.REACHED)

    @WIDE
    @pytest.mark.slow
    def test_nothing_lands_after_all_links_of_a_peer_have_closed(
        self, fabric: FabricUnderTest, nics: tuple[int, int]
    ) -> None:
        need_fence(fabric)
        with Pair(fabric, nics=nics, closes_under_traffic=True, op_timeout_ns=500_000_000) as pair:
            transfers = split(pair, ready=True)
            pair.target.expect(MANY * ALL_ROWS)
            pair.source.disturb(0, slow_ns=SLOW_NS)  # or all of it may have landed before anything is closed
            pair.source.begin(transfers * MANY, num_bumps=0)
            rows = pair.target.close_under_traffic(*pair.target_links)
            assert 0 < rows < MANY * ALL_ROWS
            pair.source.wait_rounds(30)
            for link in pair.links:
                pair.source.close_link(link)
            pair.target.wait_rounds(30)
            assert pair.target.is_clear()
            assert pair.target.slot_rows() == rows
            assert len(pair.source.seen(records.SENT, records.STOPPED)) == MANY * len(transfers)

    def test_the_links_of_all_interfaces_move_together(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric, nics=(2, 2), shared_endpoint=True) as pair:
            pair.target.expect(2 * ALL_ROWS)
            transfers = split(pair, ready=True)
            pair.source.begin(transfers, num_bumps=0)
            for _ in transfers:
                pair.source.wait(records.SENT)
            old = [pair.target.place(link) for link in pair.target_links]
            assert pair.target.rotate() == FIRST_PORT + 1
            new = [pair.target.place(link) for link in pair.target_links]
            assert not {place.address for place in old} & {place.address for place in new}
            for index, link in enumerate(pair.links):
                pair.source.retarget(link, *new, beats=[index])
                pair.source.wait(LINK_HELD, link)
                pair.source.poller.resume_link(link)
            pair.target.wait_stat("landed_writes", pair.source.stats()["posted_writes"])
            pair.target.poller.close_port(FIRST_PORT)
            pair.target.wait(PORT_CLOSED, FIRST_PORT)
            pair.source.begin(transfers, num_bumps=0)
            assert pair.target.wait(records.REACHED)[2] == 2 * ALL_ROWS
            pair.assert_moved(SCATTERED)
            assert not pair.target.seen(PORT_CLOSED), "it is said once"
            assert not pair.source.seen(records.LINK_FAILED)

    @pytest.mark.parametrize(
        ("nics", "silent"), [((2, 2), "source"), ((1, 2), "target")], ids=["2:2-source", "1:2-target"]
    )
    @pytest.mark.slow
    def test_a_peer_that_falls_silent_is_lost_on_all_links(
        self, fabric: FabricUnderTest, nics: tuple[int, int], silent: str
    ) -> None:
        """Over shm the target is another process: in one process heartbeats need no operation."""
        with Pair(
            fabric, nics=nics, closes_under_traffic=True, heartbeat_ns=HEARTBEAT_NS, lease_ns=LEASE_BEATS * HEARTBEAT_NS
        ) as pair:
            sides = {"source": (pair.source, pair.links), "target": (pair.target, pair.target_links)}
            for side, links in sides.values():
                side.wait_stat("beats_heard", (LEASE_BEATS + 5) * len(links))
                assert not side.seen(records.LINK_FAILED)
            held, _ = sides.pop(silent)
            held.hold(True)
            ((other, links),) = sides.values()
            for link in links:
                assert other.wait(records.LINK_FAILED, link)[2:5:2] == (errno.ETIMEDOUT, FAILED_LEASE)
            held.hold(False)


def units_of(layers: npt.NDArray[np.uint8], page: PageUnits) -> npt.NDArray[np.uint8]:
    """A cache as (layer, plane, unit, bytes)."""
    units = page[1]
    paged = layers.reshape(NUM_LAYERS, NUM_PAGES // 2 // units, 2, units, PAGE_BYTES)
    return paged.swapaxes(1, 2).reshape(NUM_LAYERS, 2, NUM_PAGES // 2, PAGE_BYTES)
