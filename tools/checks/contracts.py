"""Checks who imports whom, by the contracts of pyproject.toml, in the sources of the current folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("kvmsgr", "protocol/kvmsgr_protocol")
EDITABLE_BUILD = Path(__file__).parents[2] / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the sources in `folder`.

    It reads a copy, for two reasons. It does not know compiled modules and would take an import of one for an import
    of the whole package: in the copy their stubs stand for them. And it prefers what is installed; through the finder
    of an editable install it would even see packages without modules.
    """
    with tempfile.TemporaryDirectory(prefix="kvmsgr-contracts-") as copy:
        for package in PACKAGES:
            shutil.copytree(folder / package, Path(copy, package), ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for stub in Path(copy).rglob("*.pyi"):
            stub.rename(stub.with_suffix(".py"))
        shutil.copy(folder / "pyproject.toml", copy)
        variables = {"MESONPY_EDITABLE_SKIP": str(EDITABLE_BUILD), "PYTHONPATH": f".{os.pathsep}protocol"}
        return subprocess.run(
            [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"],
            cwd=copy,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def main() -> int:
    result = lint_imports(Path.cwd())
    print(result.stdout)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
