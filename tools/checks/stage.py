"""One stage of the checks: commands that must all succeed within a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

Command = Sequence[str]


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other; the first that fails ends the stage.

    Args:
        name: What the report calls it.
        commands: Argument lists, without a shell.
        limit_s: Time after which the stage is ended and counts as failed.
        slow: Left out by --fast.
        quote: The report quotes the last line of output that holds this text.
    """

    name: str
    commands: Sequence[Command]
    limit_s: float = 300.0
    slow: bool = False
    quote: str | None = None

    def run(self) -> bool:
        """Run it, print one line, and all its output if it failed.

        Returns:
            Whether every command succeeded.
        """
        started_s = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            failure = self._first_failure(output, started_s + self.limit_s)
            seconds = time.monotonic() - started_s
            output.seek(0)
            text = output.read()
        quoted = [line.strip("= ") for line in text.splitlines() if self.quote and self.quote in line][-1:]
        print(f"{'FAIL' if failure else 'ok  '}  {self.name:<24} {seconds:6.1f} s", *quoted, sep="  ", flush=True)
        if failure:
            print(text, f"{self.name}: {failure}", sep="\n", flush=True)
        return not failure

    def _first_failure(self, output: IO[str], deadline_s: float) -> str:
        for command in self.commands:
            words = " ".join(command)
            with subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            ) as process:
                try:
                    code = process.wait(max(0.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return f"not done after {self.limit_s:.0f} s: {words}"
                finally:
                    if process.returncode is None:  # late, or interrupted
                        os.killpg(process.pid, signal.SIGKILL)
            if code != 0:
                return f"exit status {code}: {words}"
        return ""
