"""Answers questions about the protocol, one JSON line for each line of standard input.

So `protocol/check_vectors.py` compares an implementation with the test vectors; one in another language answers the
same questions. Bytes are lower-case hex.

    {"decode": STREAM}                              {"messages": [...]}: those that are complete
    {"encode": MESSAGE}                             {"frame": HEX}
    {"pack": [SLOT, GENERATION, ROWS]}              {"immediate": NUMBER}
    {"unpack": NUMBER}                              {"slot": ..., "generation": ..., "rows": ...}
    {"rows": {"num_tokens", "spans", "groups", "context"}}
                                                    {"rows": NUMBER}: at one destination rank; see `_rows`
    {"negotiate": [[LOW, HIGH], [LOW, HIGH]]}       {"version": NUMBER}: of ours and theirs
    {"schema": true}                                {"schema": {...}}

An error is answered with {"error": KIND, "detail": TEXT}. Kinds: too_large, bad_frame, version_mismatch, out_of_range,
unknown_question.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import msgspec
from msgspec import inspect

from .errors import BadFrame, FrameTooLarge, VersionMismatch
from .framing import FrameReader, encode
from .immediate import pack, unpack
from .layouts import ContextLayout, GroupLayout, LayerEntry, PlaneLayout
from .messages import Message, Span
from .rows import expected_rows, rows_per_position
from .schema import schema
from .versions import negotiate

Answer = dict[str, Any]  # JSON


def to_json(value: object) -> Any:
    """A message as plain JSON."""
    return _hex(msgspec.to_builtins(value, builtin_types=(bytes,)))


def from_json(fields: object) -> Message:
    """Undo `to_json`.

    Raises:
        BadFrame: It is no message.
    """
    kinds = inspect.type_info(Message)
    assert isinstance(kinds, inspect.UnionType)
    tag = fields.get("t") if isinstance(fields, dict) else None
    try:
        for kind in kinds.types:
            if isinstance(kind, inspect.StructType) and kind.tag == tag:
                fields = _unhex(fields, kind)
        message: Message = msgspec.convert(fields, Message, builtin_types=(bytes,))  # it knows no unions
        return message
    except ValueError as error:
        raise BadFrame(str(error)) from error


def _hex(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case list() | tuple():
            return [_hex(item) for item in value]
        case dict():
            return {key: _hex(item) for key, item in value.items()}
    return value


def _unhex(value: Any, kind: inspect.Type) -> Any:
    """Bytes where the type wants bytes; what is of another kind stays as it is."""
    match kind:
        case inspect.BytesType() if isinstance(value, str):
            return bytes.fromhex(value)
        case inspect.ListType() if isinstance(value, list):
            return [_unhex(item, kind.item_type) for item in value]
        case inspect.StructType() if isinstance(value, dict):
            kinds = {field.encode_name: field.type for field in kind.fields}
            return {key: _unhex(item, kinds[key]) if key in kinds else item for key, item in value.items()}
    return value


def _group(planes: int, shard: dict[str, Any], page_tokens: int = 1, recurrent: bool = False) -> GroupLayout:
    """A group of which only what matters to the count of rows is known."""
    return GroupLayout(
        name="group",
        dtype="",
        item_bytes=1,
        page_tokens=page_tokens,
        num_pages=1,
        head_start=shard["head_start"],
        num_heads=shard["num_heads"],
        total_heads=shard["head_start"] + shard["num_heads"],
        planes=[PlaneLayout(1, 0, 0, 0)] * planes,
        entries=[LayerEntry(layer, plane, 0, 0, 1) for layer in shard["layers"] for plane in range(planes)],
        recurrent=recurrent,
    )


def _rows(num_tokens: int, spans: list[Any], groups: list[dict[str, Any]], context: list[int]) -> int:
    """Count rows from what matters.

    Args:
        num_tokens: Length of the prompt.
        spans: As in Dispatch.
        groups: Of each the `page_tokens`, `num_planes`, `head_start`, `num_heads` and `layers` on the destination rank;
            `recurrent` where it is; and, where the rows of one leg are asked for, its `sources`: `head_start`,
            `num_heads` and `layers` on each rank of the prefiller.
        context: The units of each context buffer that is wanted.
    """
    layouts = [
        _group(group["num_planes"], group, group["page_tokens"], group.get("recurrent", False)) for group in groups
    ]
    sources = [
        [_group(group["num_planes"], shard) for shard in group["sources"]] if "sources" in group else None
        for group in groups
    ]
    return expected_rows(
        num_tokens,
        [Span(span["group"], span["first_token"], bytes.fromhex(span["pages"])) for span in spans],
        layouts,
        [ContextLayout("context", "", 1, 1, num_units, 1, 1, 0, 0) for num_units in context],
        list(map(rows_per_position, layouts, sources)),
    )


def _answer(question: object) -> Answer:
    match question:
        case {"decode": str(stream)}:
            return {"messages": to_json(FrameReader().feed(bytes.fromhex(stream)))}
        case {"encode": fields}:
            return {"frame": encode(from_json(fields)).hex()}
        case {"pack": [int(slot), int(generation), int(rows)]}:
            return {"immediate": pack(slot, generation, rows)}
        case {"unpack": int(number)}:
            return unpack(number)._asdict()
        case {"rows": {"num_tokens": int(num_tokens), "spans": spans, "groups": groups, "context": context}}:
            return {"rows": _rows(num_tokens, spans, groups, context)}
        case {"negotiate": [[int(our_low), int(our_high)], [int(low), int(high)]]}:
            return {"version": negotiate((our_low, our_high), (low, high))}
        case {"schema": True}:
            return {"schema": schema()}
    return {"error": "unknown_question", "detail": "see the documentation of kvmsgr_protocol.answer"}


def answer(question: object) -> Answer:
    """Answer one question."""
    try:
        return _answer(question)
    except FrameTooLarge as error:
        return {"error": "too_large", "detail": str(error)}
    except BadFrame as error:
        return {"error": "bad_frame", "detail": str(error)}
    except VersionMismatch as error:
        return {"error": "version_mismatch", "detail": str(error)}
    except ValueError as error:
        return {"error": "out_of_range", "detail": str(error)}


def main(questions: Iterable[str], answers: TextIO) -> None:
    """Answer each line as it comes."""
    for line in questions:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
