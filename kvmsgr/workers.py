"""Ranks whose memory is allocated in worker processes: `WorkerLink` is the worker's side, `WorkerGroup` the lead's.

The lead maps the memory and hosts the messenger for all ranks. `docs/workers.py` shows both sides.

A worker needs no event loop, and the native layer only to bump layer counters; what needs it is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .device.shared import Exportable, SharedMemory
from .device.worker import WorkerLink

if TYPE_CHECKING:
    from .device.shared_counters import SharedCounters
    from .runtime.workers import WorkerGroup

__all__ = ["Exportable", "SharedCounters", "SharedMemory", "WorkerGroup", "WorkerLink"]

_NATIVE = {"SharedCounters": "device.shared_counters", "WorkerGroup": "runtime.workers"}


def __getattr__(name: str) -> object:
    if name not in _NATIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_NATIVE[name]}", __package__), name)
