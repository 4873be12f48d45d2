"""Of several legs one lies, and engines that are mistaken about ranks: it costs nobody else anything."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvmsgr
from kvmsgr.errors import CountOverflowError, LayoutError, LocalProtocolError, RankLostError, ShortCountError
from kvmsgr_protocol import Cancel, Dispatch, RankSpans, Reason, Sent

from .sharded import Group, Node, Sharding, node, within

GROUPS = [Group()]
CHUNK = (0, 8, [kvmsgr.Span(0, 0, [3, 4])])


async def asked(source: Node, target: Node) -> tuple[kvmsgr.Fetch, list[kvmsgr.PrefillRequest]]:
    fetch = target.lead.fetch("r", source.descriptors, range(9), [kvmsgr.Span(0, 0, [1, 2])])
    requests = [await within(anext(aiter(messenger.requests()))) for messenger in source.messengers]
    for request in requests:
        request.accept()
    return fetch, requests


def live(target: Node) -> list[str]:
    return [peer.name for peer in target.lead._node.peers if peer.failure is None]


async def test_a_leg_that_says_it_has_sent_too_little_fails_at_once_and_alone() -> None:
    async with (
        node("p", GROUPS, Sharding(2), fabric="net", one_each=True) as source,
        node("d", GROUPS, Sharding(1), fabric="net") as target,
    ):
        fetch, requests = await asked(source, target)
        requests[0].peer.send(Sent("r", requests[0].dispatch.attempt, 0))
        with pytest.raises(ShortCountError, match="0 of 48 rows landed, p0 posted 0"):
            await within(fetch, 5)
        await within(fetch.released())
        assert live(target) == ["p1"]


async def test_a_leg_that_brings_too_much_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        node("p", GROUPS, Sharding(2), fabric="net", one_each=True) as source,
        node("d", GROUPS, Sharding(1), fabric="net") as target,
    ):
        fetch, requests = await asked(source, target)
        fabric = source.lead._node.fabric
        begin = fabric.begin_step
        monkeypatch.setattr(
            fabric, "begin_step", lambda parts, orders, *rest: begin(parts, np.tile(orders, (3, 1)), *rest)
        )
        step = source.lead.begin_step([kvmsgr.Chunk(requests[0], *CHUNK)])
        step.signal.start()
        for _ in source.layers:
            step.signal.bump()
        with pytest.raises(CountOverflowError):
            await within(fetch)
        await within(fetch.released())
        assert live(target) == ["p1"], "it was still computing"


async def test_requests_that_are_over_before_anybody_looked_are_not_kept() -> None:
    async with (
        node("p", GROUPS, Sharding(1), fabric="net") as source,
        node("d", GROUPS, Sharding(1), fabric="net") as target,
    ):
        await within(target.lead.fetch("first", source.descriptors, [1], []))
        (peer,) = target.lead._node.peers
        for attempt in range(100, 150):
            peer.send(
                Dispatch(
                    request_id="r", attempt=attempt, num_tokens=9, tokens=bytes(36), slot=1, generation=0,
                    ranks=[RankSpans(0, [])], context_slot=-1, expected_rows=0, time_allowed_s=9.0, payload=b"",
                    trace={},
                )
            )  # fmt: skip
            peer.send(Cancel("r", attempt, Reason.cancelled, "never mind"))
        waiting = asyncio.ensure_future(anext(aiter(source.lead.requests())))
        target.lead.fetch("last", source.descriptors, range(9), [kvmsgr.Span(0, 0, [1, 2])])
        inbox = source.lead._node.inbox
        request = await within(waiting)
        while request.request_id != "last":  # taken before its Cancel came
            request = await within(anext(aiter(source.lead.requests())))
        assert not inbox._offered
        assert len(inbox.by_tag) == 1


async def test_any_text_may_say_why_and_the_first_accept_names_the_ranks() -> None:
    async with (
        node("p", GROUPS, Sharding(2), fabric="net", layer_counters="rank") as source,
        node("d", GROUPS, Sharding(2), fabric="net") as target,
    ):
        fetch, (request,) = await asked(source, target)
        with pytest.raises(LocalProtocolError):
            request.accept([1])
        with pytest.raises(TypeError):
            source.lead.rank_lost(0.5, "half")  # type: ignore[arg-type]
        source.lead.rank_lost(0, "gone \udc80")
        with pytest.raises(RankLostError, match="rank 0 of p is lost: gone"):
            await within(fetch)
        await within(fetch.released())
        other = target.lead.fetch("s", source.descriptors, range(9), [kvmsgr.Span(0, 0, [3, 4])], ranks=[0])
        await within(anext(aiter(source.lead.requests())))
        other.cancel("\udc80")
        await within(other.released())
        assert live(target) == ["p"]


@pytest.mark.parametrize("wrong", [{"name": ""}, {"layers": (0, 1 << 31)}, {"total_heads": 1 << 31}])
def test_a_cache_that_no_message_can_describe_is_refused(wrong: dict[str, object]) -> None:
    array = np.zeros((2, 4, 2, 1, 4, 4), np.uint16)
    group = kvmsgr.CacheGroup.from_tensors([array], "layer page plane head token dim", **wrong)  # type: ignore[arg-type]
    config = kvmsgr.Config(name="p", model="t", fabric="net")
    with pytest.raises(LayoutError, match="cannot be told to a peer"):
        asyncio.run(kvmsgr.Messenger.open(config, kvmsgr.Cache([group])))
