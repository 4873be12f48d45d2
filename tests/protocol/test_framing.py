"""Frames: any splitting, any garbage, bounded memory."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmsgr_protocol import Accept, BadFrame, FrameReader, FrameTooLarge, WireError, encode
from tests.protocol.samples import MESSAGES

STREAM = b"".join(map(encode, MESSAGES))


def test_a_frame_is_its_length_and_a_map() -> None:
    body = b"\x83\xa1t\xa6accept\xaarequest_id\xa1r\xa7attempt\x01"
    assert encode(Accept("r", 1)) == bytes([0, 0, 0, len(body)]) + body


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_splitting_gives_the_same_messages(cuts: list[int]) -> None:
    reader = FrameReader()
    edges = [0, *sorted(cuts), len(STREAM)]
    messages = [message for lo, hi in pairwise(edges) for message in reader.feed(STREAM[lo:hi])]
    assert messages == MESSAGES


def test_byte_by_byte() -> None:
    reader = FrameReader()
    assert [message for byte in STREAM for message in reader.feed(bytes([byte]))] == MESSAGES


def test_an_announced_length_is_refused_before_the_body_comes() -> None:
    with pytest.raises(FrameTooLarge, match="frame of 101 bytes, at most 100 are allowed") as caught:
        FrameReader(100).feed((101).to_bytes(4, "big"))
    assert (caught.value.num_bytes, caught.value.limit_bytes) == (101, 100)
    assert FrameReader(100).feed((100).to_bytes(4, "big")) == []


def test_an_outgoing_frame_has_the_same_limit() -> None:
    frame = encode(Accept("r", 1))
    assert encode(Accept("r", 1), len(frame) - 4) == frame
    with pytest.raises(FrameTooLarge):
        encode(Accept("r", 1), len(frame) - 5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "frame of 0 bytes"),
        (b"\xc1", "starts c1"),
        (msgspec.msgpack.encode([1, 2]), "Expected `object`"),
        (msgspec.msgpack.encode({"t": "nothing"}), "Invalid value 'nothing'"),
        (msgspec.msgpack.encode({"t": "accept", "attempt": 1}), "missing required field `request_id`"),
        (msgspec.msgpack.encode({"t": "accept", "request_id": "r", "attempt": "1"}), "Expected `int`"),
        (b"\x83\xa1t\xa6accept\xaarequest_id\xa1\xff\xa7attempt\x01", "Invalid UTF-8"),
        (encode(Accept("r", 1))[4:] + b"\x00", "trailing"),
        (b"\x82\xa1t\xa6rotate\xa5ranks\xdd\x7f\xff\xff\xff", "length <= 1024"),  # a list of 2^31 announced
        (b"\x82\xa1t\xa6accept\xa1x" + b"\x91" * 100_000, "recursion"),
    ],
)
def test_a_bad_body_is_refused_with_what_was_seen(body: bytes, message: str) -> None:
    with pytest.raises(BadFrame, match=message):
        FrameReader().feed(len(body).to_bytes(4, "big") + body)


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(body: bytes) -> None:
    with pytest.raises(WireError):
        FrameReader(4096).feed(len(body).to_bytes(4, "big") + body + b"\xff\xff\xff\xff")


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_frame_is_a_message_or_refused(message: object, data: st.DataObject) -> None:
    body = bytearray(encode(message)[4:])  # type: ignore[arg-type]  # sampled_from loses the union
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        (decoded,) = FrameReader().feed(len(body).to_bytes(4, "big") + body)
    except BadFrame:
        return
    assert FrameReader().feed(encode(decoded)) == [decoded]
