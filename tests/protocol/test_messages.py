"""Messages: round trips, bounds, and fields that contradict each other."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

import kvmsgr_protocol as wire
from kvmsgr_protocol import BadFrame, FrameReader, Reason, encode
from tests.protocol.samples import ENDPOINT, MESSAGES, REGION, context, endpoint, group, shard, state

INCARNATION = "0" * 32
IDENTITY = wire.Identity("m", ["decoder"])
BAD_KEY = msgspec.structs.replace(REGION, key=-1)


def dispatch(**changes: object) -> wire.Dispatch:
    sample = next(message for message in MESSAGES if isinstance(message, wire.Dispatch))
    return msgspec.structs.replace(sample, **changes)


def test_the_samples_are_complete() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(wire.Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: wire.Message) -> None:
    assert FrameReader().feed(encode(message)) == [message]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_frozen_and_tagged(message: wire.Message) -> None:
    assert msgspec.msgpack.decode(encode(message)[4:])["t"] == type(message).__name__.lower()
    assert message.__struct_config__.frozen


def test_unknown_fields_are_skipped() -> None:
    body = msgspec.msgpack.encode({"t": "accept", "request_id": "r", "attempt": 1, "later": [{"x": 1}]})
    assert FrameReader().feed(len(body).to_bytes(4, "big") + body) == [wire.Accept("r", 1)]


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (wire.Accept("", 1), "request_id"),
        (wire.Accept("r" * 257, 1), "request_id"),
        (wire.Accept("r", -1), "attempt"),
        (wire.Accept("r", 2**63), "attempt"),
        (wire.Accept("r", 2**64), "cannot be written"),
        (wire.Accept("\ud800", 1), "cannot be written"),
        (wire.Busy("r", 1, "", -0.5), "retry_after_s"),
        (wire.Hello((1, 1), [], "0" * 31, "", "", IDENTITY), "incarnation"),
        (wire.Hello((1, 1), [], "G" * 32, "", "", IDENTITY), "incarnation"),
        (wire.Hello((1, 1), [], INCARNATION + "\n", "", "", IDENTITY), "incarnation"),
        (wire.Hello((1, 1), [""], INCARNATION, "", "", IDENTITY), "capabilities"),
        (wire.Hello((-1, 1), [], INCARNATION, "", "", IDENTITY), "versions"),
        (wire.Attach([], 0.5, 2.0), "ranks"),
        (wire.Attach([wire.RankAttach(0, [], [], [])], 0.5, 2.0), "endpoints"),
        (wire.Rotate([wire.RankFabric(0, [])]), "endpoints"),
        (wire.Rotate([wire.RankFabric(0, [msgspec.structs.replace(ENDPOINT, window=0)])]), "window"),
        (wire.Rotate([wire.RankFabric(0, [msgspec.structs.replace(ENDPOINT, regions=[BAD_KEY])])]), "key"),
        (dispatch(slot=16384), "slot"),
        (dispatch(generation=16), "generation"),
        (dispatch(context_slot=-2), "context_slot"),
        (dispatch(time_allowed_s=float("inf")), "time_allowed_s"),
        (dispatch(time_allowed_s=float("nan")), "time_allowed_s"),
        (dispatch(payload=bytes(wire.MAX_PAYLOAD_BYTES + 1)), "payload"),
        (dispatch(trace={"k": "v" * 2000}), "trace"),
    ],
)
def test_a_value_out_of_bounds_is_found_before_it_travels(message: wire.Message, where: str) -> None:
    with pytest.raises(BadFrame, match=where):
        encode(message)


def test_the_largest_payload_travels() -> None:
    message = dispatch(payload=bytes(wire.MAX_PAYLOAD_BYTES))
    assert FrameReader().feed(encode(message)) == [message]


def test_tokens_are_all_or_none() -> None:
    assert dispatch(tokens=b"", num_tokens=9).tokens == b""
    with pytest.raises(ValueError, match="tokens has 12 bytes, needed are 0 or 16 for 4 tokens"):
        dispatch(num_tokens=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda numbers: dispatch(ranks=[wire.RankSpans(rank, []) for rank in numbers]),
        lambda numbers: wire.Attach([wire.RankAttach(rank, [], [], []) for rank in numbers], 0.5, 2.0),
        lambda numbers: wire.Rotate([wire.RankFabric(rank, []) for rank in numbers]),
    ],
)
def test_a_rank_is_named_once(make) -> None:  # type: ignore[no-untyped-def]  # a table of lambdas
    assert [each.rank for each in make([1, 0, 2]).ranks] == [1, 0, 2]
    with pytest.raises(ValueError, match=r"a rank is named twice in \[0, 1, 0\]"):
        make([0, 1, 0])


def test_pages_are_whole() -> None:
    with pytest.raises(ValueError, match="pages has 5 bytes"):
        wire.Span(0, 0, b"12345")


def test_contradicting_fields_are_found_on_arrival() -> None:
    body = msgspec.msgpack.encode({"rank": 0, "spans": [{"group": 0, "first_token": 0, "pages": b"123"}]})
    with pytest.raises(msgspec.ValidationError, match="pages has 3 bytes"):
        msgspec.msgpack.decode(body, type=wire.RankSpans)


def test_groups_hold_their_heads_and_every_plane_of_every_layer() -> None:
    layout = group()
    with pytest.raises(ValueError, match=r"heads 1\.\.2 of a total of 2"):
        msgspec.structs.replace(layout, head_start=1)
    for entries in (layout.entries[:-1], [*layout.entries, layout.entries[0]], [wire.LayerEntry(0, 2, 0, 0, 1)]):
        with pytest.raises(ValueError, match="each layer needs one entry for each of 2 planes"):
            msgspec.structs.replace(layout, entries=entries)


def test_a_rank_names_regions_it_has() -> None:
    one = [endpoint(b"", 1, 0)]
    assert wire.RankAttach(0, [], [960], one).context == []
    with pytest.raises(ValueError, match="rank 3: region 1 is named, there are 1"):
        wire.RankAttach(3, [group()], [960], one, [context()])
    with pytest.raises(ValueError, match="rank 3: region 1 is named, there are 1"):
        wire.RankAttach(3, [group(), state()], [960], one)


@pytest.mark.parametrize("num_regions", [0, 2, 4])
def test_each_endpoint_offers_each_region(num_regions: int) -> None:
    rank = shard(1)
    endpoints = [*rank.endpoints, endpoint(b"third", num_regions, 9)]
    with pytest.raises(ValueError, match=f"rank 1: an endpoint has {num_regions} of 3 regions"):
        msgspec.structs.replace(rank, endpoints=endpoints)


def test_a_page_of_a_recurrent_group_has_one_token() -> None:
    assert state().page_tokens == 1
    with pytest.raises(ValueError, match="group 'kv': recurrent, with pages of 4 tokens; they have one"):
        msgspec.structs.replace(group(), recurrent=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda text: wire.Busy("r", 1, text),
        lambda text: wire.Refuse("r", 1, Reason.refused, text),
        lambda text: wire.Failed("r", 1, Reason.fabric, text, 0, 1),
        lambda text: wire.Goodbye(Reason.protocol, text),
    ],
)
def test_a_long_reason_is_cut_and_still_travels(make) -> None:  # type: ignore[no-untyped-def]  # a table of lambdas
    assert make("x" * 4096).reason == "x" * 4096
    message = make("x" * 4097)
    assert message.reason == "x" * 4093 + "..."
    assert FrameReader().feed(encode(message)) == [message]
