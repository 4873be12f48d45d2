"""Which provider is chosen, and what is said when none can be."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvmsgr._ext import native
from kvmsgr.errors import ConfigError, FabricUnavailableError
from kvmsgr.fabric import leftovers
from kvmsgr.fabric.choice import candidates
from kvmsgr.fabric.inprocess import InProcessPoller
from kvmsgr.fabric.interface import Poller
from kvmsgr.fabric.libfabric import FabricSettings, open_fabric
from kvmsgr.fabric.state_view import StateView


def settings(fabric: str, local: bool, tmp_path: Path) -> FabricSettings:
    return FabricSettings(
        fabric, local, ["127.0.0.1"], "ab" * 16, 1024, 0.5, 2.0, 5.0, "auto", [(1, None)], None, str(tmp_path)
    )


def test_auto_prefers_shared_memory_only_where_every_peer_is_on_this_host() -> None:
    assert candidates("auto", local=True)[0] == "shm"
    assert "shm" not in candidates("auto", local=False)
    assert candidates("net", local=True) == ("net",)


@pytest.mark.parametrize(("fabric", "local"), [("auto", True), ("auto", False), ("net", True), ("shm", True)])
def test_what_is_chosen_passed_the_self_test_and_says_why(fabric: str, local: bool, tmp_path: Path) -> None:
    memory = np.zeros(4096, np.uint8)
    opened = open_fabric(settings(fabric, local, tmp_path), [(memory.ctypes.data, memory.nbytes, [0])])
    try:
        assert "passed the self-test" in opened.choice.why
        assert opened.choice.provider in opened.choice.why
        on_this_host = fabric == "shm" or (fabric == "auto" and local)
        assert opened.choice.provider in (("shm",) if on_this_host else ("net", "tcp"))
    finally:
        opened.close()
    assert list(tmp_path.iterdir()) == []


def test_peers_that_share_an_endpoint_do_not_meet_over_shm(tmp_path: Path) -> None:
    rotating = replace(settings("shm", True, tmp_path), fence="rotation")
    with pytest.raises(FabricUnavailableError, match="would stall all others"):
        open_fabric(rotating, [])
    opened = open_fabric(replace(rotating, fabric="auto"), [])
    assert opened.choice.provider in ("net", "tcp")
    assert opened.rotates
    opened.close()


def wait_for(poller: Poller, kind: int) -> None:
    deadline_s = time.monotonic() + 10
    while kind not in {record[0] for record in poller.take(1)}:
        assert time.monotonic() < deadline_s
        if isinstance(poller, InProcessPoller):
            poller.pump()


@pytest.mark.parametrize("fabric", ["inprocess", "net"])
@pytest.mark.parametrize("pollers", [[(2, None)], [(1, None), (1, None)]], ids=["one poller", "two pollers"])
def test_each_interface_has_its_own_memory_and_keys(
    fabric: str, pollers: list[tuple[int, int | None]], tmp_path: Path
) -> None:
    memory = np.zeros(3072, np.uint8)
    regions = [(memory.ctypes.data + 1024 * index, 1024, nics) for index, nics in enumerate([[0, 1], [1], [1]])]
    two = replace(settings(fabric, True, tmp_path), nics=["127.0.0.1", "127.0.0.1"], fence="rotation", pollers=pollers)
    opened = open_fabric(two, regions)
    try:
        keys: set[int] = set()
        links = []
        for nic in (0, 1):
            links.append(opened.open_link(nic))
            wait_for(opened.poller, native.LINK_OPENED)
        for _ in range(2):
            offered = [opened.poller.link_regions(link) for link in links]
            assert [len(its) for its in offered] == [1, 3]
            new = {key for its in offered for _, _, key in its}
            assert len(new) == 4
            assert not new & keys
            keys |= new
            opened.rotate()
            wait_for(opened.poller, native.PORT_OPENED)
            opened.close_old_port()
            wait_for(opened.poller, native.PORT_CLOSED)
    finally:
        opened.close()


def test_registered_memory_is_held_until_the_poller_has_stopped(tmp_path: Path) -> None:
    class Owner:
        pass

    memory, owner = np.zeros(4096, np.uint8), Owner()
    alive = weakref.ref(owner)
    opened = open_fabric(settings("net", True, tmp_path), [(memory.ctypes.data, memory.nbytes, [0])], owner)
    del owner
    assert alive() is not None
    opened.close()
    assert alive() is None


def test_a_provider_that_is_not_there_is_named_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(FabricUnavailableError) as raised:
        open_fabric(settings("no-such-provider", True, tmp_path), [])
    assert "no-such-provider" in str(raised.value)
    assert "shm" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_the_fallback_of_auto_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = native.Poller

    def without_shm(provider: str, *arguments: object, **more: object) -> native.Poller:
        if provider == "shm":
            raise native.NativeError("shm is broken here", "fi_getinfo", 61, "shm")
        return real(provider, *arguments, **more)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(native, "Poller", without_shm)
    opened = open_fabric(settings("auto", True, tmp_path), [])
    try:
        assert opened.choice.provider in ("tcp", "net")
        assert "shm is broken here" in opened.choice.why
    finally:
        opened.close()


def dead_pid() -> int:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(child.stdout)


def test_what_dead_processes_left_is_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    dead, uid = dead_pid(), os.getuid()
    kept = [f"kvmsgr-{os.getpid()}-aa.state", f"{os.getpid()}:{uid}:0", f"{dead}:{uid + 1}:0", "other"]
    for name in [f"kvmsgr-{dead}-aa.state", f"{dead}:{uid}:3", *kept]:
        (tmp_path / name).touch()
    leftovers.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_state_file_that_is_locked_is_kept_even_if_its_process_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    dead = dead_pid()
    names = [f"kvmsgr-{dead}-aa.state", f"{dead}:{os.getuid()}:3"]
    for name in names:
        (tmp_path / name).touch()
    held = leftovers.lock(str(tmp_path / names[0]))  # as from another pid namespace
    leftovers.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    os.close(held)
    leftovers.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "link": lambda path: path.symlink_to(__file__),
}


@pytest.fixture
def at_most_20_s() -> Iterator[None]:
    """Fails what hangs."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("at_most_20_s")
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_entry_stays_and_keeps_no_messenger_from_opening(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    dead, uid = dead_pid(), os.getuid()
    odd = [f"kvmsgr-{dead}-odd.state", f"{dead}:{uid}:0"]
    for name in odd:
        ODD[kind](tmp_path / name)
    for name in [f"kvmsgr-{dead}-aa.state", f"{dead}:{uid}:1"]:
        (tmp_path / name).touch()
    open_fabric(settings("net", True, tmp_path), []).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(odd)


def test_what_the_system_does_not_let_us_remove_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    theirs, ours = (tmp_path / f"kvmsgr-{dead_pid()}-{name}.state" for name in ("theirs", "ours"))
    unlink = Path.unlink

    def sticky(path: Path, missing_ok: bool = False) -> None:
        if path == theirs:
            raise PermissionError(errno.EPERM, "as in a folder like /tmp", str(path))
        unlink(path, missing_ok)

    theirs.touch()
    ours.touch()
    monkeypatch.setattr(Path, "unlink", sticky)
    leftovers.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [theirs]


def test_segments_without_a_state_file_are_swept_once_nobody_can_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir=leftovers.SHARED_MEMORY) as name:
        folder, dead, uid = Path(name), dead_pid(), os.getuid()
        monkeypatch.setattr(leftovers, "SHARED_MEMORY", folder)
        young, mapped, left = (folder / f"{dead}:{uid}:{number}" for number in range(3))
        alive, other = folder / f"{os.getpid()}:{uid}:0", folder / f"{dead}:{uid + 1}:0"
        for path in (young, mapped, left, alive, other):
            path.write_bytes(bytes(4096))
        with mapped.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 4096)
        old_s = time.time() - 2 * leftovers.MIN_FORGOTTEN_S
        for path in (mapped, left, alive, other):
            os.utime(path, (old_s, old_s))
        leftovers.sweep(folder)
        assert set(folder.iterdir()) == {young, mapped, alive, other}
        memory.close()
        leftovers.sweep(folder)
        assert set(folder.iterdir()) == {young, alive, other}


def test_a_folder_that_cannot_hold_the_state_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state_dir"):
        open_fabric(settings("net", True, tmp_path / "nowhere"), [])


def test_the_state_of_a_messenger_can_be_read_from_outside(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    state = native.StateFile(path, incarnation=5)
    state.open_attempt(3, 100, "a request with a long name, " * 5)
    with StateView(path) as view:
        assert view.landed_rows("a request with a long name, " * 5) == 0
        assert view.landed_rows("another") is None
    state.close()
