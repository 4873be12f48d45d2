"""Every field of every message at its bounds and beyond them: walked from the types, judged by the rules of the types.

Whether a value is inside or outside follows from the declared bounds; then the code must agree. Values that the bounds
allow and a rule between fields forbids are listed in `FORBIDDEN`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import msgspec
from msgspec import inspect

from kvmsgr_protocol import Message
from kvmsgr_protocol.bounds import MAX_TOKENS
from kvmsgr_protocol.schema import MAX_INT, MIN_INT, integer_bounds
from tests.protocol.samples import SMALL

Json = Any

FORBIDDEN: Final = {
    ("GroupLayout.head_start", "most"): "there are fewer heads in all",
    ("GroupLayout.entries", "most"): "a plane of a layer is named twice",
    ("LayerEntry.plane", "most"): "there is no such plane",
    ("LayerEntry.region", "most"): "there is no such region",
    ("ContextLayout.region", "most"): "there is no such region",
    ("RankAttach.region_bytes", "least"): "regions are named that are not there",
    ("Attach.ranks", "most"): "a rank is named twice",
    ("Dispatch.ranks", "most"): "a rank is named twice",
    ("Rotate.ranks", "most"): "a rank is named twice",
}
"""Field and bound: why the value is refused all the same."""


@dataclass(frozen=True)
class Case:
    """A message with one field changed.

    Args:
        name: Message, field and what is special about it.
        value: The message as plain values.
        refused: Why it must be refused; None: it is a message.
        schema_tells: Whether the JSON Schema can see that.
    """

    name: str
    value: dict[str, Json]
    refused: str | None = None
    schema_tells: bool = True


@dataclass(frozen=True)
class _Probe:
    what: str
    value: Json
    refused: str | None = None
    schema_tells: bool = True


@dataclass(frozen=True)
class _Field:
    """One field, with the shortest message that holds it."""

    owner: str
    kind: inspect.Field
    host: dict[str, Json]
    path: tuple[str | int, ...]

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.kind.encode_name}"

    def with_value(self, value: Json) -> dict[str, Json]:
        changed, holder = self._copy()
        holder[self.path[-1]] = value
        _fit(self.name, value, holder)
        return changed

    def without(self) -> dict[str, Json]:
        changed, holder = self._copy()
        del holder[self.path[-1]]
        return changed

    @property
    def value(self) -> Json:
        return self._copy()[1][self.path[-1]]

    def _copy(self) -> tuple[dict[str, Json], Json]:
        changed = copy.deepcopy(self.host)
        holder: Json = changed
        for step in self.path[:-1]:
            holder = holder[step]
        return changed, holder


def _fit(name: str, value: Json, holder: dict[str, Json]) -> None:
    """Change what must go with a field, so that only its own bounds speak."""
    match name, value:
        case "Dispatch.tokens", bytes() if len(value) == 4 * MAX_TOKENS:
            holder["num_tokens"] = MAX_TOKENS
        case "GroupLayout.num_heads", int() if value > 1:
            holder["total_heads"] = value
        case "GroupLayout.planes", [dict(), *_]:
            holder["entries"] = [holder["entries"][0] | {"plane": plane} for plane in range(len(value))]
        case "GroupLayout.recurrent", True:
            holder["page_tokens"] = 1
        case "RankAttach.region_bytes", [int(), *_]:
            for endpoint in holder["endpoints"]:
                endpoint["regions"] = endpoint["regions"][:1] * len(value)


def plain(message: Message) -> dict[str, Json]:
    """A message as plain values, bytes as bytes."""
    value: dict[str, Json] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return value


def _walk(kind: inspect.Type, value: Json, host: dict[str, Json], path: tuple[str | int, ...]) -> Iterator[_Field]:
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                inner = (*path, field.encode_name)
                if isinstance(field.type, inspect.ListType) and not value[field.encode_name]:
                    continue  # another message has an item of it
                yield _Field(kind.cls.__name__, field, host, inner)
                yield from _walk(field.type, value[field.encode_name], host, inner)
        case inspect.ListType():
            yield from _walk(kind.item_type, value[0], host, (*path, 0))


def fields() -> dict[str, _Field]:
    """Every field of every struct by its name."""
    found: dict[str, _Field] = {}
    hosts = sorted(map(plain, SMALL), key=lambda host: len(msgspec.msgpack.encode(host)))
    kinds = {
        kind.tag: kind for kind in inspect.multi_type_info(get_args(Message)) if isinstance(kind, inspect.StructType)
    }
    for host in hosts:
        for field in _walk(kinds[host["t"]], host, host, ()):
            found.setdefault(field.name, field)
    return found


def _integers(kind: inspect.IntType) -> Iterator[_Probe]:
    low, high = integer_bounds(kind)
    yield _Probe("least", low)
    yield _Probe("most", high)
    if low > MIN_INT:
        yield _Probe("below", low - 1, f"least is {low}")
    if high < MAX_INT:
        yield _Probe("above", high + 1, f"most is {high}")
    yield _Probe("text", "1", "an integer is needed")
    yield _Probe("boolean", True, "an integer is needed")
    yield _Probe("float", 1.0, "an integer is needed", schema_tells=False)  # to JSON Schema 1.0 is an integer


def _floats(kind: inspect.FloatType) -> Iterator[_Probe]:
    assert kind.ge is not None
    assert kind.le is not None
    yield _Probe("least", float(kind.ge))
    yield _Probe("most", float(kind.le))
    yield _Probe("integer", int(kind.ge) + 1)
    yield _Probe("below", kind.ge - 0.5, f"least is {kind.ge:g}")
    yield _Probe("above", kind.le * 2, f"most is {kind.le:g}")
    yield _Probe("infinite", float("inf"), f"most is {kind.le:g}")
    yield _Probe("not a number", float("nan"), "a number is needed", schema_tells=False)  # JSON cannot say it
    yield _Probe("text", "1", "a number is needed")
    yield _Probe("boolean", True, "a number is needed")


def _texts(kind: inspect.StrType) -> Iterator[_Probe]:
    low, high = kind.min_length or 0, kind.max_length
    assert high is not None
    if kind.pattern is None:
        yield _Probe("shortest", "x" * low)
        yield _Probe("longest", "x" * high)
        yield _Probe("longest, four bytes a character", "\U0001f600" * high)
    else:
        yield _Probe("highest", "f" * high)
        yield _Probe("of another pattern", "g" * high, f"needed is {kind.pattern}")
        yield _Probe("in capitals", "F" * high, f"needed is {kind.pattern}")
        yield _Probe("with a line end", "0" * high + "\n", f"most is {high} characters")
    if low or kind.pattern is not None:
        yield _Probe("empty", "", "empty")
    yield _Probe("too long", "0" * (high + 1), f"most is {high} characters")
    yield _Probe("integer", 1, "a text is needed")
    yield _Probe("bytes", b"ab", "a text is needed", schema_tells=False)  # in JSON it is one


def _bytes(kind: inspect.BytesType, value: bytes) -> Iterator[_Probe]:
    high = kind.max_length
    assert high is not None
    yield _Probe("shortest", b"")
    yield _Probe("longest", b"\0" * high)
    yield _Probe("too long", b"\0" * (high + 4), f"most is {high} bytes")
    yield _Probe("text", value.hex(), "bytes are needed", schema_tells=False)  # in JSON they are one
    yield _Probe("integer", 1, "bytes are needed")


def _lists(kind: inspect.ListType, item: Json) -> Iterator[_Probe]:
    low, high = kind.min_length or 0, kind.max_length
    assert high is not None
    yield _Probe("least", [item] * low)
    yield _Probe("most", [item] * high)
    if low:
        yield _Probe("too few", [item] * (low - 1), f"least is {low}")
    yield _Probe("too many", [item] * (high + 1), f"most is {high}")
    yield _Probe("a map", {}, "an array is needed")
    yield _Probe("with an item that is nil", [None], "nil is none of its items")
    if isinstance(kind.item_type, inspect.IntType | inspect.StrType):
        for probe in _probes(kind.item_type, item):
            yield replace(probe, what=f"an item: {probe.what}", value=[probe.value])


def _maps(kind: inspect.DictType) -> Iterator[_Probe]:
    high = kind.max_length
    assert high is not None
    longest, text = kind.key_type, kind.value_type
    assert isinstance(longest, inspect.StrType)
    assert isinstance(text, inspect.StrType)
    assert longest.max_length is not None
    assert text.max_length is not None
    yield _Probe("empty", {})
    yield _Probe("most", {f"k{index}": "v" for index in range(high)})
    yield _Probe("too many", {f"k{index}": "v" for index in range(high + 1)}, f"most is {high} pairs")
    yield _Probe("longest key and value", {"k" * longest.max_length: "v" * text.max_length})
    yield _Probe("empty key", {"": "v"}, "a key is empty")
    yield _Probe("too long a key", {"k" * (longest.max_length + 1): ""}, f"most is {longest.max_length} characters")
    yield _Probe("too long a value", {"k": "v" * (text.max_length + 1)}, f"most is {text.max_length} characters")
    yield _Probe("integer value", {"k": 1}, "a text is needed")
    yield _Probe("array", [], "a map is needed")


def _booleans() -> Iterator[_Probe]:
    yield _Probe("true", True)
    yield _Probe("false", False)
    yield _Probe("integer", 1, "a boolean is needed")
    yield _Probe("text", "true", "a boolean is needed")


def _probes(kind: inspect.Type, value: Json) -> Iterator[_Probe]:
    match kind:
        case inspect.BoolType():
            yield from _booleans()
        case inspect.IntType():
            yield from _integers(kind)
        case inspect.FloatType():
            yield from _floats(kind)
        case inspect.StrType():
            yield from _texts(kind)
        case inspect.BytesType():
            yield from _bytes(kind, value)
        case inspect.ListType():
            yield from _lists(kind, value[0])
        case inspect.DictType():
            yield from _maps(kind)
        case inspect.UnionType():
            yield _Probe("nil", None)
            (other,) = (part for part in kind.types if not isinstance(part, inspect.NoneType))
            yield from _probes(other, value)
        case inspect.EnumType():
            for member in kind.cls:
                yield _Probe(f"{member.value!r}", member.value)
            yield _Probe("unknown", "whim", "there is no such code")
            yield _Probe("integer", 1, "a code is a text")
        case inspect.TupleType():
            yield from (_Probe("least", [0, 0]), _Probe("most", [2**31 - 1] * 2))
            yield from (_Probe(f"{n} items", [1] * n, "two are needed") for n in (0, 1, 3))
            yield _Probe("above", [1, 2**31], "most is 2147483647")
            yield _Probe("below", [-1, 1], "least is 0")
            yield _Probe("texts", ["1", "1"], "integers are needed")
        case inspect.StructType():
            yield _Probe("empty map", {}, "fields are missing")
            yield _Probe("array", [], "a map is needed")
        case _:
            raise TypeError(f"no values are known for {kind}")


def cases() -> Iterator[Case]:
    """Every field: at its bounds, beyond them, of another kind, nil, left out."""
    for name, field in fields().items():
        optional = not field.kind.required
        for probe in _probes(field.kind.type, field.value):
            changed = field.with_value(probe.value)
            forbidden = FORBIDDEN.get((name, probe.what))
            if forbidden is None:
                yield Case(f"{name}: {probe.what}", changed, probe.refused, probe.schema_tells)
            else:
                yield Case(f"{name}: {probe.what}", changed, forbidden, schema_tells=False)
        if not isinstance(field.kind.type, inspect.UnionType):
            yield Case(f"{name}: nil", field.with_value(None), "nil is no value")
        yield Case(f"{name}: left out", field.without(), None if optional else "a field is missing")
