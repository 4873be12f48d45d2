"""Prefill and decode nodes over real messengers, both in this process, with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

import kvmsgr
from kvmsgr.errors import ShortCountError
from tests.refengine import tiny
from tools.refengine.decode import DecodeNode, Delivery
from tools.refengine.engine import Engine
from tools.refengine.node import open_messenger
from tools.refengine.prefill import PrefillNode
from tools.refengine.reference import run_alone
from tools.refengine.selftest import difference_of

NEW_TOKENS = 5
PROMPTS = [torch.randint(3, 80, (length,)).tolist() for length in (70, 9, 1, 33, 130, 2)]


class Pair:
    """A prefill node with a small cache, and a decode node with a large one in the other layout."""

    def __init__(self, source: kvmsgr.Messenger, prefill: Engine, target: kvmsgr.Messenger, decode: Engine) -> None:
        self.source, self.prefill, self.decode = source, prefill, decode
        self.prefiller = PrefillNode(prefill, source, step_tokens=16)
        self.decoder = DecodeNode(decode, target, NEW_TOKENS)

    async def answer(self, index: int) -> Delivery:
        return await self.decoder.answer(self.source.descriptor, f"prompt-{index}", PROMPTS[index])


@asynccontextmanager
async def running_pair(fabric: str) -> AsyncIterator[Pair]:
    prefill, decode = tiny.engine(num_pages=18, seed=1), tiny.engine(num_pages=64, layout="nhd", seed=2)
    hidden = [torch.full((8, tiny.CONFIG.hidden), torch.nan) for _ in range(2)]
    async with (
        await open_messenger("prefill", prefill, hidden[0], fabric) as source,
        await open_messenger("decode", decode, hidden[1], fabric) as target,
        asyncio.TaskGroup() as group,
    ):
        pair = Pair(source, prefill, target, decode)
        nodes = [group.create_task(pair.prefiller.run()), group.create_task(pair.decoder.run())]
        yield pair
        for node in nodes:
            node.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_answers_are_bitwise_those_of_one_process_and_all_pages_come_back(fabric: str) -> None:
    expected = run_alone(tiny.engine(), PROMPTS, NEW_TOKENS, step_tokens=1000)
    async with asyncio.timeout(20), running_pair(fabric) as pair:
        deliveries = await asyncio.gather(*(pair.answer(index) for index in range(len(PROMPTS))))
        await pair.prefiller.drained()
        await pair.decoder.quiet()
    for answer, delivery, prompt in zip(expected, deliveries, PROMPTS, strict=True):
        assert difference_of(answer, delivery.answer) is None
        assert delivery.rows == (len(prompt) - 1) * 2 * 2 * 2 + (len(prompt) > 1)  # layers, planes, heads; hidden state
    assert all(outcome.ok for outcome in pair.prefiller.outcomes.values())
    assert pair.decode.cache.num_free == pair.decode.cache.num_pages
    assert pair.prefill.cache.num_free == pair.prefill.cache.num_pages


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_a_lost_write_fails_one_request_and_loses_no_page(fabric: str) -> None:
    async with asyncio.timeout(20), running_pair(fabric) as pair:
        await pair.answer(1)
        pair.source.inject("drop", 3)
        with pytest.raises(ShortCountError, match="prompt-0") as raised:
            async with asyncio.timeout(5):
                await pair.answer(0)
        await pair.prefiller.drained()
    await pair.decoder.quiet()  # closing fences what a count could not prove
    assert 0 < raised.value.rows_landed < raised.value.rows_expected
    assert not pair.prefiller.outcomes["prompt-0"].ok
    assert pair.decode.cache.num_free == pair.decode.cache.num_pages
    assert pair.prefill.cache.num_free == pair.prefill.cache.num_pages
