"""The JSON Schema of what `kvmsgr-cli inspect --json` prints.

`python -m kvmsgr.inspect.schema > kvmsgr/inspect/schema.json` writes the file that ships.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib.resources import files
from typing import Any

import msgspec

from .views import HostView


def shipped() -> str:
    """The schema as it ships with this version."""
    return files(__package__).joinpath("schema.json").read_text(encoding="utf-8")


def generated() -> str:
    """The schema of the views as they are now; the docstrings of the views describe their fields."""
    schema: dict[str, Any] = msgspec.json.schema(HostView)
    for view in schema["$defs"].values():
        view["description"], _, fields = inspect.cleandoc(view["description"]).partition("\n\nArgs:\n")
        for names, text in re.findall(r"^ *([\w, ]+): (.*)$", fields, re.MULTILINE):
            for name in names.split(", "):
                view["properties"][name]["description"] = text
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kvmsgr inspect"}
    return json.dumps(head | schema, indent=2) + "\n"


if __name__ == "__main__":
    print(generated(), end="")
