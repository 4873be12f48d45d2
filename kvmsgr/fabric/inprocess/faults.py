"""Faults of writes, on purpose and by the number of the write, so that a run can be replayed."""

from __future__ import annotations

from random import Random

KINDS = ("drop", "flip", "fail", "error")


class Faults:
    """What is to happen to the next write: nothing (""), "drop", "flip", "fail", "error" or "reorder"."""

    def __init__(self) -> None:
        self.slow_ns = 0
        self.broken_nics: set[int] = set()
        self._left: dict[str, int] = {}
        self._chances: list[tuple[str, float]] = []
        self._seed = 0
        self._number = 0

    def inject(self, kind: str, nth: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"there is no fault {kind!r}: {', '.join(KINDS)}")
        if nth < 1:
            raise ValueError("writes are counted from 1")
        self._left[kind] = nth

    def disturb(self, seed: int, chances: dict[str, float], slow_ns: int) -> None:
        if not all(0 <= chance <= 1 for chance in chances.values()) or sum(chances.values()) > 1 or slow_ns < 0:
            raise ValueError(f"chances {chances} and slow_ns {slow_ns}: want each chance and their sum in 0..1")
        self._seed, self._chances, self.slow_ns = seed, list(chances.items()), slow_ns
        self._number = 0

    def next(self) -> str:
        """Decide about one more write."""
        self._left = {kind: left - 1 for kind, left in self._left.items()}
        for kind, left in self._left.items():
            if left == 0:
                del self._left[kind]
                return kind
        self._number += 1
        draw = Random(f"{self._seed}/{self._number}").random() if self._chances else 1.0
        for kind, chance in self._chances:
            if draw < chance:
                return kind
            draw -= chance
        return ""

    def distance(self) -> int:
        """How many later writes overtake the one that was set aside last."""
        return Random(f"{self._seed}/{self._number}/distance").randint(1, 4)
