"""Version 1 of the protocol is final: nobody changes it by accident."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvmsgr_protocol import PROTOCOL_VERSIONS
from tools.specification.__main__ import ROOT

VERSION_1 = "9520b4b0859b77e6"


def without_words(value: Any) -> Any:
    """A schema without what is for people."""
    if isinstance(value, dict):
        return {key: without_words(inner) for key, inner in value.items() if key not in ("description", "title")}
    return [without_words(inner) for inner in value] if isinstance(value, list) else value


def test_what_is_spoken_is_version_1() -> None:
    schema = without_words(json.loads((ROOT / "protocol" / "schema.json").read_text()))
    found = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:16]
    assert PROTOCOL_VERSIONS == (1, 1)
    assert found == VERSION_1, (
        "messages have changed, and version 1 is final: take the change back, or give it a new number and go on "
        "speaking 1 (first page of the specification). A key that a peer may skip is none: change the digest then"
    )
