"""What the state file shows of this messenger: its pages, and every leg that is alive, on either side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import structlog

from kvmsgr.core.slots import AttemptNumbers
from kvmsgr_protocol import Dispatch

from .pages import PageGuard

if TYPE_CHECKING:
    from kvmsgr.fabric.libfabric import StateFile

log = structlog.get_logger("kvmsgr")

NUM_LEGS = 16384
"""Legs that can be alive at a time, both roles together."""


class Ledger:
    """Writes down what changes. Costs a few stores in mapped memory, and never waits.

    The rows that the poller counts as posted for a leg are part of a proof, too: a rotation compares them (`Rotated`).

    Args:
        state: The state file.
        pages: The destination pages of each rank and cache group.
        quarantine_limit: Share of a group's pages that may be in quarantine.
    """

    def __init__(self, state: StateFile, pages: Sequence[Sequence[PageGuard]], quarantine_limit: float) -> None:
        self._state = state
        self._pages = pages
        self._limit = quarantine_limit
        self._numbers = AttemptNumbers(NUM_LEGS, 1 << 31)  # they are tags of transfers, and 32 bits there
        self._quarantined: dict[int, tuple[int, int]] = {}  # leg -> attempt, pages; the legs of one hold the same pages
        for index in range(len(pages[0])):
            self.show_pages(index)

    def take(self) -> int | None:
        """The number of a new leg, or None when too many are alive."""
        return self._numbers.take()

    def give(self, number: int) -> None:
        """Give back a number that was never shown."""
        self._numbers.give(number)

    def open(
        self, number: int, role: Literal["fetch", "serve"], state: str, peer: str, leg: Dispatch, layers: int
    ) -> None:
        """Show a leg, or show it anew. `leg` is what travels, or has come, for it."""
        self._state.close_leg(number)
        self._state.open_leg(
            number,
            role=role,
            state=state,
            request_id=leg.request_id,
            peer=peer,
            attempt=leg.attempt,
            slot=leg.slot,
            generation=leg.generation,
            rows_expected=leg.expected_rows,
            num_layers=layers,
        )

    def update(
        self,
        number: int,
        state: str,
        pages_held: int,
        reason: str = "",
        why: str = "",
        *,
        quarantined_by: int | None = None,
    ) -> None:
        """Show where a leg stands. `quarantined_by`: the attempt that is over, and whose pages are held for want of a
        proof; `why` says which."""
        self._state.update_leg(number, state=state, reason=reason, why=why, pages_held=pages_held)
        if quarantined_by is not None:
            self._quarantined[number] = quarantined_by, pages_held
        elif number not in self._quarantined:
            return
        else:
            del self._quarantined[number]
        self._state.set_quarantined(self._num_quarantined)

    def close(self, number: int) -> None:
        """The leg has left nothing behind."""
        if self._quarantined.pop(number, None):
            self._state.set_quarantined(self._num_quarantined)
        self._state.close_leg(number)
        self._numbers.give(number)

    def show_pages(self, group: int) -> None:
        """Show how many destination pages of a group are held, on all ranks together."""
        guards = [rank[group] for rank in self._pages]
        held, total = (
            sum(numbers) for numbers in zip(*((guard.num_held, guard.num_pages) for guard in guards), strict=True)
        )
        self._state.set_pages(group, guards[0].name, held, total)

    @property
    def _num_quarantined(self) -> int:
        return sum(dict(self._quarantined.values()).values())

    @property
    def unhealthy(self) -> str | None:
        """Why this messenger should get no more requests; None while it may."""
        held, total = self._num_quarantined, sum(guard.num_pages for rank in self._pages for guard in rank)
        if held <= self._limit * total:
            return None
        return (
            f"{held} of {total} destination pages are in quarantine: their prefillers are silent, and no proof has come"
        )
