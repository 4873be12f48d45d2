"""The schema that ships is that of the views, and it bites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from kvmsgr.inspect import Unreadable, host_view, snapshot
from kvmsgr.inspect.schema import generated, shipped

from .messengers import add_fetch, messenger

VALIDATOR = jsonschema.Draft202012Validator(msgspec.json.decode(shipped()))


def document(folder: Path) -> dict[str, Any]:
    with messenger(folder) as state:
        add_fetch(state)
        assert state.path
        found = host_view([snapshot(state.path), Unreadable(path="/a", error="no")])
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return decoded


def test_the_shipped_schema_is_the_generated_one() -> None:
    assert shipped() == generated(), "run python -m kvmsgr.inspect.schema > kvmsgr/inspect/schema.json"


def test_every_field_is_described() -> None:
    for name, view in msgspec.json.decode(shipped())["$defs"].items():
        for field, schema in view["properties"].items():
            assert schema.get("description"), f"{name}.{field}"


def test_a_real_snapshot_fits(tmp_path: Path) -> None:
    VALIDATOR.validate(document(tmp_path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("messengers", 0, "process"), "undead"),
        (("messengers", 0, "legs", 0, "rows_landed"), "7"),
        (("messengers", 0, "legs", 0, "unknown"), 7),
        (("unreadable", 0), {"path": "/a"}),
    ],
)
def test_another_document_does_not_fit(tmp_path: Path, path: tuple[str | int, ...], value: object) -> None:
    found = document(tmp_path)
    inner: Any = found
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert not VALIDATOR.is_valid(found)
