"""Proves that one comparison is what keeps pages safe: without it, the test of cancelled requests must fail.

As a pytest plugin it takes the comparison out of the code: a Drained is then believed before its rows were counted. Run
as a program it runs that test so, and succeeds when the test finds bytes in pages that were given to somebody else.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path

MODULE = "kvmsgr.runtime.attempt"
COMPARISON = "        if landed == rows:\n"
TEST = "tests/lost/test_cancel.py"
SYMPTOM = "after its pages were free"


def command() -> list[str]:
    """The test, without the comparison."""
    return [sys.executable, "-m", "pytest", "-x", "-p", "tools.checks.row_comparison", TEST]


def pytest_configure() -> None:
    spec = find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(COMPARISON) == 1, f"{MODULE} compares the rows in another way now: change COMPARISON"
    module = module_from_spec(spec)
    sys.modules[MODULE] = module
    exec(compile(source.replace(COMPARISON, "        if True:\n"), spec.origin, "exec"), module.__dict__)


def main() -> int:
    ran = subprocess.run(command(), capture_output=True, text=True)
    if ran.returncode and SYMPTOM in ran.stdout:
        return 0
    print(ran.stdout, ran.stderr, f"without the row comparison, {TEST} should fail and say {SYMPTOM!r}", sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
