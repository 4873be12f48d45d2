"""Conformance: transfers that join a step which was begun before."""

from __future__ import annotations

import pytest

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import LayerCounter

from .fabrics import FabricUnderTest
from .interfaces import split
from .pair import Pair
from .side import IMMEDIATE, NUM_LAYERS, NUM_PAGES, PAGE_ROWS, ROWS_A_PAGE, Order, Pairs

OWNER, JOINER = 1, 2
OWNERS_PAGE, JOINERS_PAGE = (3, 4), (5, 9)


def order(pair: Pair, tag: int = JOINER, *, template: int | None = None, ready: bool = False) -> Order:
    return pair.link, pair.template if template is None else template, IMMEDIATE, tag, ready


def join(pair: Pair, ticket: int, *tags: int, pairs: Pairs = (JOINERS_PAGE,)) -> None:
    """Transfers of all layers join a step of counter 0: one for each tag."""
    pair.source.join([(0, ticket)], [(0, order(pair, tag), pairs) for tag in tags or (JOINER,)])


def open_leg(pair: Pair) -> None:
    """The joiner's, in the state file of the source."""
    pair.source.state.open_leg(
        JOINER, role="serve", state="sending", request_id="joins", peer="", attempt=1, slot=5, generation=3,
        rows_expected=ROWS_A_PAGE, num_layers=NUM_LAYERS,
    )  # fmt: skip


def signals_seen(pair: Pair) -> int:
    (leg,) = pair.source.state.legs()
    return leg.signals_seen


def end_step(pair: Pair, ticket: int) -> None:
    """A later step starts, so that this one is over."""
    pair.source.counter.start(pair.source.begin([]))
    assert pair.source.wait(records.STEP_ENDED)[2] == ticket


