"""Files that live outside a process, and what a killed one left of them.

A state file is locked while its messenger lives, so that another process can tell, even from another pid namespace.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


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
    shm provider left with them."""
    for state in folder.glob("kvmsgr-*-*.state"):
        pid = state.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and _remove_unlocked(state):
            for segment in SHARED_MEMORY.glob(f"{pid}:{os.getuid()}:*"):
                segment.unlink(missing_ok=True)


def _remove_unlocked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False  # swept by another, or not ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
