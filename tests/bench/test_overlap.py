"""The benchmark of overlap measures what it says. Whether its figures are good is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.benchmarks.fake_engine import PAGE_BYTES

ROOT = Path(__file__).parents[2]
MISSED_FIGURES = 1
LAYERS, CHUNKS = 4, 2


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["net", "shm"])
def test_what_travels_before_the_last_signal_is_measured_beside_the_raw_limit(provider: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ["--layers", str(LAYERS), "--chunks", str(CHUNKS), "--layer-ms", "2", "--runs", "2"]
    command = [sys.executable, "-m", "tools.benchmarks", "overlap", "--provider", provider, *sizes, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, MISSED_FIGURES), done.stdout + done.stderr
    report = json.loads(path.read_text())
    overlapped, at_the_end, raw = report["measured"]
    assert [len(kind["ready_ms"]) for kind in (overlapped, at_the_end)] == [2, 2]
    assert all(0 < percent < 100 for percent in overlapped["posted_percent"])  # the last layer comes after its signal
    assert at_the_end["posted_percent"] == [0, 0]
    assert min(overlapped["ready_ms"] + at_the_end["ready_ms"] + raw["gb_s"]) > 0
    assert raw["num_bytes"] % (LAYERS * PAGE_BYTES) == 0
    checks = {check["what"]: check for check in report["checks"]}
    assert checks[f"{provider} wrong pages"]["passed"]
    num_failed = sum(not check["passed"] for check in checks.values())
    assert len(checks) == 4
    assert (num_failed > 0) == (done.returncode == MISSED_FIGURES)
    assert done.stdout.splitlines()[-1] == f"{4 - num_failed} passed, {num_failed} failed"
