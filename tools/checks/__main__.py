"""Every check of the checkout, stage by stage. Run by tools/test."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.checks import row_comparison
from tools.checks.leftovers import Watch
from tools.checks.stage import Command, Stage

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
TYPED = ["kvmsgr", "protocol", *(f"tools/{name}" for name in ("benchmarks", "checks", "refengine", "specification"))]
COVERED = "*/kvmsgr/core/*,*/kvmsgr/layout/*,*/kvmsgr_protocol/*"  # to the last branch

PROVE_SANITIZERS = Stage("sanitizers catch", [[PYTHON, "-m", "tools.checks.seeded"]], slow=True)


def pytest_stage(fast: bool, arguments: Sequence[str]) -> Stage:
    """The Python tests. Coverage is asked of a full run only: a part of the tests cannot cover everything."""
    if fast or arguments:
        pytest: Command = [PYTHON, "-m", "pytest", *(["-m", "not slow"] if fast else []), *arguments]
        return Stage("pytest", [pytest], limit_s=1800, quote=" passed")
    return Stage(
        "pytest, coverage",
        [
            [PYTHON, "-m", "coverage", "erase"],
            [PYTHON, "-m", "tools.checks.pytests"],
            [PYTHON, "-m", "coverage", "combine", "--quiet"],
            [PYTHON, "-m", "coverage", "report", f"--include={COVERED}", "--fail-under=100"],
        ],
        limit_s=1800,
        quote=" passed",
    )


def stages(fast: bool, pytest_arguments: Sequence[str]) -> list[Stage]:
    """All stages, the quick ones first."""
    every = [
        Stage("ruff check", [["ruff", "check", "."]]),
        Stage("ruff format", [["ruff", "format", "--check", "--diff", "."]]),
        Stage("cython-lint", [["cython-lint", "ext"]]),
        Stage("import contracts", [[PYTHON, "-m", "tools.checks.contracts"]]),
        Stage("mypy", [["mypy", *TYPED]]),
        Stage("native stub", [["stubtest", "kvmsgr._ext.native", "--mypy-config-file", "pyproject.toml"]]),
        Stage("written protocol", [[PYTHON, "-m", "tools.specification", "--check"]]),
        Stage("protocol vectors", [[PYTHON, "protocol/check_vectors.py"]], quote=" answers checked"),
        Stage("C tests", [[PYTHON, "-m", "tools.checks.native"]]),
        Stage("C tests, ASan and UBSan", [[PYTHON, "-m", "tools.checks.native", "address,undefined"]], slow=True),
        Stage("C tests, TSan", [[PYTHON, "-m", "tools.checks.native", "thread"]], slow=True),
        PROVE_SANITIZERS,
        pytest_stage(fast, pytest_arguments),
        Stage("the row comparison", [[PYTHON, "-m", "tools.checks.row_comparison"]], slow=True),
        Stage("wheel", [[PYTHON, "-m", "tools.checks.wheel"]], slow=True),
    ]
    return [stage for stage in every if not (fast and stage.slow)]


def check_installed() -> None:
    """Refuse to check anything but this checkout: an environment may hold the install of another one."""
    import kvmsgr

    installed = Path(kvmsgr.__file__).parent
    if installed != ROOT / "kvmsgr":
        sys.exit(f"kvmsgr is imported from {installed}, not from {ROOT / 'kvmsgr'}; run tools/setup --dev --demo here")


def main() -> int:
    parser = argparse.ArgumentParser("tools/test", description="Runs every check of the checkout.")
    parser.add_argument("--fast", action="store_true", help="leave out sanitizers, wheel and tests marked slow")
    parser.add_argument(
        "--prove-sanitizers", action="store_true", help="only prove that the sanitizers catch two deliberate faults"
    )
    parser.add_argument("pytest", nargs="*", metavar="-- ARGUMENT", help="arguments for pytest")
    parser.add_argument(
        "--without-row-comparison",
        action="store_true",
        help="only run the test of cancelled requests, with the comparison of Drained and counted rows taken out of "
        "the code: it must fail",
    )
    options = parser.parse_args()

    os.chdir(ROOT)
    os.environ["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    check_installed()
    started_s = time.monotonic()
    watch = Watch()
    if options.prove_sanitizers:
        chosen = [PROVE_SANITIZERS]
    elif options.without_row_comparison:
        chosen = [Stage("without row comparison", [row_comparison.command()])]
    else:
        chosen = stages(options.fast, options.pytest)
    outcomes = [stage.run() for stage in chosen]
    nothing_left = watch.report()
    print(f"{'ok  ' if nothing_left else 'FAIL'}  nothing left behind")
    outcomes.append(nothing_left)

    print(f"{time.monotonic() - started_s:.0f} s in all")
    print(f"{outcomes.count(True)} passed, {outcomes.count(False)} failed")
    return not all(outcomes)


if __name__ == "__main__":
    sys.exit(main())
