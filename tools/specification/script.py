"""What dialogues are written in: their steps, who holds which part of the cache, and messages that fit it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

import kvmsgr_protocol as wire
from kvmsgr_protocol import Reason
from kvmsgr_protocol.answer import to_json
from tests.protocol.samples import endpoint, group

Step = dict[str, Any]

LAYERS, HEADS, PAGES, PAGE_TOKENS = 3, 2, 12, 4
Part = tuple[range, range]
"""Layers and heads that a rank holds."""
ALL = (range(LAYERS), range(HEADS))
HALVES = [(range(LAYERS), range(head, head + 1)) for head in range(HEADS)]


@dataclass(frozen=True)
class Cluster:
    """Who holds what: of each messenger, the part of each rank."""

    about: str
    prefillers: list[list[Part]]
    decoder: list[Part]


CLUSTERS = {
    "one rank": Cluster("one rank on each side, with all layers and heads", [[ALL]], [ALL]),
    "two ranks": Cluster("two ranks on each side: rank 0 holds head 0, rank 1 head 1", [HALVES], HALVES),
    "two stages": Cluster(
        "two prefillers: the first holds layers 0 and 1; the second, which leaves requests unanswered, layer 2. The "
        "decoder has one rank with all, and fetches from both. The dialogue is the one with the first",
        [[(range(2), range(HEADS))], [(range(2, LAYERS), range(HEADS))]],
        [ALL],
    ),
}

NUM_TOKENS, NUM_ROWS = 7, 6 * HEADS * LAYERS * 2
PROVIDER, ADDRESS = "net", struct.pack("<H", 2) + struct.pack(">H", 9) + bytes([127, 0, 0, 1]) + bytes(8)
HELLO = wire.Hello(
    wire.PROTOCOL_VERSIONS, [], "ab" * 16, "vectors", "vectors", wire.Identity("test", ["prefiller", "decoder"])
)
SPAN = wire.Span(0, 0, wire.pack_pages([3, 5]))
LEG = ("r", 1001)
NAMED = {"request_id": "r", "attempt": 1001}


def send(message: wire.Message) -> Step:
    return {"send": to_json(message)}


def expect(t: str, **fields: object) -> Step:
    return {"expect": {"t": t, **fields}}


def may(t: str) -> Step:
    return {"may": {"t": t}}


def failed(code: str) -> Step:
    return {"engine": "has failed", "code": code}


def on(*ranks: int, span: wire.Span = SPAN) -> list[wire.RankSpans]:
    """The same pages on each of the ranks."""
    return [wire.RankSpans(rank, [span]) for rank in ranks]


def dispatch(**changes: Any) -> Step:
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1001,
        "num_tokens": NUM_TOKENS,
        "tokens": b"",
        "slot": 16000,
        "generation": 3,
        "ranks": on(0),
        "context_slot": -1,
        "expected_rows": NUM_ROWS,
        "time_allowed_s": 60.0,
    }
    return send(wire.Dispatch(**(fields | changes)))


def part(layers: range, heads: range) -> wire.GroupLayout:
    """What a rank holds of the group."""
    layout = group(num_heads=len(heads), num_layers=layers.stop)
    entries = [entry for entry in layout.entries if entry.layer in layers]
    return replace(layout, entries=entries, head_start=heads.start, total_heads=HEADS)


def nic(beat_slot: int) -> wire.Endpoint:
    """One that nobody listens at, with one region."""
    return replace(endpoint(ADDRESS, 1, beat_slot), provider=PROVIDER)


def attach(*groups: wire.GroupLayout, region_bytes: int = 1 << 20) -> wire.Attach:
    """A rank with one network interface for each of the groups."""
    ranks = [wire.RankAttach(rank, [layout], [region_bytes], [nic(rank)]) for rank, layout in enumerate(groups)]
    return wire.Attach(ranks, 0.5, 2.0)


CANCEL = send(wire.Cancel(*LEG, Reason.cancelled, "the client left"))
CLOSED = {"closed": True}
GREET = [expect("hello"), send(HELLO)]
FETCH = {"engine": "fetch", "request_id": "r", "num_tokens": NUM_TOKENS, "pages": [3, 5]}
HELD, FREE = {"engine": "pages are held"}, {"engine": "pages are free"}
BROKEN = [expect("goodbye", code="protocol"), CLOSED]
ACCEPTED = [{"engine": "accept", "request_id": "r"}, expect("accept", **NAMED)]
DRAINED = expect("drained", **NAMED, rows_posted=0)
