"""One valid message of each kind."""

from __future__ import annotations

import msgspec

import kvmsgr_protocol as wire
from kvmsgr_protocol import Reason


def group(
    page_tokens: int = 4, num_heads: int = 2, num_planes: int = 2, num_layers: int = 3, name: str = "kv"
) -> wire.GroupLayout:
    """A group of 100 pages in one region, [layer, plane, page, head, token]."""
    row_bytes = 8
    page_bytes = row_bytes * page_tokens * num_heads
    return wire.GroupLayout(
        name=name,
        dtype="bfloat16",
        item_bytes=2,
        page_tokens=page_tokens,
        num_pages=100,
        head_start=0,
        num_heads=num_heads,
        total_heads=num_heads,
        planes=[wire.PlaneLayout(row_bytes, page_bytes, row_bytes * page_tokens, row_bytes)] * num_planes,
        entries=[
            wire.LayerEntry(layer, plane, 0, (layer * num_planes + plane) * 100 * page_bytes, layer + 1)
            for layer in range(num_layers)
            for plane in range(num_planes)
        ],
    )


def context(name: str = "hidden", num_units: int = 3) -> wire.ContextLayout:
    """A context buffer of 5 slots in region 1."""
    return wire.ContextLayout(
        name=name,
        dtype="float32",
        item_bytes=4,
        unit_bytes=64,
        num_units=num_units,
        num_slots=5,
        slot_stride_bytes=64 * num_units,
        region=1,
        offset_bytes=0,
    )


REGION = wire.Region(base=2**64 - 4096, num_bytes=4096, key=2**64 - 1)
ENDPOINT = wire.Endpoint("shm", b"fi_shm://1", 64, wire.Beat(REGION.base, REGION.key, 16382, 14))

MESSAGES: list[wire.Message] = [
    wire.Hello((1, 1), ["rotate"], "0123456789abcdef" * 2, "decode-0", "kvmsgr 0.1", wire.Identity("m@1", ["decoder"])),
    wire.Attach([wire.RankAttach(0, 0, [group()], [REGION, REGION], [ENDPOINT], [context()])], 3, 0.5, 2.0),
    wire.Dispatch(
        "r1",
        7,
        num_tokens=3,
        tokens=wire.pack_tokens([1, 2, 2**32 - 1]),
        slot=16383,
        generation=15,
        ranks=[wire.RankSpans(0, [wire.Span(0, 1, wire.pack_pages([5, 9]))])],
        context_slot=-1,
        expected_rows=2**40,
        time_allowed_s=30.0,
        payload=b"lora",
        trace={"traceparent": "00-1"},
    ),
    wire.Accept("r1", 7),
    wire.Busy("r1", 7, "queue is full", 0.5),
    wire.Busy("r1", 7, "queue is full"),
    wire.Refuse("r1", 7, Reason.refused, "no such adapter"),
    wire.Sent("r1", 7, 96),
    wire.Cancel("r1", 7, Reason.cancelled, "client left"),
    wire.Drained("r1", 7, 0),
    wire.Finished("r1", 7, 96),
    wire.Failed("r1", 7, Reason.short_count, "no row for 2 s", 90, 96),
    wire.Rotate([wire.RankFabric(0, [ENDPOINT], [REGION])]),
    wire.Rotated([wire.SlotRows(16383, 15, 90)]),
    wire.Resume(),
    wire.Restarted("r1", 7, 8),
    wire.Unknown("r1", 7),
    wire.Goodbye(Reason.closed, "shutting down"),
]

_SMALL_GROUP = group(num_heads=1, num_planes=1, num_layers=1)
SMALL: list[wire.Message] = [
    *(message for message in MESSAGES if not isinstance(message, wire.Attach | wire.Dispatch)),
    wire.Attach([wire.RankAttach(0, 0, [_SMALL_GROUP], [REGION], [])], 1, 0.5, 2.0),
    wire.Attach([wire.RankAttach(0, 0, [], [REGION, REGION], [ENDPOINT], [context()])], 0, 0.5, 2.0),
    msgspec.structs.replace(next(m for m in MESSAGES if isinstance(m, wire.Dispatch)), num_tokens=1, tokens=b""),
]
"""Short ones that hold every field, and an item of every list."""
