"""Runs the Python tests: each folder of `tests` is a pytest of its own, and two of them run side by side.

The folders that prove coverage are measured, and no others: measuring doubles what a test costs. Tests that watch the
clock run when all others are done, one folder at a time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PYTHON = sys.executable
SIDE_BY_SIDE = 2
COVERING = frozenset({"core", "layout", "protocol"})
ALONE = frozenset({"lost"})
LONGEST = ("refengine", "ranks", "workers", "loopback", "protocol")  # these begin first

Counts = Counter[str]  # tests, by how they ended


def folders(root: Path) -> list[str]:
    """Names of all folders with tests, and of test files beside these, in the order in which they begin."""
    found = {path.relative_to(root).parts[0] for path in root.rglob("test_*.py")}
    rank = {name: index for index, name in enumerate(LONGEST)}
    return sorted(found, key=lambda name: (rank.get(name, len(rank)), name))


def command(name: str) -> list[str]:
    measured = ["-m", "coverage", "run", "--parallel-mode"] if name in COVERING else []
    return [PYTHON, *measured, "-m", "pytest", f"tests/{name}"]


def run(name: str) -> tuple[bool, Counts]:
    """Run a folder, and print one line, and all its output if it failed. Returns whether it passed, and the counts."""
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = subprocess.run(
            command(name), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
        output.seek(0)
        text = output.read()
    last = text.rstrip().rpartition("\n")[2].strip("= ")
    said = f"{'FAIL' if code else 'ok  '}  tests/{name:<16} {time.monotonic() - started_s:6.1f} s  {last}\n"
    if code:
        said += f"{text}\ntests/{name}: exit status {code}\n"
    print(said, end="", flush=True)
    return code == 0, Counter({kind: int(num) for num, kind in re.findall(r"(\d+) ([a-z]+)", last.split(" in ")[0])})


def outcomes(names: Sequence[str]) -> Iterator[tuple[bool, Counts]]:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield from pool.map(run, [name for name in names if name not in ALONE])
    yield from map(run, [name for name in names if name in ALONE])


def run_all(names: Sequence[str]) -> bool:
    """Run them, and print how many tests ended how. Returns whether all passed."""
    passed, counts = zip(*outcomes(names), strict=True)
    print(", ".join(f"{num} {kind}" for kind, num in sum(counts, Counts()).items()))
    return all(passed)


def main() -> int:
    return not run_all(folders(Path("tests")))


if __name__ == "__main__":
    sys.exit(main())
