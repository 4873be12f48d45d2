"""The test vectors: what is sent, and what must come of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from kvmsgr_protocol import DEFAULT_MAX_FRAME_BYTES as MAX_FRAME_BYTES
from kvmsgr_protocol import BadFrame, FrameReader, VersionMismatch, encode, immediate, negotiate
from kvmsgr_protocol.answer import answer, to_json
from tests.protocol.samples import MESSAGES
from tools.specification import bounds, forms
from tools.specification.facts import FACTS

Vector = dict[str, Any]
_REPEAT = re.compile(rb"(.{1,600}?)\1{15,}", re.DOTALL)


def pieces(data: bytes) -> str | list[str | list[Any]]:
    """Bytes as hex; what repeats many times as [hex, times]."""
    parts: list[str | list[Any]] = []
    end = 0
    for match in _REPEAT.finditer(data):
        if match.start() > end:
            parts.append(data[end : match.start()].hex())
        parts.append([match[1].hex(), len(match[0]) // len(match[1])])
        end = match.end()
    if not parts:
        return data.hex()
    return [*parts, data[end:].hex()] if end < len(data) else parts


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def _accepted(name: str, body: bytes, message: object | None = None, ours: bool = True) -> Vector:
    """A vector of a message.

    Args:
        name: What it is about.
        body: As it travels.
        message: What it must be read as; None: what it says.
        ours: Whether a writer of the shortest forms writes these bytes.
    """
    (read,) = FrameReader().feed(_frame(body))
    if message is not None and bounds.plain(read) != message:
        raise ValueError(f"{name}: read as {read}, expected is {message}")
    vector = {"name": name, "direction": FACTS[type(read)].sender, "frame": pieces(_frame(body))}
    if isinstance(vector["frame"], str):
        vector["message"] = to_json(read)
    return vector if ours else vector | {"shortest": False}


def _refused(name: str, body: bytes, why: str, schema_tells: bool) -> Vector:
    try:
        read = FrameReader().feed(_frame(body))
    except BadFrame:
        vector = {"name": name, "frame": pieces(_frame(body)), "error": "bad_frame", "why": why}
        return vector if schema_tells else vector | {"schema_tells": False}
    raise ValueError(f"{name}: {read} is no message ({why}), and yet it was read")


def messages() -> Iterator[Vector]:
    """What must be read."""
    for index, message in enumerate(MESSAGES):
        yield _accepted(f"sample {index}: {type(message).__name__}", encode(message)[4:], bounds.plain(message))
    for case in bounds.cases():
        if case.refused is None:
            yield _accepted(case.name, msgspec.msgpack.encode(case.value), ours=True)
    for form in forms.accepted():
        yield _accepted(form.name, form.body, form.message, ours=False)


def refused() -> Iterator[Vector]:
    """What must not be read."""
    for case in bounds.cases():
        if case.refused is not None:
            yield _refused(case.name, msgspec.msgpack.encode(case.value), case.refused, case.schema_tells)
    for form in forms.refused():
        assert form.refused is not None
        yield _refused(form.name, form.body, form.refused, form.schema_tells)


def streams() -> Iterator[Vector]:
    """Frames one after the other, whole and not."""

    def stream(name: str, data: bytes, num_messages: int) -> Vector:
        read = FrameReader().feed(data)
        assert len(read) == num_messages, name
        return {"name": name, "stream": pieces(data), "messages": to_json(read)}

    whole = b"".join(map(encode, MESSAGES))
    accept = _frame(msgspec.msgpack.encode(forms.ACCEPT))
    yield stream("nothing", b"", 0)
    yield stream("every message in one read", whole, len(MESSAGES))
    yield stream("a message and a half", accept + accept[: len(accept) // 2], 1)
    for num_bytes in (1, 2, 3, 4, 5, len(accept) - 1):
        yield stream(f"{num_bytes} of the {len(accept)} bytes of a frame", accept[:num_bytes], 0)
    yield stream("the header of the largest frame", MAX_FRAME_BYTES.to_bytes(4, "big"), 0)
    for num_bytes in (MAX_FRAME_BYTES + 1, 0x7FFFFFFF, 0xFFFFFFFF):
        header = num_bytes.to_bytes(4, "big").hex()
        yield {"name": f"the header of a frame of {num_bytes} bytes", "stream": header, "error": "too_large"}


def immediates() -> Iterator[Vector]:
    """Immediates packed and taken apart, and what cannot be packed."""
    last_slot, last_generation = immediate.NUM_SLOTS - 1, immediate.NUM_GENERATIONS - 1
    for parts in [
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 1),
        (0, 0, 2),
        (2, 3, 5),
        (last_slot, 0, 1),
        (0, last_generation, 1),
        (0, 0, immediate.MAX_ROWS),
        (last_slot, last_generation, immediate.MAX_ROWS),
        (0x1234, 0x5, 0x2345),
    ]:
        yield {"parts": parts, "immediate": immediate.pack(*parts)}
    for parts in [(-1, 0, 1), (last_slot + 1, 0, 1), (0, -1, 1), (0, last_generation + 1, 1), (0, 0, 0), (0, 0, 16385)]:
        yield {"parts": parts, "error": "out_of_range"}
    for number in (-1, 1 << 32):
        yield {"immediate": number, "error": "out_of_range"}


def _span(group: int, first_token: int, num_pages: int) -> dict[str, Any]:
    return {
        "group": group,
        "first_token": first_token,
        "pages": b"".join(page.to_bytes(4, "little") for page in range(num_pages)).hex(),
    }


_ALL = {"head_start": 0, "num_heads": 2, "layers": [0, 1, 2]}
_KV = {"page_tokens": 4, "num_planes": 2, **_ALL}
_LATENT = {"page_tokens": 8, "num_planes": 1, "head_start": 0, "num_heads": 1, "layers": [0, 1, 2, 3, 4]}
_STATE = {"page_tokens": 1, "num_planes": 2, "head_start": 4, "num_heads": 4, "layers": [3, 7], "recurrent": True}


def _shard(head_start: int, num_heads: int, *layers: int) -> dict[str, Any]:
    return {"head_start": head_start, "num_heads": num_heads, "layers": list(layers)}


def rows() -> Iterator[Vector]:
    """How many rows a destination rank receives."""

    def rows_of(
        name: str, expected: int | None, num_tokens: int, spans: Any, groups: Any = (_KV,), context: Any = ()
    ) -> Vector:
        facts = {"num_tokens": num_tokens, "spans": spans, "groups": list(groups), "context": list(context)}
        got = answer({"rows": facts})
        wanted = {"error": "out_of_range"} if expected is None else {"rows": expected}
        assert wanted.items() <= got.items(), (name, got)
        return {"name": name, "facts": facts} | wanted

    yield rows_of("one page, all but the last position", 3 * 12, 4, [_span(0, 0, 1)])
    yield rows_of("the last position alone on its page", 4 * 12, 5, [_span(0, 0, 2)])
    yield rows_of("the last position on the page before", 4 * 12, 5, [_span(0, 0, 1)])
    yield rows_of("more pages than the prompt needs", 4 * 12, 5, [_span(0, 0, 9)])
    yield rows_of("fewer pages than the prompt needs", 8 * 12, 99, [_span(0, 0, 2)])
    yield rows_of("a prefix is there already, in whole pages", 6 * 12, 11, [_span(0, 4, 2)])
    yield rows_of("a span that begins inside a page", 2 * 12, 9, [_span(0, 6, 1)])
    yield rows_of("a span that begins inside a page and goes on", 6 * 12, 99, [_span(0, 6, 2)])
    yield rows_of("a span without pages", 0, 9, [_span(0, 6, 0)])
    yield rows_of("two spans with a gap", 8 * 12, 99, [_span(0, 0, 1), _span(0, 8, 1)])
    yield rows_of("two spans in the other order", 8 * 12, 99, [_span(0, 8, 1), _span(0, 0, 1)])
    yield rows_of("a span behind the prompt", 0, 9, [_span(0, 12, 1)])
    yield rows_of("spans that overlap behind the prompt", 4 * 12, 5, [_span(0, 4, 1), _span(0, 0, 2)])
    yield rows_of("two groups", 10 * 12 + 2 * 5, 11, [_span(0, 0, 3), _span(1, 8, 1)], [_KV, _LATENT])
    yield rows_of("with context", 10 * 12 + 5, 11, [_span(0, 0, 3)], context=[3, 2])
    yield rows_of("a full prefix hit with context", 3, 100, [], context=[3])
    yield rows_of("a full prefix hit that leaves the last token", 0, 100, [_span(0, 99, 1)])
    yield rows_of("a prompt of one token", 0, 1, [_span(0, 0, 1)], context=[3])
    yield rows_of("a prompt of two tokens", 12, 2, [_span(0, 0, 1)])
    yield rows_of("nothing is wanted", 0, 100, [])
    yield rows_of("a long prompt", 4095 * 12, 4096, [_span(0, 0, 1024)])
    yield from _rows_of_legs(rows_of)
    yield from _rows_of_states(rows_of)
    yield rows_of("spans that overlap", None, 100, [_span(0, 4, 1), _span(0, 0, 2)])
    yield rows_of("a group that does not exist", None, 9, [_span(1, 0, 1)])
    yield rows_of("no prompt", None, 0, [])


def _rows_of_legs(rows_of: Callable[..., Vector]) -> Iterator[Vector]:
    """10 positions of a group of 2 heads, 3 layers and 2 planes, from prefillers that hold some of that."""

    def leg(name: str, a_position: int, *sources: dict[str, Any], **changes: object) -> Vector:
        group = {**_KV, **changes, "sources": sources}
        return rows_of(f"a leg: {name}", 10 * a_position, 11, [_span(0, 0, 3)], [group])

    yield leg("one rank that holds the same", 12, _ALL)
    yield leg("one rank that holds more", 12, _shard(0, 8, *range(9)))
    yield leg("one head of two", 6, _shard(1, 1, 0, 1, 2))
    yield leg("two ranks with a head each", 12, _shard(0, 1, 0, 1, 2), _shard(1, 1, 0, 1, 2))
    yield leg("two copies count once", 12, _ALL, _ALL)
    yield leg("copies of one head count once", 6, *[_shard(0, 1, 0, 1, 2)] * 4)
    yield leg("one layer of three", 4, _shard(0, 2, 1))
    yield leg("stages of one and two layers", 12, _shard(0, 2, 0), _shard(0, 2, 1, 2))
    yield leg("a stage that holds other layers too", 8, _shard(0, 2, 1, 2, 3, 4))
    yield leg("a layer and a head of it", 2, _shard(1, 7, 2, 3))
    yield leg("other layers", 0, _shard(0, 2, 3, 4))
    yield leg("other heads", 0, _shard(2, 2, 0, 1, 2))
    yield leg("the heads just before and behind", 0, _shard(4, 1, 0), _shard(7, 1, 0), head_start=5, num_heads=2)
    yield leg("one of the heads in the middle", 2, _shard(6, 1, 0), head_start=5, num_heads=2)
    yield leg("nobody", 0)
    four = [_shard(head, 1, *layers) for head in (0, 1) for layers in ((0,), (1, 2))]
    yield leg("layers of two stages, a head of each of two ranks", 12, *four)
    two = [{**_KV, "sources": [_shard(0, 1, 0, 1, 2)]}, {**_LATENT, "sources": [_shard(0, 1, 3, 4)]}]
    spans = [_span(0, 0, 3), _span(1, 8, 1)]
    yield rows_of("a leg: of two groups", 10 * 6 + 2 * 2, 11, spans, two)
    yield rows_of("a leg: with context", 10 * 6 + 2 * 2 + 3, 11, spans, two, [3])


def _rows_of_states(rows_of: Callable[..., Vector]) -> Iterator[Vector]:
    """A recurrent group of 4 heads, 2 layers and 2 planes."""

    def state(name: str, expected: int | None, num_tokens: int, *spans: Any, sources: Any = None) -> Vector:
        group = _STATE if sources is None else {**_STATE, "sources": sources}
        return rows_of(f"a recurrent group: {name}", expected, num_tokens, spans, [group])

    page = _span(0, 0, 1)
    yield state("one page", 16, 99, page)
    yield state("a prompt of two tokens", 16, 2, page)
    yield state("a prompt of one token", 0, 1, page)
    yield state("none wanted", 0, 99)
    yield state("a span without pages", 0, 99, _span(0, 0, 0))
    yield state("a leg with one head and one layer of it", 2, 99, page, sources=[_shard(7, 9, 7, 11)])
    yield state("two pages", None, 99, _span(0, 0, 2))
    yield state("a page in each of two spans", None, 99, page, page)
    yield state("a page from a later position", None, 99, _span(0, 98, 1))
    yield rows_of("a recurrent group beside another", 10 * 12 + 16, 11, [_span(0, 0, 3), _span(1, 0, 1)], [_KV, _STATE])


def versions() -> Iterator[Vector]:
    """Which version two sides speak."""
    for ours, theirs, version in [
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 5), 3),
        ((2, 5), (1, 3), 3),
        ((1, 9), (4, 4), 4),
        ((0, 0), (0, 2**31 - 1), 0),
    ]:
        assert negotiate(ours, theirs) == version
        yield {"ours": ours, "theirs": theirs, "version": version}
    for ours, theirs in [((1, 1), (2, 3)), ((2, 3), (1, 1)), ((1, 4), (3, 2)), ((1, 1), (0, 0))]:
        try:
            negotiate(ours, theirs)
        except VersionMismatch:
            yield {"ours": ours, "theirs": theirs, "error": "version_mismatch"}


def render(about: str, vectors: Iterable[Vector]) -> str:
    """One vector a line."""
    lines = ",\n".join(json.dumps(vector) for vector in vectors)
    return f'{{"about": {json.dumps(about)}, "vectors": [\n{lines}\n]}}\n'
