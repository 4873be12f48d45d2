"""What a run of the checks must not leave behind: processes, and files in /dev/shm."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "KVMSGR_CHECKS"
SHARED_MEMORY = Path("/dev/shm")


class Watch:
    """Remembers what there was before, and marks by an environment variable all that is started from now on."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        os.environ[VARIABLE] = self._mark
        self._files_before = set(shared_memory_files())

    def processes(self, grace_s: float) -> dict[int, str]:
        """Command lines, by process id, of marked processes that still run; those just ending get `grace_s`."""
        deadline_s = time.monotonic() + grace_s
        while (found := self._marked_processes()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found

    def files(self) -> list[Path]:
        """New files in /dev/shm. What a living process of someone else has open is theirs, and not listed."""
        new = [path for path in shared_memory_files() if path not in self._files_before]
        in_use = files_in_use() if new else set()
        return [path for path in new if str(path) not in in_use]

    def report(self, grace_s: float = 2.0) -> bool:
        """Print what was left behind, and end the processes among it.

        Returns:
            Whether nothing was left behind.
        """
        processes = self.processes(grace_s)
        for pid, command_line in processes.items():
            print(f"still running (ended now): {pid} {command_line}")
            os.kill(pid, signal.SIGKILL)
        files = self.files()
        for path in files:
            print(f"left behind: {path}")
        return not processes and not files

    def _marked_processes(self) -> dict[int, str]:
        mark = f"{VARIABLE}={self._mark}".encode()
        return {
            int(process.name): read(process / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
            for process in processes()
            if int(process.name) != os.getpid() and mark in read(process / "environ").split(b"\0")
        }


def processes() -> Iterator[Path]:
    """Folders of /proc, one a process."""
    return (path for path in Path("/proc").iterdir() if path.name.isdecimal())


def read(path: Path) -> bytes:
    """Content of a file of /proc; empty when its process has ended or is not ours to look at."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return b""


def shared_memory_files() -> list[Path]:
    """Files of /dev/shm, in order of name."""
    return sorted(path for path in SHARED_MEMORY.rglob("*") if path.is_file())


def files_in_use() -> set[str]:
    """Files of /dev/shm that some living process has mapped."""
    mapped = set[str]()
    for process in processes():
        for line in read(process / "maps").decode(errors="replace").splitlines():
            _, separator, name = line.partition(f"{SHARED_MEMORY}/")
            if separator and not name.endswith(" (deleted)"):
                mapped.add(f"{SHARED_MEMORY}/{name}")
    return mapped
