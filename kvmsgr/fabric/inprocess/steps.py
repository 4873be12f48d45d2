"""Steps and the layer counters they run on: what the words of a counter release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmsgr._ext.native import (
    DEADLINE,
    FEWER,
    JOIN_LOST,
    MORE,
    STEP_ENDED,
    STEP_FAULT,
    LayerCounter,
    RingFullError,
    StateFile,
)

from .links import Transfer

Report = Callable[[int, int, int, int], None]


@dataclass(eq=False, slots=True)
class Step:
    """An announced forward pass. `seen` is None until it has started."""

    ticket: int
    num_bumps: int
    deadline_ns: int
    transfers: list[Transfer]
    seen: int | None = None
    faulted: bool = False
    known: bool = False  # that it is short: the counter was resumed before this was seen

    @property
    def waits(self) -> bool:
        """Whether it still has bumps to show."""
        return (self.seen or 0) < self.num_bumps

    @property
    def unreleased(self) -> list[Transfer]:
        """Transfers of it that wait for bumps."""
        return [transfer for transfer in self.transfers if not transfer.stopped and not transfer.is_released]


class Stream:
    """One layer counter as the poller sees it.

    A step that turns out short holds what later ones show: `held` are, by ticket, such steps that the outside does not
    know of yet, and complete ones behind them that are over as well.

    A ring slot is lent to one ticket at a time: `_turns[slot]` has it, or 0. A ticket whose slot is lent is not given.
    `_complete[slot]` is the last one that had it and was complete, and its bumps.
    """

    def __init__(
        self,
        counter: LayerCounter,
        index: int,
        state: StateFile,
        report: Report,
        arrive: Callable[[Transfer], None],
        stop: Callable[[Transfer], None],
    ) -> None:
        self.counter = counter
        self.steps: list[Step] = []
        self.held: list[Step] = []
        self._state = state
        self._index = index
        self._report = report
        self._arrive = arrive
        self._stop = stop
        self._next_ticket = 1
        self._turns = [0] * counter.num_slots
        self._complete: list[tuple[int, int]] = [(0, 0)] * counter.num_slots

    def next_ticket(self) -> int:
        """The one that `claim` takes.

        Raises:
            RingFullError: No ring slot has come back.
        """
        num_slots = len(self._turns)
        for ticket in range(self._next_ticket, self._next_ticket + num_slots):
            if not self._turns[ticket % num_slots]:
                return ticket
        raise RingFullError(f"{num_slots} steps of layer counter {self._index} are outstanding, one a ring slot")

    def claim(self, ticket: int) -> None:
        self._turns[ticket % len(self._turns)] = ticket
        self._next_ticket = ticket + 1

    def arm(self, step: Step) -> None:
        for transfer in step.transfers:
            self._arrive(transfer)
        self.steps.append(step)
        self.steps.sort(key=lambda other: other.ticket)
        later = self.steps[self.steps.index(step) + 1 :]
        nothing = not step.num_bumps and not step.unreleased  # there is no step
        if nothing or (later and later[0].seen is not None):
            self._finish(step, FEWER)

    def join(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        """Have transfers go with a step, as far as it has come; at once when it is over and was complete."""
        step = next((step for step in self.steps if step.ticket == ticket and not step.faulted), None)
        complete, bumps = self._complete[ticket % len(self._turns)]
        num_bumps = step.num_bumps if step is not None else bumps if complete == ticket else -1
        shown = num_bumps if step is None else step.seen
        held, late = self._is_held(ticket), Step(ticket, num_bumps, 0, [], shown)  # as its step, where that is over
        lost: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.template.entries[-1].signal > num_bumps:
                lost.setdefault(transfer.tag, []).append(transfer)
                continue
            self._arrive(transfer)
            if step is not None:
                step.transfers.append(transfer)
            elif held:
                late.transfers.append(transfer)
            if shown is not None and not transfer.stopped and not held:
                self._show(transfer, shown)
        if late.transfers:
            self._hold(late)
        for tag, its in lost.items():
            self._report(JOIN_LOST, tag, ticket, self._index)
            for transfer in its:
                self._stop(transfer)

    def abandon(self, ticket: int) -> None:
        for step in self.steps:
            if step.ticket == ticket:
                self._give_back(ticket)
                self._remove(step)
                return

    def watch(self) -> bool:
        """Read the words; a step that has begun ends the older ones. Says whether any had moved."""
        moved = [step for step in list(self.steps) if self._look(step)]
        return bool(moved)

    def resume(self, ticket: int) -> None:
        """The outside knows that this step is short: it holds nothing any more, nor will it."""
        for step in self.steps:
            step.known |= step.ticket == ticket
        self.held = [step for step in self.held if step.ticket != ticket or not step.waits]
        while self.held and not self.held[0].waits:
            self._show_all(self.held[0])
            del self.held[0]
        for step in self.steps:
            self._show_all(step)

    def check_deadlines(self, now_ns: int) -> None:
        for step in list(self.steps):
            if now_ns >= step.deadline_ns:
                self._finish(step, DEADLINE)

    def close(self) -> None:
        for step in list(self.steps):
            self._remove(step)
        for step in self.held:
            self._stop_unreleased(step)
        self.held.clear()

    def _look(self, step: Step) -> bool:
        bumps = self.counter.bumps_of(step.ticket)
        if bumps is None or bumps == step.seen:
            return False
        step.seen = bumps
        for older in self.steps[: self.steps.index(step)]:
            self._finish(older, FEWER)  # whether it is short is found before anything of this one is released
        self._show_all(step)
        if bumps > step.num_bumps:
            self._fault(step, MORE)
        return True

    def _is_held(self, ticket: int) -> bool:
        return bool(self.held) and self.held[0].ticket < ticket

    def _hold(self, step: Step) -> None:
        self.held.append(step)
        self.held.sort(key=lambda other: other.ticket)

    def _show_all(self, step: Step) -> None:
        if step.seen is not None and not self._is_held(step.ticket):
            for transfer in step.unreleased:
                self._show(transfer, step.seen)

    def _show(self, transfer: Transfer, bumps: int) -> None:
        self._state.leg_signalled(transfer.tag, bumps)
        transfer.release(bumps)

    def _fault(self, step: Step, kind: int) -> None:
        if not step.faulted:
            self._report(STEP_FAULT, self._index, step.ticket, (step.seen or 0) << 32 | kind)
        step.faulted = True

    def _finish(self, step: Step, when_short: int) -> None:
        self._look(step)
        self._give_back(step.ticket)
        if step.seen == step.num_bumps:
            self._complete[step.ticket % len(self._turns)] = step.ticket, step.num_bumps
        if step.waits:
            self._fault(step, when_short)
        elif not step.faulted:
            self._report(STEP_ENDED, self._index, step.ticket, step.seen or 0)
        if step.seen is not None and not step.waits and self._is_held(step.ticket):
            self.steps.remove(step)
            self._hold(step)
            return
        self._remove(step)
        if step.waits and not step.known:
            self._hold(step)

    def _give_back(self, ticket: int) -> None:
        self._turns[ticket % len(self._turns)] = 0

    def _remove(self, step: Step) -> None:
        """What still waits for bumps is stopped."""
        self.steps.remove(step)
        self._stop_unreleased(step)

    def _stop_unreleased(self, step: Step) -> None:
        for transfer in step.unreleased:
            self._stop(transfer)
