"""The demo's processes: what fails is told, and nothing outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.refengine.child_roles import echo, ends_within, fail, hang
from tools.refengine.processes import Children, DemoFailed

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_messages_wait_until_they_are_asked_for() -> None:
    with Children(60.0, None) as children:
        children.start("early", echo, [1, 2])
        children.start("late", echo, "x")
        children.send("early", 3)
        assert children.receive("late") == "x"
        children.send("late", "y")
        assert children.receive("late") == "y"
        assert [children.receive("early"), children.receive("early")] == [[1, 2], 3]


def test_an_error_in_a_child_is_told_with_its_type_and_ends_the_others() -> None:
    with Children(60.0, None) as children:
        children.start("good", hang, None)
        pid = children.receive("good")
        children.start("bad", fail, "this")
        with pytest.raises(DemoFailed, match=r"^bad: ValueError: refused: this$"):
            children.receive("good")
    assert ends_within(pid, 0)


def test_a_killed_child_is_noticed() -> None:
    with Children(60.0, None) as children:
        children.start("victim", hang, None)
        os.kill(children.receive("victim"), signal.SIGKILL)
        with pytest.raises(DemoFailed, match=r"the victim process died \(exit code -9\)"):
            children.receive("victim")


def test_a_child_that_hangs_runs_into_the_time_limit() -> None:
    with Children(0.01, None) as children:
        children.start("stuck", hang, None)
        with pytest.raises(DemoFailed, match=r"within the time limit of 0\.01 s"):
            children.receive("stuck")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_children_never_outlive_their_parent(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.refengine.child_roles"]
    parent = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
        assert all(ends_within(pid, 10) for pid in pids)
