"""A valid message of each kind, and some of several ranks."""

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


def context(name: str = "hidden", num_units: int = 3, region: int = 1) -> wire.ContextLayout:
    """A context buffer of 5 slots."""
    return wire.ContextLayout(
        name=name,
        dtype="float32",
        item_bytes=4,
        unit_bytes=64,
        num_units=num_units,
        num_slots=5,
        slot_stride_bytes=64 * num_units,
        region=region,
        offset_bytes=0,
    )


REGION = wire.Region(base=2**64 - 4096, key=2**64 - 1)
ENDPOINT = wire.Endpoint("shm", b"fi_shm://1", [REGION, REGION], 64, wire.Beat(REGION.base, REGION.key, 16382, 14))


def state(num_heads: int = 2) -> wire.GroupLayout:
    """A recurrent group of two layers in region 1."""
    layout = group(1, num_heads, num_planes=1, num_layers=2, name="state")
    entries = [msgspec.structs.replace(entry, region=1) for entry in layout.entries]
    return msgspec.structs.replace(layout, entries=entries, recurrent=True)


def endpoint(address: bytes, num_regions: int, beat_slot: int) -> wire.Endpoint:
    """One with keys and a heartbeat slot of its own."""
    regions = [wire.Region(4096 * index, 256 * beat_slot + index) for index in range(num_regions)]
    return wire.Endpoint("net", address, regions, 32, wire.Beat(0, 256 * beat_slot + num_regions, beat_slot, 0))


def shard(rank: int, first_beat_slot: int = 0) -> wire.RankAttach:
    """One of two ranks: one of two heads, 3 regions, two network interfaces."""
    layouts = [
        msgspec.structs.replace(layout, head_start=rank, total_heads=2)
        for layout in (group(num_heads=1, num_layers=1), state(num_heads=1))
    ]
    endpoints = [endpoint(b"nic %d" % nic, 3, first_beat_slot + 2 * rank + nic) for nic in range(2)]
    return wire.RankAttach(rank, layouts, [6400, 1600, 960], endpoints, [context(region=2)])


MESSAGES: list[wire.Message] = [
    wire.Hello((1, 1), ["rotate"], "0123456789abcdef" * 2, "decode-0", "kvmsgr 0.1", wire.Identity("m@1", ["decoder"])),
    wire.Attach([wire.RankAttach(0, [group()], [1 << 20, 960], [ENDPOINT], [context()])], 0.5, 2.0),
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
    wire.Rotate([wire.RankFabric(0, [ENDPOINT])]),
    wire.Rotated([wire.SlotRows(16383, 15, 90)]),
    wire.Resume(),
    wire.Restarted("r1", 7),
    wire.Unknown("r1", 7),
    wire.Goodbye(Reason.closed, "shutting down"),
    wire.Attach([shard(0), shard(1)], 0.5, 2.0),
    wire.Dispatch(
        "r2",
        8,
        num_tokens=6,
        tokens=b"",
        slot=0,
        generation=0,
        ranks=[
            wire.RankSpans(rank, [wire.Span(0, 0, wire.pack_pages([5, 9])), wire.Span(1, 0, wire.pack_pages([rank]))])
            for rank in (0, 1)
        ],
        context_slot=4,
        expected_rows=2 * (5 * 2 + 2 + 3),
        time_allowed_s=30.0,
    ),
    wire.Rotate([wire.RankFabric(rank, shard(rank, first_beat_slot=4).endpoints) for rank in (0, 1)]),
    wire.Failed("r2", 8, Reason.rank_lost, "rank 1 has died", 0, 30),
]

_SMALL_GROUP = group(num_heads=1, num_planes=1, num_layers=1)
_SMALL_ENDPOINT = msgspec.structs.replace(ENDPOINT, regions=[REGION])
SMALL: list[wire.Message] = [
    *(message for message in MESSAGES if not isinstance(message, wire.Attach | wire.Dispatch)),
    wire.Attach([wire.RankAttach(0, [_SMALL_GROUP], [960], [_SMALL_ENDPOINT])], 0.5, 2.0),
    wire.Attach([wire.RankAttach(0, [], [960], [_SMALL_ENDPOINT], [context(region=0)])], 0.5, 2.0),
    msgspec.structs.replace(next(m for m in MESSAGES if isinstance(m, wire.Dispatch)), num_tokens=1, tokens=b""),
]
"""Short ones that hold every field, and an item of every list."""
