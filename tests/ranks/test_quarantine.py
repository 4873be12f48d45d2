"""Pages in quarantine are counted once, however many sources may still write into them."""

from __future__ import annotations

import pytest

import kvmsgr
from kvmsgr.errors import RequestCancelledError

from .sharded import Group, Sharding, node, within

NUM_TOKENS = 60


@pytest.mark.parametrize("sources", [1, 2, 4])
async def test_each_page_is_counted_once(sources: int) -> None:
    group = Group(heads=4, num_pages=24)
    async with (
        node("p", [group], Sharding(sources), fabric="net", one_each=True) as prefiller,
        node("d", [group], Sharding(1), fabric="net", quarantine_limit=0.7) as decoder,
    ):
        page_tokens = decoder.shards[0][0].group.page_tokens
        pages = range(-(-NUM_TOKENS // page_tokens))
        spans = [kvmsgr.Span(0, 0, list(pages))]
        fetch = decoder.lead.fetch("request", prefiller.descriptors, range(NUM_TOKENS), spans)
        for messenger in prefiller.messengers:
            await within(anext(aiter(messenger.requests())))
        fetch.cancel()  # nobody has accepted, and nobody has said how many rows it posted
        state = decoder.lead._node.fabric.state
        assert [own.held for own in state.pages()] == [len(pages)]
        assert fetch.quarantine is not None
        assert fetch.quarantine.count("has not said how many rows it posted") == sources
        assert decoder.lead._node.ledger._num_quarantined == len(pages)
        assert decoder.lead.unhealthy is None
        with pytest.raises(RequestCancelledError):
            await within(fetch)
        await within(fetch.released())
        assert decoder.lead._node.ledger._num_quarantined == 0
