"""A prefiller in a process of its own, for tests that break something: run as
`python -m tests.lost.prefiller <fabric> <ranks> <interfaces of each>`.

It serves every request from source pages [1, 2, 3, ...]; the payload of a request says how its forward goes on:
"<request number> <bumps of the last step> <chunk length>". After so many bumps the forward stops for good.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace

import structlog

import kvmsgr
from tests.loopback.engines import HEADS, LAYERS, PAGE_TOKENS, PAGES, SHAPES, TestCache

SOURCE_PAGES = list(range(1, PAGES))


def shards(num_ranks: int) -> list[TestCache]:
    """A cache for each rank, which has its own heads."""
    return [TestCache(SHAPES[0]) for _ in range(num_ranks)]


def describe(caches: Sequence[TestCache], num_interfaces: int) -> list[kvmsgr.Rank]:
    """The ranks that these are the shards of, each with so many network interfaces."""
    total, ranks = HEADS * len(caches), []
    for number, cache in enumerate(caches):
        [group] = cache.describe().groups
        shard = replace(group, head_start=HEADS * number, total_heads=total)
        ranks.append(kvmsgr.Rank(kvmsgr.Cache([shard]), interfaces=[None] * num_interfaces))
    return ranks


async def serve(messenger: kvmsgr.Messenger, caches: Sequence[TestCache], request: kvmsgr.PrefillRequest) -> None:
    number, last_bumps, length = (int(word) for word in request.payload.split())
    request.accept()
    for start in range(0, request.num_positions, length):
        stop = min(start + length, request.num_positions)
        span = kvmsgr.Span(0, start, SOURCE_PAGES[start // PAGE_TOKENS : -(-stop // PAGE_TOKENS)])
        step = messenger.begin_step([kvmsgr.Chunk(request, start, stop, [span])])
        step.signal.start()
        for layer in range(LAYERS if stop < request.num_positions else last_bumps):
            for cache in caches:
                cache.put(number, [layer], SOURCE_PAGES, start, stop)
            step.signal.bump()
            await asyncio.sleep(0)
        if request.ended:
            break
    await request.released()


async def main(fabric: str, num_ranks: int, num_interfaces: int) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    caches = shards(num_ranks)
    config = kvmsgr.Config(name="prefiller", model="test", fabric=fabric, lease_s=30.0)
    async with await kvmsgr.Messenger.open(config, ranks=describe(caches, num_interfaces)) as messenger:
        print(pickle.dumps(messenger.descriptor).hex(), flush=True)
        async for request in messenger.requests():
            await serve(messenger, caches, request)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
