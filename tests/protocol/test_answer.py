"""The program that answers a checker."""

from __future__ import annotations

import io
import json
import runpy
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from kvmsgr_protocol import Message, encode
from kvmsgr_protocol.answer import answer, from_json, to_json
from kvmsgr_protocol.schema import describe, schema
from tests.protocol.samples import MESSAGES


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_go_to_json_and_back(message: Message) -> None:
    plain = json.loads(json.dumps(to_json(message)))
    assert from_json(plain) == message
    assert answer({"encode": plain}) == {"frame": encode(message).hex()}
    assert answer({"decode": encode(message).hex()}) == {"messages": [plain]}


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ({"decode": "ffffffff"}, "too_large"),
        ({"decode": "00000001c1"}, "bad_frame"),
        ({"decode": "no hex"}, "out_of_range"),
        ({"encode": None}, "bad_frame"),
        ({"encode": {"t": "applaud"}}, "bad_frame"),
        ({"encode": {"t": "accept", "request_id": "", "attempt": 1}}, "bad_frame"),
        ({"encode": {"t": "rotated", "posted": {}}}, "bad_frame"),
        ({"encode": {"t": "dispatch", "payload": "no hex"}}, "bad_frame"),
        ({"encode": {"t": "dispatch", "payload": 1}}, "bad_frame"),
        ({"encode": {"t": "hello", "identity": []}}, "bad_frame"),
        ({"pack": [0, 0, 0]}, "out_of_range"),
        ({"unpack": -1}, "out_of_range"),
        ({"rows": {"num_tokens": 0, "spans": [], "groups": [], "context": []}}, "out_of_range"),
        ({"negotiate": [[1, 1], [2, 2]]}, "version_mismatch"),
        ({"sing": True}, "unknown_question"),
        (None, "unknown_question"),
    ],
)
def test_an_error_has_its_kind(question: object, kind: str) -> None:
    assert answer(question)["error"] == kind


def test_unknown_keys_are_left_as_they_are() -> None:
    plain = {"t": "accept", "request_id": "r", "attempt": 1, "later": "no hex"}
    assert from_json(plain) == from_json({**plain, "later": None})


def test_facts() -> None:
    assert answer({"pack": [2, 3, 5]}) == {"immediate": 2 << 18 | 3 << 14 | 4}
    assert answer({"unpack": 2 << 18 | 3 << 14 | 4}) == {"slot": 2, "generation": 3, "rows": 5}
    assert answer({"negotiate": [[1, 3], [2, 5]]}) == {"version": 3}
    assert answer({"schema": True}) == {"schema": schema()}


@pytest.mark.parametrize(
    ("more", "a_position"),
    [
        ({}, 12),
        ({"sources": []}, 0),
        ({"sources": [{"head_start": 1, "num_heads": 1, "layers": [2, 3]}]}, 2),
        ({"sources": [{"head_start": 0, "num_heads": 2, "layers": [layer]} for layer in (0, 2, 2)]}, 8),
    ],
)
def test_rows(more: dict[str, object], a_position: int) -> None:
    group = {"page_tokens": 4, "num_planes": 2, "head_start": 0, "num_heads": 2, "layers": [0, 1, 2]}
    span = {"group": 0, "first_token": 0, "pages": "0000000001000000"}
    facts = {"num_tokens": 7, "spans": [span], "groups": [group | more], "context": [3]}
    assert answer({"rows": facts}) == {"rows": 6 * a_position + 3}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_json_is_answered(value: object) -> None:
    for question in (value, {"decode": value}, {"encode": value}, {"encode": {"t": "dispatch", "ranks": value}}):
        assert answer(question).keys() & {"error", "messages"}


def test_lines_in_lines_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"unpack": 1}\n{"sing": true}\n'))
    monkeypatch.setattr(sys, "stdout", answers)
    monkeypatch.delitem(sys.modules, "kvmsgr_protocol.answer")
    runpy.run_module("kvmsgr_protocol.answer", run_name="__main__")
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert first == {"slot": 0, "generation": 0, "rows": 2}
    assert second["error"] == "unknown_question"


def test_a_type_the_protocol_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="SetType"):
        describe(inspect.type_info(set[int]), {})
    assert describe(inspect.type_info(int), {}) == {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
