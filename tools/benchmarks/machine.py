"""The machine a figure was measured on: facts about it, and how threads are placed on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvmsgr._ext import native

AUTOGROUP = Path("/proc/self/autogroup")
NICE = -20  # other work on the machine disturbs less; both sides of a ratio get it
REALTIME_PRIORITY = 20


class MachineError(Exception):
    """This machine cannot run the benchmark."""


@dataclass(frozen=True)
class Cores:
    """`source` has the thread under test to itself, `target` the other process. `driver` bumps layers and hogs the GIL;
    it is the target's core where there are only two."""

    source: int
    target: int
    driver: int


def choose_cores() -> Cores:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise MachineError(
            f"only core {allowed} may be used; the benchmark needs 2 cores, source and target spin on one each"
        )
    return Cores(allowed[0], allowed[1], allowed[min(2, len(allowed) - 1)])


def pin(core: int) -> None:
    """Keep the calling thread on one core."""
    os.sched_setaffinity(0, {core})


@contextmanager
def raised_priority() -> Iterator[bool]:
    """This process, and its session where the kernel weighs whole sessions, go first where that is permitted."""
    before = AUTOGROUP.read_text(encoding="ascii").split()[-1] if AUTOGROUP.exists() else None
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        if before:
            AUTOGROUP.write_text(str(NICE), encoding="ascii")
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        if before:
            AUTOGROUP.write_text(before, encoding="ascii")


@contextmanager
def realtime() -> Iterator[bool]:
    """The calling thread runs as soon as it wakes up, where that is permitted (then True)."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def facts(cores: Cores, raised: bool) -> dict[str, Any]:
    with realtime() as permitted:
        pass
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable cores": len(os.sched_getaffinity(0)),
        **{f"{role} core": core for role, core in asdict(cores).items()},
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libfabric": ".".join(map(str, native.libfabric_version())),
        "load": os.getloadavg()[0],
        "priority raised": raised,
        "realtime driver": permitted,
    }
