"""The benchmark of the native layer measures what it says. Whether its figures are good is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks.report import Check, Report

ROOT = Path(__file__).parents[2]
MISSED_FIGURES = 1


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.benchmarks", "native", "--pairs", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def wrong_pages(report: dict[str, Any]) -> list[int]:
    return [figures["num_wrong_pages"] for figures in report["measured"] if "num_wrong_pages" in figures]


def check_measured(report: dict[str, Any], provider: str) -> None:
    """Every figure is there, beside what limits it."""
    measured = {figures["what"]: figures for figures in report["measured"]}
    for kib in (16, 64, 256):
        figures = measured[f"{provider} {kib} KiB pages"]
        assert len(figures["poller_gb_s"]) == len(figures["bare_gb_s"]) == 1
        assert min(figures["poller_gb_s"] + figures["bare_gb_s"]) > 0
    for who in ("poller", "GIL hogged", "bare watcher"):
        figures = measured[f"{provider} bump to {who}"]
        assert 0 < figures["p50_us"] <= figures["p99_us"] <= figures["max_us"]


@pytest.mark.slow
def test_everything_is_measured_beside_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = bench("--provider", "net", "--json", str(path))
    assert done.returncode in (0, MISSED_FIGURES), done.stdout + done.stderr
    report = json.loads(path.read_text())
    check_measured(report, "net")
    assert wrong_pages(report) == [0, 0, 0]
    num_failed = sum(not check["passed"] for check in report["checks"])
    assert done.stdout.splitlines()[-1] == f"{8 - num_failed} passed, {num_failed} failed"
    assert (num_failed > 0) == (done.returncode == MISSED_FIGURES)


@pytest.mark.slow
def test_a_flipped_byte_fails_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = bench("--provider", "shm", "--corrupt-write", "40", "--json", str(path))
    assert done.returncode == MISSED_FIGURES, done.stdout + done.stderr
    assert "WRONG PAGES: 1" in done.stdout
    assert "FAIL  shm 16 KiB pages, wrong pages: 1, wanted == 0" in done.stdout
    report = json.loads(path.read_text())
    check_measured(report, "shm")
    assert wrong_pages(report) == [1, 0, 0]


def test_what_is_missed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({})
    report.add(
        "a line", {}, Check("speed", 0.85, ">=", 0.9), Check("delay", 2.0, "<=", 2.0), Check("wrong", 0, "==", 0)
    )
    assert not report.conclude()
    assert capsys.readouterr().out == "a line\nFAIL  speed: 0.85, wanted >= 0.9\n2 passed, 1 failed\n"
