"""A target in a process of its own: `python -m tests.native.target <provider>`, driven over its pipes.

It answers each line it reads with one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from kvmsgr._ext import native
from tests.native.loopback import GENERATION, SLOT, Node, add_template


class Target:
    """The driver's side. Killed when left."""

    def __init__(self, provider: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.native.target", provider],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def ask(self, question: str, **arguments: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([question, arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def pair_with(self, source: Node, window: int = 64) -> tuple[int, int]:
        """A link from `source` to it, and a template on that."""
        link = source.open_link()
        ours = source.poller.link_address(link).hex(), source.poller.link_regions(link)
        address, regions = self.ask("connect", address=ours[0], regions=ours[1])
        source.poller.connect_link(link, bytes.fromhex(address), regions, window)
        return link, add_template(source, link)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)
        for segment in Path("/dev/shm").glob(f"{self.process.pid}:*"):  # libfabric's, of a process that was killed
            segment.unlink(missing_ok=True)


class Answers:
    """The child's side."""

    def __init__(self, provider: str) -> None:
        self.node = Node(provider)
        self.link = 0

    def connect(self, address: str, regions: list[list[int]]) -> tuple[str, list[tuple[int, int, int]]]:
        self.link = self.node.open_link()
        self.node.poller.connect_link(self.link, bytes.fromhex(address), [(b, n, k) for b, n, k in regions], 64)
        return self.node.poller.link_address(self.link).hex(), self.node.poller.link_regions(self.link)

    def expect(self, num_rows: int) -> None:
        self.node.state.open_attempt(1, num_rows, "")
        self.node.state.link_slot(SLOT, GENERATION, 1)

    def reached(self) -> int:
        return self.node.wait(native.REACHED)[2]

    def close_link(self) -> int:
        """Closes under traffic and clears the memory. Returns the rows counted by then."""
        while not self.node.state.attempt_rows(1):
            pass
        self.node.poller.close_link(self.link)
        self.node.wait(native.LINK_CLOSED)
        self.node.memory[:] = 0
        return self.node.state.attempt_rows(1)

    def look(self) -> tuple[int, bool]:
        """The rows counted, and whether anything is in memory."""
        return self.node.state.attempt_rows(1), bool(self.node.memory.any())


def main() -> None:
    answers = Answers(sys.argv[1])
    for line in sys.stdin:
        question, arguments = json.loads(line)
        print(json.dumps(getattr(answers, question)(**arguments)), flush=True)
    answers.node.close()


if __name__ == "__main__":
    main()
