"""Snapshots of messengers that live, are stopped, die, or close while they are looked at."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from kvmsgr._ext import native
from kvmsgr.errors import StateFileError
from kvmsgr.inspect import MessengerView, PagesView, Unreadable, find, landed_rows, snapshot, state_files
from kvmsgr.inspect import process as processes

from .messengers import INCARNATION, add_fetch, child, messenger, open_leg, state_path, until


def test_a_messenger_and_its_legs_are_seen(tmp_path: Path) -> None:
    with messenger(tmp_path) as state:
        add_fetch(state)
        open_leg(state, 6, "serve", "served", peer="decode-1")
        state.update_leg(6, state="quarantined", reason="peer_lost", why="16 writes may be in the air", pages_held=2)
        assert state.path
        seen = snapshot(state.path)
    assert (seen.path, seen.pid, seen.incarnation) == (state.path, os.getpid(), INCARNATION)
    assert (seen.name, seen.address, seen.provider) == ("decode", "tcp://127.0.0.1:7000", "net")
    assert seen.software == "kvmsgr 0.1.0"
    assert seen.libfabric == ".".join(map(str, native.libfabric_version()))
    assert seen.process in ("running", "sleeping")
    assert seen.poller_seen_s is None
    assert seen.pages == [
        PagesView(group=0, name="kv", held=7, total=64),
        PagesView(group=1, name="window", held=1, total=8),
    ]
    assert seen.quarantined == 3
    fetching, serving = seen.legs
    assert 0 <= fetching.in_state_s <= fetching.age_s <= seen.age_s < 60
    assert (fetching.request_id, fetching.role, fetching.state) == ("fetched", "fetch", "moving")
    assert (fetching.leg, fetching.attempt, fetching.slot, fetching.generation) == (5, 70, 9, 2)
    assert (fetching.rows_landed, fetching.rows_expected, fetching.pages_held) == (0, 600, 4)
    assert (fetching.attempt_rows_landed, fetching.attempt_rows_expected) == (0, 640)
    assert (serving.request_id, serving.role, serving.peer) == ("served", "serve", "decode-1")
    assert (serving.reason, serving.why, serving.pages_held) == ("peer_lost", "16 writes may be in the air", 2)
    assert (serving.rows_landed, serving.attempt_rows_landed) == (None, None)
    assert not serving.torn


def test_the_process_of_a_messenger_is_followed_to_its_death(tmp_path: Path) -> None:
    with child(tmp_path) as process:
        path = state_path(tmp_path, process.pid)
        assert landed_rows(str(path), "fetched") == 0
        assert snapshot(path).process in ("running", "sleeping")
        process.send_signal(signal.SIGSTOP)
        until(lambda: snapshot(path).process == "stopped", "it is seen to be stopped")
        assert [leg.request_id for leg in snapshot(path).legs] == ["fetched"]
        process.send_signal(signal.SIGKILL)
        until(lambda: snapshot(path).process == "dead", "it is seen to be dead")  # a zombie: nobody has waited for it
        process.wait()
        assert snapshot(path).process == "dead"
        assert [leg.request_id for leg in snapshot(path).legs] == ["fetched"]


def test_a_pid_that_is_used_again_is_not_taken_for_the_messenger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(tmp_path) as process:
        path = state_path(tmp_path, process.pid)
        found = processes._stat(process.pid)
        assert found is not None
        monkeypatch.setattr(processes, "_stat", lambda pid: (found[0], found[1] + 1))
        assert snapshot(path).process == "elsewhere"  # another has the pid, yet the file is still locked
        process.kill()
        process.wait()
        until(lambda: snapshot(path).process == "dead", "its lock has gone")


def test_a_loop_of_links_hides_no_others(tmp_path: Path) -> None:
    (tmp_path / "kvmsgr-1-a.state").symlink_to("kvmsgr-1-b.state")
    (tmp_path / "kvmsgr-1-b.state").symlink_to("kvmsgr-1-a.state")
    with messenger(tmp_path) as state:
        assert state.path
        (tmp_path / "kvmsgr-1-c.state").symlink_to(state.path)  # seen once
        *loops, seen = sorted(find([tmp_path]), key=lambda one: isinstance(one, MessengerView))
    assert isinstance(seen, MessengerView)
    assert loops
    assert all(isinstance(one, Unreadable) for one in loops)


def test_files_that_cannot_be_read_hide_no_others(tmp_path: Path) -> None:
    (tmp_path / "kvmsgr-1-aaaaaaaa.state").write_bytes(bytes(5000))
    forbidden = tmp_path / "kvmsgr-2-aaaaaaaa.state"
    forbidden.mkdir()
    with messenger(tmp_path) as state:
        assert state.path
        content = bytearray(Path(state.path).read_bytes())
        content[8] -= 1
        (tmp_path / "kvmsgr-3-aaaaaaaa.state").write_bytes(content)
        found = find([tmp_path])
        assert [one.name for one in found if isinstance(one, MessengerView)] == ["decode"]
        assert [
            (Path(one.path).name[:8], one.error.partition(" is ")[2]) for one in found if isinstance(one, Unreadable)
        ] == [
            ("kvmsgr-1", "not a state file, or not ready yet"),
            ("kvmsgr-2", "not a state file, or not ready yet"),
            ("kvmsgr-3", "not a state file of version 2, but of version 1: look with the kvmsgr that made it"),
        ]
        assert len(find([tmp_path], pids=[os.getpid()])) == 1
        assert find([tmp_path], pids=[4]) == []
        with pytest.raises(StateFileError, match="not a state file"):
            snapshot(tmp_path / "kvmsgr-1-aaaaaaaa.state")
        with pytest.raises(FileNotFoundError):
            snapshot(tmp_path / "kvmsgr-4-aaaaaaaa.state")


def test_default_folders_are_those_of_messengers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with messenger(tmp_path) as state:
        assert state.path
        assert Path(state.path) in state_files(pids=[os.getpid()])
        assert state_files([tmp_path, tmp_path / ".." / tmp_path.name]) == [Path(state.path)]


def test_looking_never_fails_while_messengers_come_and_go(tmp_path: Path) -> None:
    over = threading.Event()

    def come_and_go() -> None:
        for _ in range(300):
            with messenger(tmp_path) as state:
                add_fetch(state)
        over.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    errors: list[str] = []
    while not over.is_set():
        errors += [one.error for one in find([tmp_path]) if isinstance(one, Unreadable)]
    thread.join()
    assert [error for error in errors if "not ready yet" not in error] == []


def test_looking_changes_nothing(tmp_path: Path) -> None:
    with messenger(tmp_path) as state:
        add_fetch(state)
        assert state.path
        before, status = Path(state.path).read_bytes(), os.stat(state.path)
        snapshot(state.path)
        after = os.stat(state.path)
        assert (after.st_blocks, after.st_mtime_ns) == (status.st_blocks, status.st_mtime_ns)
        assert Path(state.path).read_bytes() == before
