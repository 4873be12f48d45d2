"""Text that every machine with this Python has: docstrings of the standard library, read from its source files."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

# fmt: off
FOR_PROMPTS = (
    "argparse", "collections", "contextlib", "datetime", "difflib", "functools", "heapq", "json", "pathlib",
    "random", "shutil", "smtplib", "socket", "string", "subprocess", "tarfile", "textwrap", "threading",
    "uuid", "zipfile",
)
FOR_FITTING = (
    "ast", "base64", "calendar", "configparser", "copy", "csv", "doctest", "enum", "fractions", "ftplib",
    "imaplib", "inspect", "ipaddress", "logging", "mailbox", "nntplib", "optparse", "pdb", "pickle",
    "pickletools", "platform", "poplib", "queue", "sched", "selectors", "shelve", "socketserver",
    "statistics", "tempfile", "timeit", "tokenize", "trace", "traceback", "turtle", "typing", "wave",
    "weakref",
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
