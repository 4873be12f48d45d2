"""Runs the commands of a stage."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> None:
    """Run a command with more environment variables; if it fails, end the stage (the command itself has said why)."""
    code = subprocess.run(command, cwd=cwd, env=os.environ | variables).returncode
    if code != 0:
        sys.exit(f"exit status {code}: {shlex.join(map(str, command))}")


def output_of(*command: str | Path) -> str:
    """Run a command that must succeed, and return what it prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
