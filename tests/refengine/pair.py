"""A prefill node and a decode node over real messengers, both in this process, with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import torch

import kvmsgr
from tests.refengine import tiny
from tools.refengine.decode import DecodeNode, Delivery
from tools.refengine.engine import Engine, OnlyRank
from tools.refengine.node import only_rank, open_messenger
from tools.refengine.prefill import PrefillNode
from tools.refengine.reference import Answer
from tools.refengine.selftest import difference_of

NEW_TOKENS, NUM_DRAFTS = 5, 3
NUM_SLOTS = 8  # most requests that are alive at once


class Pair:
    """Two nodes. Their caches have other layouts and page sizes."""

    def __init__(
        self, source: kvmsgr.Messenger, target: kvmsgr.Messenger, prefiller: PrefillNode, decoder: DecodeNode
    ) -> None:
        self.source, self.target, self.prefiller, self.decoder = source, target, prefiller, decoder

    async def answer(self, request_id: str, prompt: list[int]) -> Delivery:
        return await self.decoder.answer(self.source.descriptor, request_id, prompt)

    async def quiet(self) -> None:
        """Wait until all pages are back."""
        await self.prefiller.drained()
        await self.decoder.quiet()


@asynccontextmanager
async def running_pair(
    prefill: Engine,
    decode: Engine,
    fabric: str = "net",
    *,
    step_tokens: int = 16,
    extra_page: bool = False,
    preempt_every: int = 0,
    half_way: Callable[[], None] | None = None,
    prefill_preempts_every: int = 0,
    announce_ahead: bool = False,
) -> AsyncIterator[Pair]:
    """Two nodes that serve; leaving the block closes them."""
    async with (
        await opened("prefill", prefill, fabric) as source,
        await opened("decode", decode, fabric) as target,
        asyncio.TaskGroup() as group,
    ):
        prefiller = PrefillNode(
            prefill,
            source,
            step_tokens=step_tokens,
            half_way=half_way,
            preempt_every=prefill_preempts_every,
            announce_ahead=announce_ahead,
        )
        decoder = DecodeNode(
            decode,
            target,
            NEW_TOKENS,
            extra_page=extra_page,
            preempt_every=preempt_every,
            step_tokens=step_tokens,
            num_drafts=NUM_DRAFTS if decode.spec.has_draft else 0,
        )
        nodes = [group.create_task(prefiller.run()), group.create_task(decoder.run())]
        yield Pair(source, target, prefiller, decoder)
        for node in nodes:
            node.cancel()


async def opened(name: str, engine: Engine, fabric: str) -> kvmsgr.Messenger:
    assert isinstance(engine.ranks, OnlyRank)
    hidden = torch.full((NUM_SLOTS, tiny.CONFIG.hidden), torch.nan)
    rank = only_rank(engine.config, engine.spec, engine.ranks.caches, hidden, num_interfaces=2)
    return await open_messenger(name, engine.checkpoint, [rank], fabric)


def all_equal(expected: Sequence[Answer], deliveries: Sequence[Delivery]) -> bool:
    """Whether every bit of every answer is equal."""
    pairs = zip(expected, deliveries, strict=True)
    return not any(difference_of(answer, delivery.answer) for answer, delivery in pairs)