class Joining:
    @pytest.mark.parametrize(
        "shown", [None, 0, NUM_LAYERS // 2, NUM_LAYERS], ids=["not started", "started", "halfway", "all shown"]
    )
    def test_a_transfer_joins_a_step_as_far_as_it_has_come(self, fabric: FabricUnderTest, shown: int | None) -> None:
        with Pair(fabric) as pair:
            pair.target.expect(2 * ROWS_A_PAGE)
            open_leg(pair)
            num_shown = shown or 0
            ticket = pair.begin([OWNERS_PAGE], tag=OWNER)
            if shown is not None:
                pair.source.run_step(ticket, shown)
                pair.target.until_landed(num_shown * PAGE_ROWS)
                pair.source.wait_rounds()
            join(pair, ticket)
            pair.target.until_landed(2 * num_shown * PAGE_ROWS)
            pair.source.wait_rounds()
            pair.target.wait_rounds()
            assert pair.target.slot_rows() == 2 * num_shown * PAGE_ROWS, "and no layer that is not shown"
            assert signals_seen(pair) == num_shown
            if shown is None:
                pair.source.counter.start(ticket)
            for layer in range(num_shown, NUM_LAYERS):
                pair.source.counter.bump()
                pair.target.until_landed(2 * (layer + 1) * PAGE_ROWS)
            pair.target.wait(records.REACHED)
            for tag in (OWNER, JOINER):
                assert pair.source.wait(records.SENT, tag)[2] == ROWS_A_PAGE
            assert signals_seen(pair) == NUM_LAYERS
            pair.assert_moved([OWNERS_PAGE, JOINERS_PAGE])
            end_step(pair, ticket)
            assert not pair.source.seen(records.JOIN_LOST, records.STOPPED, records.STEP_FAULT)

    def test_a_transfer_that_joins_a_complete_step_goes_at_once(self, fabric: FabricUnderTest) -> None:
        """Also when as many more have ended as its ring slot allows."""
        with Pair(fabric) as pair:
            open_leg(pair)
            pair.target.expect(2 * ROWS_A_PAGE)
            ticket = pair.begin([OWNERS_PAGE], tag=OWNER)
            pair.source.run_step(ticket)
            end_step(pair, ticket)
            join(pair, ticket)
            pair.target.wait(records.REACHED)
            pair.assert_moved([JOINERS_PAGE])
            assert signals_seen(pair) == NUM_LAYERS
            for later in range(ticket + 1, ticket + pair.source.counter.num_slots - 1):
                pair.source.run_step(later)
                end_step(pair, later)
            join(pair, ticket)
            for tag in (OWNER, JOINER, JOINER):
                assert pair.source.wait(records.SENT, tag)[2] == ROWS_A_PAGE
            assert not pair.source.seen(records.JOIN_LOST)

    @pytest.mark.parametrize("how", ["fewer", "more", "more, over", "abandoned", "never begun", "long ago"])
    def test_what_joins_no_sound_step_is_lost_by_name(self, fabric: FabricUnderTest, how: str) -> None:
        with Pair(fabric) as pair:
            num_slots = pair.source.counter.num_slots
            ticket = pair.source.begin([])
            if how == "fewer":
                pair.source.run_step(ticket, NUM_LAYERS - 1)
                pair.source.counter.start(pair.source.begin([]))
                pair.source.wait(records.STEP_FAULT)
                pair.source.wait_rounds()  # where several threads watch, each sees it by itself
            elif how.startswith("more"):
                pair.source.run_step(ticket, NUM_LAYERS + 1)
                pair.source.wait(records.STEP_FAULT)
                pair.source.wait_rounds()
                if how.endswith("over"):
                    last = pair.source.begin([])
                    pair.source.run_step(last)
                    end_step(pair, last)
            elif how == "abandoned":
                pair.source.poller.abandon(0, ticket)
            elif how == "never begun":
                ticket += 1
            else:
                for old in range(ticket, ticket + num_slots + 1):
                    pair.source.run_step(old)
                    end_step(pair, old)
            join(pair, ticket, 7, 8, 7)
            ends = records.JOIN_LOST, records.STOPPED
            pair.source.until(lambda: len(pair.source.seen(*ends)) >= 5, "all of it is said")
            lost_7, *stopped_7, lost_8, stopped_8 = ((kind, *said) for kind, *said, _, _ in pair.source.seen(*ends))
            assert (lost_7, lost_8) == ((records.JOIN_LOST, 7, ticket), (records.JOIN_LOST, 8, ticket))
            assert stopped_7 == [(records.STOPPED, 7, 0)] * 2
            assert stopped_8 == (records.STOPPED, 8, 0)
            assert f"step {ticket}," in records.join_lost(ticket)
            pair.source.wait_rounds()
            assert len(pair.source.seen(*ends, records.SENT)) == 5
            assert not pair.source.stats()["posted_writes"]

    @pytest.mark.parametrize("over", [False, True], ids=["running", "over"])
    def test_one_that_waits_for_more_than_the_step_shows_is_lost_alone(
        self, fabric: FabricUnderTest, over: bool
    ) -> None:
        with Pair(fabric) as pair:
            few = NUM_LAYERS - 1
            short = pair.source.add_template(pair.link, range(few))
            ticket = pair.source.begin([], num_bumps=few)
            if over:
                pair.source.run_step(ticket, few)
                end_step(pair, ticket)
            pair.target.expect(few * PAGE_ROWS)
            fits = order(pair, 8, template=short)
            pair.source.join([(0, ticket)], [(0, order(pair, 7), [(0, 0)]), (0, fits, [JOINERS_PAGE])])
            assert pair.source.wait(records.JOIN_LOST)[1:3] == (7, ticket)
            assert pair.source.wait(records.STOPPED, 7)[2] == 0
            if not over:
                pair.source.run_step(ticket, few)
            assert pair.source.wait(records.SENT, 8)[2] == few * PAGE_ROWS
            pair.target.wait(records.REACHED)
            assert not pair.target.copy()[:, 0].any()

    @pytest.mark.parametrize("how", ["fewer", "abandoned"])
    def test_what_joined_a_step_ends_with_it(self, fabric: FabricUnderTest, how: str) -> None:
        with Pair(fabric) as pair:
            num_bumps = 2 if how == "fewer" else 0
            pair.target.expect(2 * ROWS_A_PAGE)
            ticket = pair.begin([OWNERS_PAGE], tag=OWNER)
            join(pair, ticket)
            if how == "abandoned":
                pair.source.poller.abandon(0, ticket)
            else:
                later = pair.source.begin([])
                pair.source.run_step(ticket, num_bumps)
                pair.target.until_landed(2 * num_bumps * PAGE_ROWS)
                pair.source.counter.start(later)
            for tag in (OWNER, JOINER):
                assert pair.source.wait(records.STOPPED, tag)[2] == num_bumps * PAGE_ROWS
            assert not pair.source.seen(records.JOIN_LOST)

    def test_stop_and_the_end_of_a_link_stop_what_joined(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            ticket = pair.begin([OWNERS_PAGE], tag=OWNER)
            join(pair, ticket, 7, 8)
            pair.source.poller.stop(pair.link, 7)
            assert pair.source.wait(records.STOPPED)[1:3] == (7, 0)
            pair.source.close_link(pair.link)
            assert sorted(pair.source.wait(records.STOPPED)[1:3] for _ in range(2)) == [(OWNER, 0), (8, 0)]
            pair.source.run_step(ticket)
            end_step(pair, ticket)

    def test_one_join_goes_to_steps_of_several_counters(self, fabric: FabricUnderTest) -> None:
        """One of them is complete and over, the other runs; each releases what joined it."""
        rows = NUM_PAGES * ROWS_A_PAGE
        with Pair(fabric, nics=(2, 2)) as pair:
            other = LayerCounter(8)
            pair.source.poller.add_counter(other)
            both = [(0, NUM_LAYERS), (1, NUM_LAYERS)]
            tickets = pair.source.arm(both, [])
            pair.source.run_step(tickets[0])
            end_step(pair, tickets[0])
            pair.target.expect(rows)
            (first, pairs), (second, _) = split(pair)
            pair.source.join([(1, tickets[1]), (0, tickets[0])], [(1, first, pairs), (0, second, pairs)])
            assert pair.source.wait(records.SENT)[1:3] == (0, rows // 2)
            pair.target.until_landed(rows // 2)
            pair.source.wait_rounds()
            assert not pair.target.copy()[1::2].any()
            other.start(tickets[1])
            for _ in range(NUM_LAYERS):
                other.bump()
            assert pair.source.wait(records.SENT)[1:3] == (1, rows // 2)
            pair.target.wait(records.REACHED)
            assert not pair.source.seen(records.JOIN_LOST, records.STOPPED)

    def test_a_join_that_makes_no_sense_is_refused_and_nothing_is_armed(self, fabric: FabricUnderTest) -> None:
        with Pair(fabric) as pair:
            ticket = pair.source.begin([])
            pair.source.run_step(ticket)
            good = (0, order(pair), [JOINERS_PAGE])
            wrong = [
                ("on 0 layer counters", [], []),
                ("layer counter 1 of 1", [(1, ticket)], [good]),
                ("counter 0 has two parts", [(0, ticket), (0, ticket + 1)], [good]),
                ("ticket 0", [(0, 0)], [good]),
                ("transfer 1: part 1 of a step of 1", [(0, ticket)], [good, (1, *good[1:])]),
                ("transfer 1: .* no template 99", [(0, ticket)], [good, (0, order(pair, template=99), [(0, 0)])]),
                ("transfer 1: .* cannot be ready", [(0, ticket)], [good, (0, order(pair, ready=True), [(0, 0)])]),
                ("transfer 1: .* leaves its source", [(0, ticket)], [good, (0, order(pair), [(NUM_PAGES, 0)])]),
            ]
            for message, parts, transfers in wrong:
                with pytest.raises(ValueError, match=message):
                    pair.source.join(parts, transfers)
            pair.source.wait_rounds()
            assert not pair.source.stats()["posted_writes"]
            assert not pair.source.seen(records.SENT, records.STOPPED, records.JOIN_LOST)
            pair.source.join([(0, ticket)], [])  # of nothing: no harm
            pair.source.poller.close()
            with pytest.raises(RuntimeError, match="closed"):
                pair.source.join([(0, ticket)], [good])
