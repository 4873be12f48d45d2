"""A prefiller in a process of its own, for tests that break something: run as `python -m tests.lost.prefiller`.

It serves every request from source pages [1, 2, 3, ...]; the payload of a request says how its forward goes on:
"<request number> <bumps of the last step> <chunk length>". After so many bumps the forward stops for good.
"""

from __future__ import annotations

import asyncio
import pickle
import sys

import structlog

import kvmsgr
from tests.loopback.engines import LAYERS, PAGE_TOKENS, PAGES, SHAPES, TestCache

SOURCE_PAGES = list(range(1, PAGES))


async def serve(messenger: kvmsgr.Messenger, cache: TestCache, request: kvmsgr.PrefillRequest) -> None:
    number, last_bumps, length = (int(word) for word in request.payload.split())
    request.accept()
    for start in range(0, request.num_positions, length):
        stop = min(start + length, request.num_positions)
        span = kvmsgr.Span(0, start, SOURCE_PAGES[start // PAGE_TOKENS : -(-stop // PAGE_TOKENS)])
        step = messenger.begin_step([kvmsgr.Chunk(request, start, stop, [span])])
        step.signal.start()
        for layer in range(LAYERS if stop < request.num_positions else last_bumps):
            cache.put(number, [layer], SOURCE_PAGES, start, stop)
            step.signal.bump()
            await asyncio.sleep(0)
        if request.ended:
            break
    await request.released()


async def main(fabric: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    cache = TestCache(SHAPES[0])
    config = kvmsgr.Config(name="prefiller", model="test", fabric=fabric, lease_s=30.0)
    async with await kvmsgr.Messenger.open(config, cache.describe()) as messenger:
        print(pickle.dumps(messenger.descriptor).hex(), flush=True)
        async for request in messenger.requests():
            await serve(messenger, cache, request)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
