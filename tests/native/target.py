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
from typing import Any, Unpack

from kvmsgr._ext import native
from tests.native.loopback import (
    GENERATION,
    IMMEDIATE,
    NUM_PAGES,
    SLOT,
    Node,
    Options,
    Triple,
    add_template,
    begin,
    connect_link,
    retarget_link,
)

SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]


class Target:
    """The driver's side. Killed when left."""

    def __init__(self, provider: str, **options: Unpack[Options]) -> None:
        self.address = b""  # of its endpoint
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.native.target", provider, json.dumps(options)],
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
        address, regions, beat = self.ask("connect", **self.offer_by(source, link))
        self.address = bytes.fromhex(address)
        connect_link(source, link, (self.address, regions, beat), window)
        return link, add_template(source, link)

    @staticmethod
    def offer_by(node: Node, link: int) -> dict[str, Any]:
        address, regions, beat = node.offer(link)
        return {"address": address.hex(), "regions": regions, "beat": beat}

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)
        for segment in Path("/dev/shm").glob(f"{self.process.pid}:*"):  # libfabric's, of a process that was killed
            segment.unlink(missing_ok=True)


class Answers:
    """The child's side."""

    def __init__(self, provider: str, options: Options) -> None:
        self.node = Node(provider, **options)
        self.link, self.template = 0, -1

    def connect(self, address: str, regions: list[Triple], beat: Triple) -> tuple[str, list[Triple], Triple]:
        self.link = self.node.open_link()
        connect_link(self.node, self.link, (bytes.fromhex(address), regions, beat))
        ours, regions, beat = self.node.offer(self.link)
        return ours.hex(), regions, beat

    def expect(self, num_rows: int) -> None:
        self.node.state.open_attempt(1, num_rows, "")
        self.node.state.link_slot(SLOT, GENERATION, 1)

    def reached(self) -> int:
        return self.node.wait(native.REACHED)[2]

    def stream(self, num_transfers: int, byte: int) -> None:
        """Begins to write everything so often to where our link points; all of it is this byte."""
        self.node.memory[:] = byte
        self.template = add_template(self.node, self.link) if self.template < 0 else self.template
        order = self.link, self.template, IMMEDIATE
        begin(self.node, [((*order, tag, True), SCATTERED) for tag in range(num_transfers)], num_bumps=0)

    def send(self, num_transfers: int, byte: int) -> int:
        """The same, until all of it is sent. Returns the rows."""
        self.stream(num_transfers, byte)
        return sum(self.node.wait(native.SENT)[2] for _ in range(num_transfers))

    def follow(self, address: str, regions: list[Triple], beat: Triple) -> None:
        """The driver's side has rotated."""
        retarget_link(self.node, self.link, (bytes.fromhex(address), regions, beat))
        self.node.wait(native.LINK_HELD, self.link)
        self.node.poller.resume_link(self.link)

    def failed(self) -> int:
        """Why its link has failed."""
        return self.node.wait(native.LINK_FAILED)[4]

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
    answers = Answers(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        question, arguments = json.loads(line)
        print(json.dumps(getattr(answers, question)(**arguments)), flush=True)
    answers.node.close()


if __name__ == "__main__":
    main()
