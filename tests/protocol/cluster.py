"""Messengers with the cache that the dialogues ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np

import kvmsgr
from kvmsgr.runtime.node import Node
from tests.loopback.engines import within
from tools.specification.script import CLUSTERS, HEADS, PAGE_TOKENS, PAGES, Part

DIM, DTYPE = 4, np.dtype(np.uint16)  # stands for bfloat16: nobody reads what is in a row


@dataclass
class Side:
    """One messenger."""

    messenger: kvmsgr.Messenger
    requests: AsyncIterator[kvmsgr.PrefillRequest]

    @property
    def node(self) -> Node:
        return self.messenger._node

    async def asked(self) -> kvmsgr.PrefillRequest:
        return await within(anext(self.requests))


@dataclass
class Nodes:
    """Prefillers that together hold the cache, and a decoder."""

    prefillers: list[Side]
    decoder: Side

    def fetch(
        self,
        request_id: str,
        num_tokens: int,
        pages: Sequence[int],
        ranks: Sequence[int] | None = None,
        sources: Sequence[kvmsgr.Descriptor] | None = None,
    ) -> kvmsgr.Fetch:
        return self.decoder.messenger.fetch(
            request_id,
            sources or [side.messenger.descriptor for side in self.prefillers],
            list(range(num_tokens)),
            [kvmsgr.Span(0, 0, pages)],
            ranks=ranks,
        )


def rank(part: Part) -> kvmsgr.Rank:
    """One that holds these layers and heads."""
    layers, heads = part
    array = np.zeros((len(layers), 2, PAGES, len(heads), PAGE_TOKENS, DIM), DTYPE)
    raw = kvmsgr.RawArray(array.ctypes.data, array.shape, array.strides, "bfloat16", DTYPE.itemsize)
    group = kvmsgr.CacheGroup(
        name="kv",
        parts=((raw,),),
        dims="layer plane page head token dim",
        keep_alive=(array,),
        head_start=heads.start,
        total_heads=HEADS,
        layers=tuple(layers),
    )
    return kvmsgr.Rank(kvmsgr.Cache([group]))


@asynccontextmanager
async def nodes(cluster: str, fabric: str) -> AsyncIterator[Nodes]:
    """The messengers of one of `CLUSTERS`."""

    async def opened(name: str, parts: Sequence[Part]) -> Side:
        config = kvmsgr.Config(name=name, model="test", fabric=fabric)
        messenger = await kvmsgr.Messenger.open(config, ranks=[rank(part) for part in parts])
        stack.push_async_callback(lambda: within(messenger.close()))
        return Side(messenger, messenger.requests())

    wanted = CLUSTERS[cluster]
    async with AsyncExitStack() as stack:
        prefillers = [await opened(f"prefiller {index}", parts) for index, parts in enumerate(wanted.prefillers)]
        yield Nodes(prefillers, await opened("decoder", wanted.decoder))
