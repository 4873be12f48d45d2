"""The field tables of the messages, from the types and their docstrings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from inspect import getsource
from typing import Any, get_args

from msgspec import inspect

import kvmsgr_protocol as wire
from kvmsgr_protocol.schema import MAX_INT, integer_bounds
from tools.specification.facts import FACTS, MEANINGS


def summary(cls: type) -> str:
    """What a docstring says before its arguments, on one line."""
    return " ".join((cls.__doc__ or "").partition("Args:")[0].split())


def meanings(cls: type) -> dict[str, str]:
    """Name of each argument a docstring describes to its description."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (cls.__doc__ or "").partition("Args:")[2].splitlines():
        if match := re.match(r"^ {8}([a-z_]+(?:, [a-z_]+)*): (.*)$", line):
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def meaning(cls: type, field: str) -> str:
    """What a field means.

    Raises:
        KeyError: Nobody says.
    """
    described = meanings(cls).get(field)
    text = described or MEANINGS.get(f"{cls.__name__}.{field}") or MEANINGS[field]
    return text.rstrip(".")


def _number(value: float) -> str:
    """A bound as a power of two where it is next to a large one."""
    for offset, text in ((0, ""), (1, " − 1")):
        whole = int(value) + offset
        if whole == value + offset and whole > 1 << 12 and whole & (whole - 1) == 0:
            return f"2^{whole.bit_length() - 1}{text}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size(low: int | None, high: int | None, of: str) -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f", {_number(low or 0)} {of} or more"
    return f", {_number(low or 0)} to {_number(high)} {of}" if low != high else f", {_number(high)} {of}"


def kind(of: inspect.Type) -> str:
    """Type and bounds of a field in words."""
    match of:
        case inspect.BoolType():
            return "boolean"
        case inspect.IntType():
            low, high = integer_bounds(of)
            return f"integer, {_number(low)} to {_number(high) if high != MAX_INT else '2^64 − 1'}"
        case inspect.FloatType():
            return f"number, {_number(of.ge or 0)} to {_number(of.le or 0)}"
        case inspect.StrType():
            pattern = f", `{of.pattern}`" if of.pattern else ""
            return f"text{_size(of.min_length, of.max_length, 'characters')}{pattern}"
        case inspect.BytesType():
            return f"bytes{_size(of.min_length, of.max_length, 'bytes')}"
        case inspect.ListType():
            return f"array of ({kind(of.item_type)}){_size(of.min_length, of.max_length, 'items')}"
        case inspect.TupleType():
            return f"array of {len(of.item_types)} ({kind(of.item_types[0])})"
        case inspect.DictType():
            return f"map of ({kind(of.key_type)}) to ({kind(of.value_type)}){_size(None, of.max_length, 'pairs')}"
        case inspect.UnionType():
            return " or ".join(kind(part) for part in of.types)
        case inspect.NoneType():
            return "nil"
        case inspect.EnumType() | inspect.StructType():
            return f"[{of.cls.__name__}](#{of.cls.__name__.lower()})"
    raise TypeError(f"no words are known for {of}")


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    default: Any = field.default_factory() if callable(field.default_factory) else field.default
    names = {None: "nil", b"": "no bytes"}
    return f"else {names[default] if isinstance(default, bytes | None) else json.dumps(default)}"


def _struct(of: inspect.StructType) -> Iterator[str]:
    yield f"### {of.cls.__name__}"
    yield ""
    yield summary(of.cls)
    yield ""
    if of.tag is not None:
        fact = FACTS[of.cls]
        yield f'`"t": "{of.tag}"`. Sent by: {fact.sender}. When: {fact.when}. Answer: {fact.answer}.'
        yield ""
    if of.fields:
        yield "| field | type and bounds | left out | meaning |"
        yield "|---|---|---|---|"
    for field in of.fields:
        name = field.encode_name
        yield f"| `{name}` | {kind(field.type)} | {_default(field)} | {meaning(of.cls, name)} |"
    if of.fields:
        yield ""


def _structs(of: inspect.Type, found: dict[type, inspect.StructType]) -> None:
    """Collect the structs that a type holds, in the order in which they are met."""
    match of:
        case inspect.StructType():
            found.setdefault(of.cls, of)
            for field in of.fields:
                _structs(field.type, found)
        case inspect.ListType():
            _structs(of.item_type, found)


def _codes() -> Iterator[str]:
    yield "### Reason"
    yield ""
    yield "Why something ended. It travels as text."
    yield ""
    yield "| code | meaning |"
    yield "|---|---|"
    source = _code_meanings()
    for reason in wire.Reason:
        yield f"| `{reason.value}` | {source[reason.name]} |"
    yield ""


def _code_meanings() -> dict[str, str]:
    """Name of each reason code to the sentence that stands below it in the source."""
    pairs = re.findall(r'^    (\w+) = "\w+"\n    """(.*?)"""', getsource(wire.Reason), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in pairs}


def render() -> str:
    """Return the whole document."""
    messages = [of for of in inspect.multi_type_info(get_args(wire.Message)) if isinstance(of, inspect.StructType)]
    found: dict[type, inspect.StructType] = {}
    for message in messages:
        _structs(message, found)
    lines = [
        "# Messages",
        "",
        "Made from the code by `python -m tools.specification`; do not edit. What the fields are for, and the rules",
        "between them, is in [SPECIFICATION.md](SPECIFICATION.md). A text is counted in Unicode code points. A field",
        "that is left out has the value after *else*.",
        "",
        "| message | sent by | when | answer |",
        "|---|---|---|---|",
    ]
    for message in messages:
        fact = FACTS[message.cls]
        name = message.cls.__name__
        lines.append(f"| [{name}](#{name.lower()}) | {fact.sender} | {fact.when} | {fact.answer} |")
    lines += ["", "## Messages and their fields", ""]
    for message in messages:
        lines += _struct(message)
    lines += ["## What they hold", ""]
    for part in found.values():
        if part not in messages:
            lines += _struct(part)
    lines += _codes()
    return "\n".join(lines)
