"""Two real processes, one of which is killed in the middle: the other says so, and serves the next."""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys

import pytest

from kvmsgr import Chunk, Descriptor, Span
from kvmsgr.errors import TransferError
from kvmsgr.fabric import leftovers
from kvmsgr_protocol import Reason

from .engines import LAYERS, PAGE_TOKENS, pair, until, within

SERVE = """
import asyncio, pickle, sys
import kvmsgr
from tests.loopback.engines import LAYERS, PAGE_TOKENS, SHAPES, TestCache

async def main():
    cache = TestCache(SHAPES[0])
    config = kvmsgr.Config(name="victim", model="test", fabric=sys.argv[1])
    async with await kvmsgr.Messenger.open(config, cache.describe()) as messenger:
        print(pickle.dumps(messenger.descriptor).hex(), flush=True)
        async for request in messenger.requests():
            request.accept()
            step = messenger.begin_step([kvmsgr.Chunk(request, 0, PAGE_TOKENS, [kvmsgr.Span(0, 0, [5])])])
            step.signal.start()
            cache.put(1, [0], [5], 0, PAGE_TOKENS)
            step.signal.bump()  # and no more: the forward never goes on

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_a_prefiller_that_is_killed_fails_its_requests_and_no_others(fabric: str) -> None:
    async with pair(fabric, context=False) as both:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVE, fabric, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            assert child.stdout is not None
            victim: Descriptor = await within(first_descriptor(child.stdout))
            fetch = both.decoder.messenger.fetch("doomed", [victim], range(PAGE_TOKENS + 1), [Span(0, 0, [0])])
            await until(lambda: fetch.rows_landed > 0, "the first layer landed")
            child.send_signal(signal.SIGKILL)
            with pytest.raises(TransferError) as raised:
                await within(fetch, 5)
            assert raised.value.reason in (Reason.peer_lost, Reason.fabric)
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
        both.decoder.cache.check(1, [0], [0], 0, PAGE_TOKENS)
        both.decoder.cache.check_untouched(range(1, LAYERS), [0])

        good = both.fetch("good", PAGE_TOKENS + 1, [3])
        request = await both.asked()
        request.accept()
        both.run(both.prefiller.messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, [6])])]), 2, [6])
        await within(good)
        both.decoder.cache.check(2, range(LAYERS), [3], 0, PAGE_TOKENS)
    leftovers.sweep(leftovers.state_folder())


async def first_descriptor(lines: asyncio.StreamReader) -> Descriptor:
    """The child's logs go the same way."""
    while line := (await lines.readline()).decode().strip():
        try:
            descriptor = pickle.loads(bytes.fromhex(line))
        except ValueError:
            continue
        assert isinstance(descriptor, Descriptor)
        return descriptor
    raise AssertionError("the child ended without a word")
