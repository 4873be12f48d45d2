"""Prefill and decode nodes over real messengers, both in this process, with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

import kvmsgr
from kvmsgr.errors import IncompatiblePeerError, ShortCountError
from tests.refengine import tiny
from tools.refengine.decode import DecodeNode, Delivery
from tools.refengine.engine import Engine, OnlyRank
from tools.refengine.node import only_rank, open_messenger
from tools.refengine.prefill import PrefillNode
from tools.refengine.reference import run_alone
from tools.refengine.selftest import difference_of, draft_difference
from tools.refengine.spec import WINDOW_TOKENS

NEW_TOKENS, NUM_DRAFTS = 5, 3
PROMPTS = [torch.randint(3, 80, (length,)).tolist() for length in (70, 9, 1, 33, 130, 2)]


class Pair:
    """A prefill node with a small cache, and a decode node with a large one of another layout and page size."""

    def __init__(self, source: kvmsgr.Messenger, prefill: Engine, target: kvmsgr.Messenger, decode: Engine) -> None:
        self.source, self.prefill, self.decode = source, prefill, decode
        self.prefiller = PrefillNode(prefill, source, step_tokens=16)
        self.decoder = DecodeNode(decode, target, NEW_TOKENS, num_drafts=NUM_DRAFTS if decode.spec.has_draft else 0)

    async def answer(self, index: int) -> Delivery:
        return await self.decoder.answer(self.source.descriptor, f"prompt-{index}", PROMPTS[index])


@asynccontextmanager
async def running_pair(
    fabric: str, num_groups: int = 1, *, draft: bool = False, decoder_drafts: bool | None = None
) -> AsyncIterator[Pair]:
    drafts = draft if decoder_drafts is None else decoder_drafts
    prefill = tiny.engine(18, tiny.spec(num_groups=num_groups, draft=draft), seed=1)
    decode = tiny.engine(64, tiny.spec(16, "nhd", num_groups=num_groups, draft=drafts), seed=2)
    async with (
        await opened("prefill", prefill, fabric) as source,
        await opened("decode", decode, fabric) as target,
        asyncio.TaskGroup() as group,
    ):
        pair = Pair(source, prefill, target, decode)
        nodes = [group.create_task(pair.prefiller.run()), group.create_task(pair.decoder.run())]
        yield pair
        for node in nodes:
            node.cancel()


async def opened(name: str, engine: Engine, fabric: str) -> kvmsgr.Messenger:
    assert isinstance(engine.ranks, OnlyRank)
    hidden = torch.full((8, tiny.CONFIG.hidden), torch.nan)
    rank = only_rank(engine.config, engine.spec, engine.ranks.caches, hidden, num_interfaces=2)
    return await open_messenger(name, engine.checkpoint, [rank], fabric)


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "num_groups"), [("net", 1), ("shm", 1), ("net", 2)])
async def test_answers_are_bitwise_those_of_one_process_and_all_pages_come_back(fabric: str, num_groups: int) -> None:
    spec = tiny.spec(num_groups=num_groups)
    expected = run_alone(tiny.engine(own_spec=spec), PROMPTS, NEW_TOKENS, step_tokens=1000)
    async with asyncio.timeout(20), running_pair(fabric, num_groups) as pair:
        deliveries = await asyncio.gather(*(pair.answer(index) for index in range(len(PROMPTS))))
        await pair.prefiller.drained()
        await pair.decoder.quiet()
    for answer, delivery, prompt in zip(expected, deliveries, PROMPTS, strict=True):
        assert difference_of(answer, delivery.answer) is None
        num_positions = len(prompt) - 1
        in_window = min(num_positions, WINDOW_TOKENS) if num_groups == 2 else num_positions
        assert delivery.rows == (2 * num_positions + in_window) * 2 * 4 + (
            num_positions > 0
        )  # planes, heads; hidden state
    assert all(outcome.ok for outcome in pair.prefiller.outcomes.values())
    assert tiny.all_free(pair.decode)
    assert tiny.all_free(pair.prefill)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_drafts_made_from_what_travelled_are_those_of_one_process(fabric: str) -> None:
    plain = run_alone(tiny.engine(), PROMPTS, NEW_TOKENS, step_tokens=1000)
    drafted = run_alone(
        tiny.engine(own_spec=tiny.spec(draft=True)), PROMPTS, NEW_TOKENS, step_tokens=1000, num_drafts=NUM_DRAFTS
    )
    async with asyncio.timeout(20), running_pair(fabric, draft=True) as pair:
        deliveries = await asyncio.gather(*(pair.answer(index) for index in range(len(PROMPTS))))
        await pair.prefiller.drained()
        await pair.decoder.quiet()
    for prompt, delivery, expected, drafts in zip(PROMPTS, deliveries, plain, drafted, strict=True):
        assert difference_of(expected, delivery.answer) is None
        assert draft_difference(drafts, delivery.answer) is None
        num_positions = len(prompt) - 1
        assert delivery.rows == num_positions * 4 * 2 * 4 + (num_positions > 0)  # layers, planes, heads; hidden state
    assert tiny.all_free(pair.decode)
    assert tiny.all_free(pair.prefill)


@pytest.mark.slow
@pytest.mark.parametrize("decoder_drafts", [False, True])
async def test_sides_of_which_one_has_a_draft_layer_refuse_each_other(decoder_drafts: bool) -> None:
    opening = running_pair("net", draft=not decoder_drafts, decoder_drafts=decoder_drafts)
    async with asyncio.timeout(20), opening as pair:
        with pytest.raises(IncompatiblePeerError, match="draft"):
            await pair.answer(1)
        await pair.decoder.quiet()
    assert tiny.all_free(pair.decode)


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
    assert tiny.all_free(pair.decode)
    assert tiny.all_free(pair.prefill)
