"""The folders of tests: two run side by side, some alone, and none is forgotten."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.checks import pytests

ROOT = Path(__file__).parents[2]

TWO_MEET = """
import sys, time
from pathlib import Path
own, other = (Path(name) for name in sys.argv[1:3])
own.touch()
end = time.monotonic() + 20
while not other.exists():
    assert time.monotonic() < end, f"{other} never ran"
Path(f"{own} is done").touch()
print("== 2 passed, 1 skipped in 0.1s ==")
"""
ALONE = """
from pathlib import Path
assert Path("one is done").exists() and Path("two is done").exists()
print("1 passed in 0.1s")
"""
FAILS = "import sys; print('what went wrong'); print('1 failed, 1 passed in 0.1s'); sys.exit(1)"

COMMANDS = {
    "one": [TWO_MEET, "one", "two"],
    "two": [TWO_MEET, "two", "one"],
    "quiet": [ALONE],
    "bad": [FAILS],
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pytests, "ALONE", {"quiet"})
    monkeypatch.setattr(pytests, "command", lambda name: [sys.executable, "-S", "-c", *COMMANDS[name]])


@pytest.mark.usefixtures("stand_ins")
def test_two_run_side_by_side_and_then_one_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert pytests.run_all(["quiet", "one", "two"])
    *lines, total = capfd.readouterr().out.splitlines()
    assert sorted(line.split()[:2] for line in lines) == [["ok", f"tests/{name}"] for name in ("one", "quiet", "two")]
    assert total == "5 passed, 2 skipped"


@pytest.mark.usefixtures("stand_ins")
def test_one_that_fails_is_shown_and_the_others_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert not pytests.run_all(["bad", "one", "two"])
    out = capfd.readouterr().out
    assert "FAIL  tests/bad" in out
    assert "what went wrong" in out
    assert "tests/bad: exit status 1" in out
    assert sorted(out.splitlines()[-1].split(", ")) == ["1 failed", "2 skipped", "5 passed"]


def test_every_test_file_is_in_one_folder() -> None:
    names = pytests.folders(ROOT / "tests")
    assert {path.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/**/test_*.py")} == set(names)
    assert len(names) == len(set(names))
    assert {*pytests.COVERING, *pytests.ALONE, *pytests.LONGEST} <= set(names)
