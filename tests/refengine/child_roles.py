"""Roles for the tests of process supervision; the children import them by name."""

from __future__ import annotations

import asyncio
import os
import sys

from tools.refengine.processes import Channel, Children


async def echo(channel: Channel, options: object) -> None:
    channel.send(options)
    channel.send(await channel.receive())


async def fail(channel: Channel, options: object) -> None:
    async with asyncio.TaskGroup():
        raise ValueError(f"refused: {options}")


async def hang(channel: Channel, options: object) -> None:
    channel.send(os.getpid())
    await channel.run(asyncio.sleep(3600))


def main() -> None:
    """A parent that tells its children's pids and then waits to be killed."""
    with Children(60.0, None) as children:
        for name in ("one", "two"):
            children.start(name, hang, None)
        print(children.receive("one"), children.receive("two"), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
