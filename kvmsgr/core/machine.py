"""One table, one state, one way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from kvmsgr.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class Go:
    """An entry of a table: the next state, and a maker `(machine, event) -> effect` for each effect, in order."""

    to: StrEnum
    effects: tuple[Callable[[Any, Any], object], ...] = ()


def go(to: StrEnum, *effects: Callable[[Any, Any], object]) -> Go:
    return Go(to, effects)


class Machine:
    """Feeds events through `table`. Subclasses hold the data that their effects need.

    Args:
        name: What the machine is about, for error messages.
    """

    table: ClassVar[Mapping[tuple[StrEnum, type], Go]]
    state: StrEnum

    def __init__(self, name: str) -> None:
        self.name = name

    def feed(self, event: object) -> list[object]:
        """Move on `event` and return the effects to carry out, in order.

        Raises:
            LocalProtocolError: The event has no meaning in this state; nothing has changed.
        """
        row = self.table.get((self.state, type(event)))
        if row is None:
            meaningful = sorted(kind.__name__ for state, kind in self.table if state == self.state)
            raise LocalProtocolError(
                f"{type(self).__name__} {self.name}: {type(event).__name__} in state {self.state!s}, "
                f"where only {', '.join(meaningful) or 'nothing'} can happen"
            )
        self.state = row.to
        return [make(self, event) for make in row.effects]
