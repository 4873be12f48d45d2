"""Files that live outside a process, and what a killed one left of them.

A state file is locked while its messenger lives, so that another process can tell, even from another pid namespace.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
MIN_FORGOTTEN_S = 60.0


def state_folder() -> Path:
    """Where state files go: memory, never a disk, so that the poller does not wait for one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) if runtime and os.access(runtime, os.W_OK) else SHARED_MEMORY


def lock(path: str) -> int:
    """Hold a lock on a state file; returns the descriptor that holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def sweep(folder: Path) -> None:
    """Remove the state files of messengers that are gone, and the shared memory (16 MiB an endpoint) that libfabric's
    shm provider left with them; and what it left where no state file tells of it any more.

    Anyone may have put anything into these folders: what cannot be removed is not ours, and stays.
    """
    for state in folder.glob("kvmsgr-*-*.state"):
        pid = state.name.split("-")[1]
        if _is_gone(pid) and _remove(state, _is_unlocked):
            for segment in SHARED_MEMORY.glob(f"{pid}:{os.getuid()}:*"):
                _remove(segment, _is_ours)
    for segment in SHARED_MEMORY.glob(f"*:{os.getuid()}:*"):
        if _is_gone(segment.name.split(":")[0]):
            _remove(segment, _is_forgotten)


def _is_gone(pid: str) -> bool:
    return pid.isdecimal() and not Path(f"/proc/{pid}").exists()


def _remove(path: Path, may_go: Callable[[int], bool]) -> bool:
    """Remove a regular file if its descriptor says that it may go; returns whether it has gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not may_go(descriptor):
            return False
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_unlocked(descriptor: int) -> bool:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError if it is locked
    return True


def _is_ours(descriptor: int) -> bool:
    return os.fstat(descriptor).st_uid == os.getuid()


def _is_forgotten(descriptor: int) -> bool:
    """Whether nobody has a segment mapped, nor will: a peer that finds no segment behind a request to connect crashes,
    so one that may still be on its way to a peer stays.

    A pid may be alive in another pid namespace. A read lease is given only where nobody, wherever it runs, has the
    file open or mapped for writing.
    """
    if not _is_ours(descriptor) or time.time() - os.fstat(descriptor).st_mtime < MIN_FORGOTTEN_S:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored; SIGIO, if someone opens it now, would kill us
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # an OSError if it is not given
    return True
