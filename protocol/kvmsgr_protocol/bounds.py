"""Bounded field types: whatever arrives is checked against them before anyone sees it."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from .immediate import NUM_GENERATIONS, NUM_SLOTS

MAX_TEXT: Final = 4096
"""Most characters of a text for people."""
MAX_PAYLOAD_BYTES: Final = 1 << 20
MAX_TOKENS: Final = 1 << 21
MAX_RANKS: Final = 1024
MAX_GROUPS: Final = 256
MAX_ENTRIES: Final = 1 << 16
MAX_REGIONS: Final = 1 << 16
MAX_ENDPOINTS: Final = 64
"""Most network interfaces of a rank."""

U31 = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
U64 = Annotated[int, Meta(ge=0)]  # msgpack itself holds no larger integer
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

Slot = Annotated[int, Meta(ge=0, lt=NUM_SLOTS)]
Generation = Annotated[int, Meta(ge=0, lt=NUM_GENERATIONS)]
ContextSlot = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
Incarnation = Annotated[str, Meta(max_length=32, pattern="^[0-9a-f]{32}$")]  # "$" alone takes a newline
