"""Frames that no encoder of ours writes: other forms of the same message, and bytes that are no message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.protocol.samples import SMALL
from tools.specification.bounds import plain

pack = msgspec.msgpack.encode

ACCEPT = {"t": "accept", "request_id": "r", "attempt": 1}
BUSY = {"t": "busy", "request_id": "r", "attempt": 1, "reason": "", "retry_after_s": 0.5}
ATTACH, DISPATCH, ROTATE = (
    next(plain(message) for message in SMALL if type(message).__name__ == kind)
    for kind in ("Attach", "Dispatch", "Rotate")
)


@dataclass(frozen=True)
class Form:
    """A body, and what it must be read as.

    Args:
        name: What is special about it.
        body: The frame without its length.
        message: As plain values; None: it is refused.
        refused: Why.
        schema_tells: Whether the JSON Schema refuses what the body holds.
    """

    name: str
    body: bytes
    message: dict[str, Any] | None = None
    refused: str | None = None
    schema_tells: bool = False


def _pairs(*pairs: tuple[bytes, bytes]) -> bytes:
    """A map with few keys, from keys and values that are packed already."""
    return bytes([0x80 | len(pairs)]) + b"".join(key + value for key, value in pairs)


def _accept(*more: tuple[bytes, bytes], t: bytes = pack("accept"), rid: bytes = pack("r"), n: bytes = pack(1)) -> bytes:
    return _pairs((pack("t"), t), (pack("request_id"), rid), (pack("attempt"), n), *more)


def accepted() -> Iterator[Form]:
    """What must be read like the usual form."""
    yield Form("the tag comes last", _pairs(*((pack(k), pack(v)) for k, v in reversed(ACCEPT.items()))), ACCEPT)
    for name, number in {
        "8 bits": b"\xcc\x01",
        "16 bits": b"\xcd\0\x01",
        "32 bits": b"\xce\0\0\0\x01",
        "64 bits": b"\xcf" + bytes(7) + b"\x01",
        "8 bits, signed": b"\xd0\x01",
        "16 bits, signed": b"\xd1\0\x01",
        "32 bits, signed": b"\xd2\0\0\0\x01",
        "64 bits, signed": b"\xd3" + bytes(7) + b"\x01",
    }.items():
        yield Form(f"an integer of {name}", _accept(n=number), ACCEPT)
    yield Form("a text with a length of 8 bits", _accept(rid=b"\xd9\x01r"), ACCEPT)
    yield Form("a text with a length of 16 bits", _accept(rid=b"\xda\0\x01r"), ACCEPT)
    yield Form("a text with a length of 32 bits", _accept(rid=b"\xdb\0\0\0\x01r"), ACCEPT)
    yield Form("a map with a length of 16 bits", b"\xde\0\x03" + _accept()[1:], ACCEPT)
    yield Form("a map with a length of 32 bits", b"\xdf\0\0\0\x03" + _accept()[1:], ACCEPT)
    yield Form("bytes with a length of 16 bits", _dispatch(b"\xc5\0\x01x"), DISPATCH | {"payload": b"x"})
    yield Form("bytes with a length of 32 bits", _dispatch(b"\xc6\0\0\0\x01x"), DISPATCH | {"payload": b"x"})
    rotated = {"t": "rotated", "posted": []}
    yield Form("an array with a length of 16 bits", _rotated(b"\xdc\0\0"), rotated)
    yield Form("an array with a length of 32 bits", _rotated(b"\xdd\0\0\0\0"), rotated)
    yield Form("seconds as a float of 32 bits", pack(BUSY)[:-9] + b"\xca\x3f\0\0\0", BUSY)
    yield Form("seconds as an integer", pack(BUSY | {"retry_after_s": 1}), BUSY | {"retry_after_s": 1.0})
    for name, value in {
        "nil": b"\xc0",
        "a boolean": b"\xc3",
        "a negative integer": b"\xff",
        "a float": b"\xca\0\0\0\0",
        "a text": b"\xa1x",
        "bytes": b"\xc4\x01x",
        "an array": b"\x92\x01\x90",
        "a map with a key that is no text": b"\x81\x01\x02",
        "an extension": b"\xd4\x01\0",
        "a timestamp": b"\xd6\xff\0\0\0\0",
        "40 arrays in each other": b"\x91" * 39 + b"\x90",
    }.items():
        yield Form(f"an unknown key holds {name}", _accept((pack("later"), value)), ACCEPT)
    inner = {"t": "rotated", "posted": [{"slot": 1, "generation": 2, "rows": 3}]}
    yield Form("an unknown key further inside", pack({**inner, "posted": [{**inner["posted"][0], "later": []}]}), inner)  # type: ignore[dict-item]  # a list of maps


def _dispatch(payload: bytes) -> bytes:
    marked = pack(DISPATCH | {"payload": b"MARK"})
    return marked.replace(pack(b"MARK"), payload)


def _rotated(posted: bytes) -> bytes:
    return _pairs((pack("t"), pack("rotated")), (pack("posted"), posted))


def refused() -> Iterator[Form]:
    """What is no message."""

    def bad(name: str, body: bytes, why: str, schema_tells: bool = False) -> Form:
        return Form(name, body, None, why, schema_tells)

    yield bad("an empty body", b"", "there is no value")
    yield bad("a byte that msgpack never uses", b"\xc1", "c1 is reserved")
    yield bad("a body that is nil", pack(None), "a map is needed", True)
    yield bad("a body that is an array", pack(["accept", "r", 1]), "a map is needed", True)
    yield bad("an empty map", pack({}), 'there is no "t"', True)
    yield bad("a message without its tag", pack({"request_id": "r", "attempt": 1}), 'there is no "t"', True)
    yield bad("an unknown tag", pack(ACCEPT | {"t": "applaud"}), "there is no such message", True)
    yield bad("a tag in capitals", pack(ACCEPT | {"t": "Accept"}), "there is no such message", True)
    yield bad("a tag that is a number", pack(ACCEPT | {"t": 1}), "a tag is a text", True)
    yield bad("a tag that is bytes", pack(ACCEPT | {"t": b"accept"}), "a tag is a text")
    yield bad("a key that is no text", _accept((b"\x05", b"\xa0")), "keys are texts")
    yield bad("a key that is bytes", _accept((b"\xc4\x01x", b"\xa0")), "keys are texts")
    yield bad("a text that is not UTF-8", _accept(rid=b"\xa1\xff"), "texts are UTF-8")
    yield bad("a text with half a surrogate pair", _accept(rid=b"\xa3\xed\xa0\x80"), "texts are UTF-8")
    yield bad("an extension in the place of a number", _accept(n=b"\xd4\x01\0"), "an integer is needed")
    yield bad("a negative integer of 64 bits", _accept(n=b"\xd3" + b"\xff" * 8), "least is 0", True)
    yield bad("a byte after the message", pack(ACCEPT) + b"\0", "a frame holds one message")
    yield bad("two messages in one frame", pack(ACCEPT) * 2, "a frame holds one message")
    yield bad("a body that ends too early", pack(ACCEPT)[:-1], "the last value is missing")
    yield bad("a text longer than the body", _accept(rid=b"\xdb\xff\xff\xff\xffr"), "the body ends before the text")
    ranks = _pairs((pack("t"), pack("rotate")), (pack("ranks"), b"\xdd\x7f\xff\xff\xff"))
    yield bad("an array of 2147483647 items announced", ranks, "most is 1024, and the body ends before them")
    yield bad("100000 arrays in each other", _accept((pack("later"), b"\x91" * 100_000)), "too deep, and not whole")
    yield bad("a request of two tokens with one", pack(_with(num_tokens=2, tokens=bytes(4))), "tokens are all or none")
    span = {"group": 0, "first_token": 0, "pages": bytes(6)}
    spans = _with(ranks=[{"rank": 0, "spans": [span]}])
    yield bad("a page index of two bytes", pack(spans), "pages are whole")
    yield bad("a rank dispatched twice", pack(_with(ranks=[{"rank": 1, "spans": []}] * 2)), "ranks are named once")
    yield bad("a rank rotated twice", pack({**ROTATE, "ranks": ROTATE["ranks"] * 2}), "ranks are named once")
    yield bad("a rank attached twice", pack({**ATTACH, "ranks": ATTACH["ranks"] * 2}), "ranks are named once")
    (rank,) = ATTACH["ranks"]
    (endpoint,), (group,) = rank["endpoints"], rank["groups"]
    for name, num_regions in (("fewer", 0), ("more", 2)):
        keys = {**endpoint, "regions": endpoint["regions"] * num_regions}
        body = pack(_attach(rank, endpoints=[endpoint, keys]))
        yield bad(f"an endpoint with {name} regions than its rank", body, "an endpoint has each region of its rank")
    for what in ("region", "plane"):
        body = pack(_attach(rank, groups=[{**group, "entries": [{**group["entries"][0], what: 1}]}]))
        yield bad(f"an entry in a {what} that is not there", body, f"there is one {what}")
    body = pack(_attach(rank, groups=[{**group, "recurrent": True, "page_tokens": 16}]))
    yield bad("a recurrent group with pages of 16 tokens", body, "a page of a recurrent group has one")


def _attach(rank: dict[str, Any], **changes: object) -> dict[str, object]:
    return {**ATTACH, "ranks": [{**rank, **changes}]}


def _with(**changes: object) -> dict[str, object]:
    return {**DISPATCH, **changes}
