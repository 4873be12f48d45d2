"""Whether the process that made a state file still runs."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from .views import ProcessState

_STATES: dict[str, ProcessState] = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "waiting",
    "T": "stopped",
    "t": "traced",
}


def process_state(path: str, pid: int, started: int) -> ProcessState:
    """What the process `pid` does, if it is still the one that began at `started` (clock ticks since boot).

    Its state file `path` is locked while it lives, which shows even where we cannot see its pid.
    """
    found = _stat(pid)
    if found is not None and started in (0, found[1]):
        return _STATES.get(found[0], "dead")
    return "elsewhere" if _is_locked(path) else "dead"


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[19])


def _is_locked(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
