"""A process of these tests: it runs the lines of Python it is told, and says what came of each."""

from __future__ import annotations

import json
import sys

PRELUDE = """
import os, select, sys
import numpy as np
import kvmsgr
from kvmsgr.workers import SharedMemory, WorkerLink

SHAPE = (2, 4, 2, 1, 4, 8)
DIMS = "layer page plane head token dim"

def allocate():
    global memory, kv, hidden
    memory = SharedMemory.allocate(1 << 16)
    kv = memory.buffer[4096:][: 4 * np.prod(SHAPE)].view(np.float32).reshape(SHAPE)
    hidden = memory.buffer[:64].view(np.float32).reshape(4, 4)

def publish(link, total_heads=4):
    link.publish(
        [kvmsgr.CacheGroup.from_tensors([kv], DIMS, head_start=link.rank, total_heads=total_heads)],
        [kvmsgr.ContextBuffer("hidden", hidden)],
        memories=[memory],
    )
"""


def main() -> None:
    names: dict[str, object] = {}
    exec(PRELUDE, names)
    for line in sys.stdin:
        code = json.loads(line)
        try:
            try:
                value = eval(code, names)
            except SyntaxError:
                exec(code, names)
                value = None
            answer = {"value": value}
        except Exception as error:  # noqa: BLE001  the test says which one it wants
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
