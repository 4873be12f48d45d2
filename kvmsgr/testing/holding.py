"""Conformance: a step that turns out short holds what later steps of its counter show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import LayerCounter

from .fabrics import FabricUnderTest
from .interfaces import split
from .pair import Pair
from .side import IMMEDIATE, NUM_LAYERS, NUM_PAGES, PAGE_ROWS, ROWS_A_PAGE, Order

SPOILED, SOUND = 1, 2
SPOILED_PAGE, SOUND_PAGE = (3, 4), (5, 9)


def both(pair: Pair) -> int:
    """Arm a page of a request that the short step has spoiled, and one of another."""
    pages = {SPOILED: SPOILED_PAGE, SOUND: SOUND_PAGE}
    return pair.source.begin([(order(pair, tag), [page]) for tag, page in pages.items()])


def order(pair: Pair, tag: int) -> Order:
    return pair.link, pair.template, IMMEDIATE, tag, False


def run_short(pair: Pair, num_bumps: int = 1) -> int:
    """A step that moves nothing by itself, because its chunk fills no page, and stops halfway."""
    ticket = pair.source.begin([])
    pair.source.run_step(ticket, num_bumps)
    return ticket


def check_fault(pair: Pair, ticket: int) -> None:
    assert pair.source.wait(records.STEP_FAULT)[1:3] == (0, ticket)


def check_nothing_goes(pair: Pair) -> None:
    pair.source.wait_rounds()
    assert not pair.source.stats()["posted_writes"]
    assert not pair.source.seen(records.SENT, records.STOPPED)


def resume(pair: Pair, ticket: int, *stopped: int) -> None:
    """Stop what must not go, then let the rest."""
    for tag in stopped:
        for link in pair.links:
            pair.source.poller.stop(link, tag)
    pair.source.poller.resume_counter(0, ticket)


def check_arrives(pair: Pair, *pages: tuple[int, int]) -> None:
    pair.target.wait(records.REACHED)
    pair.assert_moved(pages)
    others = [page for page in range(NUM_PAGES) if page not in [dst for _, dst in pages]]
    assert not pair.target.copy()[:, others].any()


class Holding:
    @pytest.mark.parametrize("how", ["over", "still running", "begun later"])
    def test_nothing_of_a_later_step_goes_before_the_fault_is_known(self, fabric: FabricUnderTest, how: str) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(ROWS_A_PAGE)
            fewer = run_short(pair)
            if how == "begun later":
                pair.source.run_step(pair.source.begin([]))
                check_fault(pair, fewer)
            later = both(pair)
            pair.source.run_step(later)
            if how == "over":
                pair.source.run_step(pair.source.begin([]), 0)
            if how != "begun later":
                check_fault(pair, fewer)
            check_nothing_goes(pair)
            resume(pair, fewer, SPOILED)
            assert pair.source.wait(records.SENT)[1:3] == (SOUND, ROWS_A_PAGE)
            assert pair.source.wait(records.STOPPED)[1:3] == (SPOILED, 0)
            check_arrives(pair, SOUND_PAGE)

    def test_what_is_shown_after_it_is_known_goes_at_once(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(ROWS_A_PAGE)
            fewer = run_short(pair)
            pair.source.run_step(pair.begin([SOUND_PAGE]), 1)
            check_fault(pair, fewer)
            pair.source.counter.bump()
            check_nothing_goes(pair)
            resume(pair, fewer)
            pair.target.until_landed(2 * PAGE_ROWS)
            for layer in range(2, NUM_LAYERS):
                pair.source.counter.bump()
                pair.target.until_landed((layer + 1) * PAGE_ROWS)
            check_arrives(pair, SOUND_PAGE)

    @pytest.mark.parametrize("over", [False, True], ids=["running", "over"])
    def test_what_joins_a_later_step_is_held_with_it(self, fabric: FabricUnderTest, over: bool) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(ROWS_A_PAGE)
            fewer = run_short(pair)
            later = pair.source.begin([])
            pair.source.run_step(later)
            if over:
                pair.source.run_step(pair.source.begin([]), 0)
                assert pair.source.wait(records.STEP_ENDED)[2] == later
            check_fault(pair, fewer)
            pair.source.join([(0, later)], [(0, order(pair, SPOILED), [SPOILED_PAGE])])
            pair.source.join([(0, later)], [(0, order(pair, SOUND), [SOUND_PAGE])])
            check_nothing_goes(pair)
            resume(pair, fewer, SPOILED)
            assert pair.source.wait(records.SENT)[1:3] == (SOUND, ROWS_A_PAGE)
            check_arrives(pair, SOUND_PAGE)
            assert not pair.source.seen(records.JOIN_LOST)

    def test_a_step_whose_time_runs_out_holds_as_well(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(ROWS_A_PAGE)
            (late,) = pair.source.arm([(0, NUM_LAYERS)], [], deadline_s=0.01)
            check_fault(pair, late)
            later = both(pair)
            pair.source.run_step(later)
            check_nothing_goes(pair)
            resume(pair, late, SPOILED)
            assert pair.source.wait(records.SENT)[1:3] == (SOUND, ROWS_A_PAGE)
            check_arrives(pair, SOUND_PAGE)

    @pytest.mark.parametrize("known", [(0, 1), (1, 0)], ids=["in order", "the later one first"])
    def test_each_fault_holds_until_it_is_known(self, fabric: FabricUnderTest, known: Sequence[int]) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(ROWS_A_PAGE)
            faults = [run_short(pair), run_short(pair)]
            pair.source.run_step(pair.begin([SOUND_PAGE]))
            told = sorted(pair.source.wait(records.STEP_FAULT)[2] for _ in faults)  # each maybe by another poller
            assert told == faults
            resume(pair, faults[known[0]])
            check_nothing_goes(pair)
            resume(pair, faults[known[1]])
            check_arrives(pair, SOUND_PAGE)

    def test_every_interface_holds(self, fabric: FabricUnderTest) -> None:
        """Whichever of several polling threads tells of it; and one that has not seen it yet holds nothing any more."""
        with Pair(fabric, nics=(2, 2)) as pair:
            pair.target.expect(2 * ROWS_A_PAGE)
            for page in (SOUND_PAGE, SPOILED_PAGE):
                fewer = run_short(pair)
                pair.source.run_step(pair.source.begin(split(pair, [page])))
                check_fault(pair, fewer)
                posted = pair.source.stats()["posted_writes"]
                pair.source.wait_rounds()
                assert pair.source.stats()["posted_writes"] == posted
                resume(pair, fewer)
                assert sorted(pair.source.wait(records.SENT)[1] for _ in range(2)) == [0, 1]
            check_arrives(pair, SOUND_PAGE, SPOILED_PAGE)

    def test_other_counters_go_on(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            other = LayerCounter(8)
            pair.source.poller.add_counter(other)
            fewer = run_short(pair)
            pair.source.run_step(pair.source.begin([]))
            check_fault(pair, fewer)
            pair.target.expect(ROWS_A_PAGE)
            (ticket,) = pair.source.arm([(1, NUM_LAYERS)], [(0, order(pair, SOUND), [SOUND_PAGE])])
            other.start(ticket)
            for _ in range(NUM_LAYERS):
                other.bump()
            check_arrives(pair, SOUND_PAGE)
            with pytest.raises(ValueError, match="layer counter"):
                pair.source.poller.resume_counter(7, fewer)

    @pytest.mark.parametrize("how", ["stop", "close_link", "close"])
    def test_what_is_held_may_end(self, fabric: FabricUnderTest, how: str) -> None:
        with Pair(fabric) as pair:
            fewer = run_short(pair)
            later = pair.source.begin([(order(pair, tag), [SPOILED_PAGE]) for tag in (SPOILED, SOUND)])
            pair.source.run_step(later)
            pair.source.run_step(pair.begin([SOUND_PAGE]))
            check_fault(pair, fewer)
            assert pair.source.wait(records.STEP_ENDED)[2] == later
            if how == "stop":
                for tag in (SPOILED, SOUND):
                    pair.source.poller.stop(pair.link, tag)
            elif how == "close_link":
                pair.source.close_link(pair.link)
            else:
                pair.source.poller.close()
            ended = sorted(pair.source.wait(records.STOPPED)[1:3] for _ in range(3))
            assert ended == [(SPOILED, 0), (SPOILED, 0), (SOUND, 0)]
            if how != "close":
                resume(pair, fewer)
                check_nothing_goes(pair)
