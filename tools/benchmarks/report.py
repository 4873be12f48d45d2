"""Figures, whether they are as wanted, and how they are told."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MEETS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True)
class Check:
    """A figure and what is wanted of it."""

    what: str
    value: float
    relation: str
    wanted: float

    @property
    def passed(self) -> bool:
        return bool(MEETS[self.relation](self.value, self.wanted))

    def __str__(self) -> str:
        verdict = "ok  " if self.passed else "FAIL"
        return f"{verdict}  {self.what}: {self.value:.3g}, wanted {self.relation} {self.wanted:g}"


@dataclass
class Report:
    """What a run measured. Lines are printed as they come; everything goes to the JSON file."""

    machine: dict[str, Any]
    measured: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def add(self, line: str, figures: dict[str, Any], *checks: Check) -> None:
        print(line, flush=True)
        self.measured.append(figures)
        self.checks += checks

    def conclude(self) -> bool:
        """Print what failed and the totals. True when all is as wanted."""
        failed = [check for check in self.checks if not check.passed]
        for check in failed:
            print(check)
        print(f"{len(self.checks) - len(failed)} passed, {len(failed)} failed")
        return not failed

    def write(self, path: Path) -> None:
        checks = [vars(check) | {"passed": check.passed} for check in self.checks]
        whole = {"machine": self.machine, "measured": self.measured, "checks": checks}
        path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Spread:
    """The middle of some samples, and what lies 10 % from either end."""

    p10: float
    median: float
    p90: float

    @staticmethod
    def of(samples: list[float]) -> Spread:
        return Spread(*(float(value) for value in np.percentile(samples, [10, 50, 90])))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.p10:.2f}..{self.p90:.2f}]"
