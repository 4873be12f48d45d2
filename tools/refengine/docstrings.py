"""Text that every machine with this Python has: docstrings of the standard library, read from its source files."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

# fmt: off
FOR_PROMPTS = (
    "collections", "contextlib", "datetime", "difflib", "functools", "random", "shutil", "smtplib", "socket",
    "subprocess", "textwrap", "threading", "zipfile",
)
FOR_FITTING = (
    "configparser", "doctest", "enum", "ftplib", "inspect", "ipaddress", "logging", "pickle", "statistics",
    "traceback",
)
# fmt: on


def docstrings(modules: Iterable[str]) -> list[str]:
    """All docstrings of these modules, in order. A module that this Python does not have is left out."""
    found = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    found.append(text)
    return found
