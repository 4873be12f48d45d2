"""What this process has mapped and open."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def num_mappings() -> int:
    """Shared memories that are mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:kvmsgr")


def num_files() -> int:
    """Descriptors of memory and of processes."""
    num = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            target = os.readlink(f"/proc/self/fd/{name}")
            num += "memfd:" in target or "pidfd" in target
    return num


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fail when more is left than there was before."""
    before = left()
    if before != (0, 0):
        gc.collect()  # what another test has left in a cycle must not go in the middle of this one
        before = left()
    yield
    if left() != before:
        gc.collect()  # what is in a cycle is late, not left
        assert left() == before, "shared memory is left (mappings, descriptors)"


def left() -> tuple[int, int]:
    """Mappings and descriptors."""
    return num_mappings(), num_files()
