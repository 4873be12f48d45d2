"""The shared fixtures of tests/conftest.py, seen from a small test run of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-s"]

LEAKS = """
import sys, types

counters = {"endpoints": 0, "rings": 0}
sys.modules["kvmsgr._ext.native"] = types.SimpleNamespace(debug_counters=lambda: dict(counters))

class Cycle:
    def __init__(self):
        counters["rings"] += 1
        self.me = self
    def __del__(self):
        counters["rings"] -= 1

def test_late():
    Cycle()

def test_leaking():
    counters["endpoints"] += 1
"""

LOOPS = """
import asyncio

async def test_loop():
    loop = asyncio.get_running_loop()
    print(f"\\n<{type(loop).__module__} debug={loop.get_debug()}>")
"""


def run_tests(folder: Path, where: str, code: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / where).mkdir(exist_ok=True)
    (folder / where / "test_seeded.py").write_text(code)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return subprocess.run([*PYTEST, where], cwd=folder, capture_output=True, text=True, timeout=30)


@pytest.mark.slow
def test_a_native_leak_fails_its_test_and_names_the_kind(tmp_path: Path) -> None:
    result = run_tests(tmp_path, "native", LEAKS)
    assert "2 passed, 1 error" in result.stdout
    assert "ERROR native/test_seeded.py::test_leaking" in result.stdout
    assert "the test left native objects alive: {'endpoints': 1}" in result.stdout


@pytest.mark.slow
def test_loopback_tests_run_on_both_loops(tmp_path: Path) -> None:
    result = run_tests(tmp_path, "loopback", LOOPS)
    assert "2 passed" in result.stdout
    assert "test_loop[asyncio]" in result.stdout
    assert "<asyncio.unix_events debug=True>" in result.stdout
    assert "test_loop[uvloop]" in result.stdout
    assert "<uvloop debug=True>" in result.stdout


@pytest.mark.slow
def test_other_tests_run_once_on_one_loop(tmp_path: Path) -> None:
    result = run_tests(tmp_path, "unit", LOOPS)
    assert "1 passed" in result.stdout
    assert "<asyncio.unix_events debug=True>" in result.stdout
