"""The state file, from this process and from another."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmsgr._ext import native

COUNTING, DONE, ENDED = (native.ATTEMPT_STATES.index(name) for name in ("counting", "done", "ended"))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[native.StateFile]:
    state = native.StateFile(tmp_path / "state", incarnation=0xABCDEF)
    yield state
    state.close()


def test_the_file_is_private_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = native.StateFile(str(path), incarnation=1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (state.path, state.pid, state.incarnation) == (str(path), os.getpid(), 1)
    with pytest.raises(FileExistsError, match="cannot create"):
        native.StateFile(str(path), incarnation=2)
    state.close()
    state.close()
    assert not path.exists()


def test_a_file_nobody_closed_goes_away_too(tmp_path: Path) -> None:
    native.StateFile(tmp_path / "state", incarnation=1)
    gc.collect()
    assert not (tmp_path / "state").exists()


def test_only_touched_pages_are_resident(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = native.StateFile(path, incarnation=1)
    state.open_attempt(1, 10, "one")
    state.link_slot(1 << 13, 5, 1)
    used = path.stat()
    assert used.st_size > 1 << 22
    assert used.st_blocks * 512 < 1 << 17
    state.close()


def test_attempts_are_listed_with_their_labels(state: native.StateFile) -> None:
    state.open_attempt(7, 100, "request-7")
    state.open_attempt(8, 200, "é" * 40)
    state.end_attempt(7)
    state.end_attempt(7)
    state.open_attempt(9, 0, "nothing to receive")
    assert state.attempts() == [
        (7, ENDED, 0, 100, "request-7"),
        (8, COUNTING, 0, 200, "é" * 32),
        (9, DONE, 0, 0, "nothing to receive"),
    ]
    assert state.expecting == 1
    assert (state.find("request-7"), state.find("é" * 40), state.find("request")) == (7, 8, None)


def test_an_entry_is_used_again_but_never_while_it_counts(state: native.StateFile) -> None:
    state.open_attempt(3, 10, "old")
    later = 3 + (1 << 14)
    with pytest.raises(ValueError, match="attempt 3 is still counting"):
        state.open_attempt(later, 10, "new")
    state.end_attempt(3)
    state.open_attempt(later, 10, "new")
    assert state.find("old") is None
    assert state.attempt_rows(later) == 0
    with pytest.raises(KeyError, match="attempt 3 is not in the table"):
        state.attempt_rows(3)
    with pytest.raises(KeyError, match="never opened"):
        state.end_attempt(3)


def test_the_newest_of_equal_labels_is_found(state: native.StateFile) -> None:
    for attempt in (5, 4):
        state.open_attempt(attempt, 1, "retry")
    assert state.find("retry") == 4


def test_slots_are_linked_and_counted(state: native.StateFile) -> None:
    state.open_attempt(1, 10, "")
    with pytest.raises(KeyError, match="never opened"):
        state.link_slot(0, 0, 2)
    for slot, generation in ((1 << 14, 0), (0, 16)):
        with pytest.raises(ValueError, match="want <"):
            state.link_slot(slot, generation, 1)
    state.link_slot(9, 2, 1)
    state.link_slot(9, 2, 1)
    state.link_slot(9, 3, 1)
    assert native.debug_counters()["slots"] == 2
    state.unlink_slot(9, 2)
    state.unlink_slot(9, 2)
    assert native.debug_counters()["slots"] == 1
    assert state.slot_rows(9, 3) == 0


LOOK = """
import sys
from kvmsgr._ext import native
state = native.StateFile(sys.argv[1], incarnation=0, writable=False)
print(state.pid, state.incarnation, state.attempts(), state.find("stuck"))
try:
    state.open_attempt(2, 1, "")
except RuntimeError as error:
    print(error)
state.close()
"""


def test_another_process_looks_into_it(state: native.StateFile) -> None:
    state.open_attempt(11, 64, "stuck")
    assert state.path
    command = [sys.executable, "-c", LOOK, state.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    seen = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30).stdout
    first, second = seen.splitlines()
    assert first == f"{os.getpid()} {0xABCDEF} [(11, {COUNTING}, 0, 64, 'stuck')] 11"
    assert "only be looked into" in second
    assert Path(state.path).exists()


def test_other_files_are_not_looked_into(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="is not a state file"):
        native.StateFile(other, incarnation=0, writable=False)
    with pytest.raises(FileNotFoundError, match="cannot open"):
        native.StateFile(tmp_path / "none", incarnation=0, writable=False)
    with pytest.raises(ValueError, match="needs its path"):
        native.StateFile(None, incarnation=0, writable=False)
