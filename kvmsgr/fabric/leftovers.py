"""Files that live outside a process, and what a killed one left of them."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def state_folder() -> Path:
    """Where state files go: memory, never a disk, so that the poller does not wait for one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) if runtime and os.access(runtime, os.W_OK) else SHARED_MEMORY


def sweep_leftovers() -> None:
    """Remove state files and libfabric's shared memory (16 MiB an endpoint) of processes of ours that are gone."""
    for state in state_folder().glob("kvmsgr-*.state"):
        _remove_if_dead(state, state.name.split("-")[1])
    for segment in SHARED_MEMORY.glob(f"*:{os.getuid()}:*"):  # <pid>:<uid>:<number>
        _remove_if_dead(segment, segment.name.split(":")[0])


def _remove_if_dead(path: Path, pid: str) -> None:
    if pid.isdigit() and not Path(f"/proc/{pid}").exists() and path.stat().st_uid == os.getuid():
        path.unlink(missing_ok=True)
