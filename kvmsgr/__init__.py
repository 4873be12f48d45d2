"""kvmsgr moves paged KV caches from prefill nodes to decode nodes, layer by layer, while the prefill computes.

Plain values are imported at once; whatever needs the native layer is loaded when it is first used, so that a
scheduler process can handle descriptors and spans without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvmsgr_protocol import Reason

from . import errors
from .config import Config
from .types import Descriptor, RawArray, Span, Spread

if TYPE_CHECKING:
    from .device.cache import Cache, CacheGroup, ContextBuffer, Rank
    from .messenger import Messenger
    from .runtime.arrival import Arrival
    from .runtime.fetch import Fetch
    from .runtime.serve import Outcome, PrefillRequest
    from .runtime.steps import Chunk, Step

__all__ = [
    "Arrival",
    "Cache",
    "CacheGroup",
    "Chunk",
    "Config",
    "ContextBuffer",
    "Descriptor",
    "Fetch",
    "Messenger",
    "Outcome",
    "PrefillRequest",
    "Rank",
    "RawArray",
    "Reason",
    "Span",
    "Spread",
    "Step",
    "errors",
]

_NATIVE = {
    "Arrival": "runtime.arrival",
    "Cache": "device.cache",
    "CacheGroup": "device.cache",
    "Chunk": "runtime.steps",
    "ContextBuffer": "device.cache",
    "Fetch": "runtime.fetch",
    "Messenger": "messenger",
    "Outcome": "runtime.serve",
    "PrefillRequest": "runtime.serve",
    "Rank": "device.cache",
    "Step": "runtime.steps",
}


def __getattr__(name: str) -> object:
    if name not in _NATIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_NATIVE[name]}", __name__), name)
