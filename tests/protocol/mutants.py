"""Copies of the protocol package with one annotation changed, for tests that must see the change."""

from __future__ import annotations

import ast
import compileall
import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import kvmsgr_protocol

PACKAGE = Path(kvmsgr_protocol.__file__).parent
FILES = ("messages.py", "layouts.py")

NEAREST = {
    "U31": "U32",
    "U32": "U31",
    "U63": "U64",
    "U64": "U63",
    "Positive": "U31",
    "Slot": "U31",
    "Generation": "Slot",
    "ContextSlot": "U31",
    "Seconds": "float",
    "Seconds | None": "Seconds",
    "Name": "Label",
    "Label": "Text",
    "Text": "str",
    "RequestId": "Label",
    "Incarnation": "Label",
    "Reason": "Text",
    "tuple[U31, U31]": "list[U31]",
}
"""Annotation to the one that is most like it."""
NUMBERS = {"U31", "U32", "U63", "U64", "Positive", "Slot", "Generation", "ContextSlot", "Seconds"}


@dataclass(frozen=True)
class Mutant:
    """One changed annotation. `field` is Struct.field."""

    file: str
    field: str
    before: str
    after: str
    source: str

    @property
    def probed_as(self) -> str:
        """What vectors about it are named after: a field of a base is probed in each message that has it."""
        struct, _, name = self.field.partition(".")
        return f".{name}" if struct.startswith("_") else self.field

    def __str__(self) -> str:
        return f"{self.field}: {self.after}"


def _changes(annotation: str) -> Iterator[str]:
    """Another kind of value, and the same kind with other bounds."""
    yield "str" if annotation in NUMBERS else "int"
    inner = re.fullmatch(r"Annotated\[(.+), Meta\((.*)\)\]", annotation)
    if inner is not None:
        yield inner[1]
    else:
        yield NEAREST.get(annotation, f"{annotation} | None")


def mutants() -> Iterator[Mutant]:
    """Two for every field of every struct."""
    for file in FILES:
        source = (PACKAGE / file).read_text()
        for struct in ast.walk(ast.parse(source)):
            if not isinstance(struct, ast.ClassDef):
                continue
            for field in struct.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    before = ast.get_source_segment(source, field.annotation)
                    assert before is not None
                    for after in _changes(before):
                        yield Mutant(
                            file, f"{struct.name}.{field.target.id}", before, after, _edit(source, field, after)
                        )


def _edit(source: str, field: ast.AnnAssign, after: str) -> str:
    lines = source.splitlines(keepends=True)
    where = field.annotation
    assert where.end_lineno == where.lineno
    line = lines[where.lineno - 1].encode()
    lines[where.lineno - 1] = (line[: where.col_offset] + after.encode() + line[where.end_col_offset :]).decode()
    return "".join(lines).replace("annotations\n", "annotations\n\nfrom .bounds import *\n", 1)


class Workshop:
    """A copy of the package that takes one mutant at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._package = folder / "kvmsgr_protocol"
        shutil.copytree(PACKAGE, self._package, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(self._package, quiet=2)
        for file in FILES:  # what changes is compiled anew each time
            for compiled in self._package.glob(f"__pycache__/{Path(file).stem}.*"):
                compiled.unlink()

    @contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """The copy is the mutant."""
        path = self._package / mutant.file
        original = path.read_text()
        path.write_text(mutant.source)
        try:
            yield
        finally:
            path.write_text(original)

    @contextmanager
    def imported(self, mutant: Mutant) -> Iterator[ModuleType]:
        """The `answer` module of the mutant, under a name of its own."""
        name = "mutant"
        with self.holding(mutant):
            spec = importlib.util.spec_from_file_location(
                name, self._package / "__init__.py", submodule_search_locations=[str(self._package)]
            )
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
                yield importlib.import_module(f"{name}.answer")
            finally:
                for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
                    del sys.modules[loaded]
