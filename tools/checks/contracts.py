"""Checks who imports whom, by the contracts of pyproject.toml, in the sources of the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EDITABLE_BUILD = Path(__file__).parents[2] / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the sources in `folder`, and on nothing that is installed.

    Through the finder of an editable install it would see packages without modules, and every contract would hold.
    """
    variables = {"MESONPY_EDITABLE_SKIP": str(EDITABLE_BUILD), "PYTHONPATH": f".{os.pathsep}protocol"}
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"],
        cwd=folder,
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
