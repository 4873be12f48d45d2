"""Writes what is made from the code: field tables, JSON Schema, test vectors, state diagrams."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from kvmsgr_protocol.schema import schema
from tools.specification import dialogues, states, tables, vectors

ROOT = Path(__file__).parents[2]

FILES: dict[str, Callable[[], str]] = {
    "protocol/MESSAGES.md": tables.render,
    "protocol/schema.json": lambda: json.dumps(schema(), indent=1) + "\n",
    "protocol/vectors/messages.json": lambda: vectors.render(
        "Frames that must be read, and as what. Pieces [hex, times] are repeated.", vectors.messages()
    ),
    "protocol/vectors/refused.json": lambda: vectors.render(
        "Frames that must be refused, and why. Pieces [hex, times] are repeated.", vectors.refused()
    ),
    "protocol/vectors/streams.json": lambda: vectors.render(
        "Bytes of a connection, and the messages that are complete.", vectors.streams()
    ),
    "protocol/vectors/immediates.json": lambda: vectors.render(
        "Slot, generation and rows of a write, and its immediate.", vectors.immediates()
    ),
    "protocol/vectors/rows.json": lambda: vectors.render(
        "How many rows one destination rank receives for a request.", vectors.rows()
    ),
    "protocol/vectors/versions.json": lambda: vectors.render(
        "Lowest and highest version of two sides, and the one they speak.", vectors.versions()
    ),
    "protocol/vectors/dialogues.json": dialogues.render,
    "docs/states.md": states.render,
}
"""Path of each file to what it holds."""


def main() -> int:
    parser = argparse.ArgumentParser("python -m tools.specification", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is not what it should be"
    )
    options = parser.parse_args()
    stale = [path for path, make in FILES.items() if not _is(ROOT / path, make())]
    for path in stale:
        if options.check:
            print(f"{path} is not what the code says: run python -m tools.specification")
        else:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(FILES[path]())
            print(f"wrote {path}")
    return bool(stale) and options.check


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
