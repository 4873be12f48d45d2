"""The wire protocol of kvmsgr: messages, framing, versions, immediates and the row count.

It needs msgspec alone and nothing of kvmsgr, so that any program can speak it.
"""

from __future__ import annotations

from . import immediate
from .bounds import MAX_PAYLOAD_BYTES, MAX_TOKENS
from .codes import Reason
from .errors import BadFrame, FrameTooLarge, VersionMismatch, WireError
from .framing import DEFAULT_MAX_FRAME_BYTES, FrameReader, encode
from .immediate import MAX_ROWS, NUM_GENERATIONS, NUM_SLOTS, Immediate
from .layouts import Beat, ContextLayout, Endpoint, GroupLayout, LayerEntry, PlaneLayout, RankAttach, Region
from .messages import (
    Accept,
    Attach,
    Busy,
    Cancel,
    Dispatch,
    Drained,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Identity,
    Message,
    RankFabric,
    RankSpans,
    Refuse,
    Restarted,
    Resume,
    Rotate,
    Rotated,
    Sent,
    SlotRows,
    Span,
    Unknown,
)
from .packing import pack_pages, pack_tokens, unpack_pages, unpack_tokens
from .rows import expected_rows, group_positions, rows_per_position, span_positions
from .versions import PROTOCOL_VERSIONS, negotiate

__all__ = [
    "DEFAULT_MAX_FRAME_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MAX_ROWS",
    "MAX_TOKENS",
    "NUM_GENERATIONS",
    "NUM_SLOTS",
    "PROTOCOL_VERSIONS",
    "Accept",
    "Attach",
    "BadFrame",
    "Beat",
    "Busy",
    "Cancel",
    "ContextLayout",
    "Dispatch",
    "Drained",
    "Endpoint",
    "Failed",
    "Finished",
    "FrameReader",
    "FrameTooLarge",
    "Goodbye",
    "GroupLayout",
    "Hello",
    "Identity",
    "Immediate",
    "LayerEntry",
    "Message",
    "PlaneLayout",
    "RankAttach",
    "RankFabric",
    "RankSpans",
    "Reason",
    "Refuse",
    "Region",
    "Restarted",
    "Resume",
    "Rotate",
    "Rotated",
    "Sent",
    "SlotRows",
    "Span",
    "Unknown",
    "VersionMismatch",
    "WireError",
    "encode",
    "expected_rows",
    "group_positions",
    "immediate",
    "negotiate",
    "pack_pages",
    "pack_tokens",
    "rows_per_position",
    "span_positions",
    "unpack_pages",
    "unpack_tokens",
]
