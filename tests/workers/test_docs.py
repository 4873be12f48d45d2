"""What the documentation shows runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "workers.py"


@pytest.mark.slow
def test_the_example_runs() -> None:
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if "all right" in line] == [
        f"request-{number}: 49 tokens arrived from 2 workers, all right" for number in range(3)
    ], ran.stdout
