"""The benchmark of planning measures what it says. Whether its figures are good is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSED_FIGURES = 1


@pytest.mark.slow
def test_what_is_planned_is_what_the_cases_say(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "tools.benchmarks", "planning", "--samples", "3", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, MISSED_FIGURES), done.stdout + done.stderr
    report = json.loads(path.read_text())
    measured = {figures["what"]: figures for figures in report["measured"]}
    given = {what: (figures["num_pages"], figures["num_orders"]) for what, figures in measured.items()}
    assert given == {  # the last page of a request is filled in part, so it is no pair
        "R1 x 61 TP8 -> TP8, 128k request": (2047, 8),
        "R1 x 122 TP8 -> TP8, 128k request": (2047, 8),
        "R1 x 61 TP8 -> one DP rank, 128k request": (2047, 1),
        "R1 x 122 TP8 -> one DP rank, 128k request": (2047, 1),
        "R1 x 61 TP8 -> TP8, 16k chunk": (256, 8),
        "R1 x 122 TP8 -> TP8, 16k chunk": (256, 8),
        "Qwen3-Coder x 62 TP8 -> TP8, 16k chunk": (256, 8),
        "Qwen3-Coder x 124 TP8 -> TP8, 16k chunk": (256, 8),
    }
    for figures in measured.values():
        whole, native = figures["whole_ms"], figures["native_ms"]
        assert len(whole) == 3
        assert all(0 < part < all_of_it for part, all_of_it in zip(native, whole, strict=True))
    num_failed = sum(not check["passed"] for check in report["checks"])
    assert len(report["checks"]) == 8
    assert (num_failed > 0) == (done.returncode == MISSED_FIGURES)
