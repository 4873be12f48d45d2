"""A side in a process of its own: `python -m kvmsgr.testing.remote <fabric> <num_nics> <options>`, asked over its
pipes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any, Unpack, cast

from .fabrics import InProcess, Libfabric, Options
from .side import Side


class RemoteError(Exception):
    """The other process answered with this error."""


class RemoteSide:
    """Asks a `Side` of another process, which ends when this one is closed, or left alone."""

    def __init__(self, fabric: str, num_nics: int, **options: Unpack[Options]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvmsgr.testing.remote", fabric, str(num_nics), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any, **more: Any) -> Any:
            pickle.dump((name, arguments, more), cast(IO[bytes], self._process.stdin))
            cast(IO[bytes], self._process.stdin).flush()
            failed, answer = pickle.load(cast(IO[bytes], self._process.stdout))
            if failed:
                raise RemoteError(answer)
            return answer

        return ask

    def close(self) -> None:
        self._process.communicate(timeout=20)
        if self._process.returncode:
            raise RemoteError(f"the other process ended with {self._process.returncode}")


def open_far(fabric: str, num_nics: int, **options: Unpack[Options]) -> Side:
    """A side in another process, used like one of this."""
    return cast(Side, RemoteSide(fabric, num_nics, **options))


def main() -> None:
    name, num_nics, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    side = Side(InProcess() if name == "inprocess" else Libfabric(name), num_nics, **options)
    while True:
        try:
            method, arguments, more = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = False, getattr(side, method)(*arguments, **more)
        except Exception as error:  # noqa: BLE001  # told to whoever asked
            answer = True, f"{type(error).__name__}: {error}"
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    side.close()


if __name__ == "__main__":
    main()
