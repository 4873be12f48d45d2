"""State files written by hand, as messengers write them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmsgr._ext import native

DEADLINE_S = 20.0
INCARNATION = "0123456789abcdef" * 2


def state_path(folder: Path, pid: int) -> Path:
    return folder / f"kvmsgr-{pid}-{INCARNATION[:8]}.state"


@contextmanager
def messenger(folder: Path) -> Iterator[native.StateFile]:
    """One of this process, with a name and pages, and no legs."""
    state = native.StateFile(state_path(folder, os.getpid()), incarnation=INCARNATION)
    state.set_info(name="decode", address="tcp://127.0.0.1:7000", provider="net", software="kvmsgr 0.1.0")
    state.set_pages(0, "kv", 7, 64)
    state.set_pages(1, "window", 1, 8)
    state.set_quarantined(3)
    try:
        yield state
    finally:
        state.close()


def add_fetch(state: native.StateFile, request_id: str = "fetched") -> None:
    """Leg 5 of attempt 70."""
    state.open_attempt(70, 640, request_id)
    state.link_slot(9, 2, 70)
    open_leg(state, 5, "fetch", request_id, peer="prefill-0")
    state.update_leg(5, state="moving", pages_held=4)


def open_leg(state: native.StateFile, number: int, role: str, request_id: str, peer: str) -> None:
    state.open_leg(
        number,
        role=role,
        state="asked",
        request_id=request_id,
        peer=peer,
        attempt=70,
        slot=9,
        generation=2,
        rows_expected=600,
        num_layers=32,
    )


CHILD = """
import os, sys
from pathlib import Path
from kvmsgr.fabric.leftovers import lock
from tests.inspect.messengers import add_fetch, messenger, state_path
with messenger(Path(sys.argv[1])) as state:
    held = lock(state.path)
    add_fetch(state)
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def child(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a messenger that fetches; it ends when its stdin is closed."""
    command = [sys.executable, "-c", CHILD, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
