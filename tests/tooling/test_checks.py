"""The checks themselves: a failure is shown in full, what hangs is ended, what is left behind is found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.checks import leftovers
from tools.checks.leftovers import VARIABLE, Watch
from tools.checks.stage import Stage

WAIT_FOR_STDIN = [sys.executable, "-S", "-c", "print('up', flush=True); input()"]


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A watch whose mark ends with the test; the run that this test is part of has a mark of its own."""
    monkeypatch.setenv(VARIABLE, os.environ.get(VARIABLE, ""))
    return Watch()


def test_a_passing_stage_prints_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert Stage("greeting", [python("print('hello')")]).run()
    (line,) = capfd.readouterr().out.splitlines()
    assert line.startswith("ok    greeting")


def test_a_stage_quotes_the_line_that_sums_it_up(capfd: pytest.CaptureFixture[str]) -> None:
    assert Stage(
        "sum", [python("print('== 1 passed =='); print('== 2 passed =='); print('bye')")], quote=" passed"
    ).run()
    assert capfd.readouterr().out.endswith(" s  2 passed\n")


def test_a_failing_stage_shows_all_its_output_and_stops(capfd: pytest.CaptureFixture[str]) -> None:
    failing = python("import sys; print('to stdout', flush=True); sys.exit('to stderr')")
    assert not Stage("bad", [failing, python("print('never run')")]).run()
    out = capfd.readouterr().out
    assert out.startswith("FAIL  bad")
    assert "to stdout\nto stderr\n\nbad: exit status 1" in out
    assert "\nnever run" not in out


def test_a_stage_that_hangs_is_ended_with_its_children(watch: Watch, capfd: pytest.CaptureFixture[str]) -> None:
    hanging = python("import subprocess, signal; subprocess.Popen(['sleep', '60']); signal.pause()")
    assert not Stage("stuck", [hanging], limit_s=0.1).run()
    assert "stuck: not done after 0 s" in capfd.readouterr().out
    assert watch.processes(grace_s=2) == {}


def test_a_process_left_behind_is_found_and_ended(watch: Watch, capfd: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(WAIT_FOR_STDIN, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        assert list(watch.processes(grace_s=0)) == [process.pid]
        assert not watch.report(grace_s=0)
        assert process.wait(10) < 0
    assert f"still running (ended now): {process.pid}" in capfd.readouterr().out


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of shared memory in which other tests, that run at the same time, leave nothing."""
    with tempfile.TemporaryDirectory(dir=leftovers.SHARED_MEMORY, prefix="kvmsgr-test-") as name:
        monkeypatch.setattr(leftovers, "SHARED_MEMORY", Path(name))
        yield name


def test_a_file_left_in_shared_memory_is_found_unless_someone_uses_it(own_folder: str, watch: Watch) -> None:
    with tempfile.NamedTemporaryFile(dir=own_folder) as file:
        file.write(b"left")
        file.flush()
        assert watch.files() == [Path(file.name)]
        code = f"import mmap; f = open({file.name!r}, 'r+b'); m = mmap.mmap(f.fileno(), 4); {WAIT_FOR_STDIN[-1]}"
        with subprocess.Popen(python(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
            assert user.stdout
            assert user.stdout.readline() == "up\n"
            assert watch.files() == []
            user.communicate("\n")
    assert watch.files() == []
