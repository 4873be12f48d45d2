"""Roles for the tests of process supervision, which the children import by name; and whether a process ends."""

from __future__ import annotations

import asyncio
import os
import select
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


def ends_within(pid: int, seconds: float) -> bool:
    """Whether a process that need not be our child ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([handle], [], [], seconds)
    os.close(handle)
    return bool(ended)


def main() -> None:
    """A parent that tells its children's pids and then waits to be killed."""
    with Children(60.0, None) as children:
        for name in ("one", "two"):
            children.start(name, hang, None)
        print(children.receive("one"), children.receive("two"), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
