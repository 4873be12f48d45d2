"""Peers and engines that do what they must not: it is named, it costs nobody else anything, and nothing hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import numpy as np
import pytest

from kvmsgr import Chunk, PrefillRequest, Span
from kvmsgr.errors import (
    EngineFailedError,
    FabricError,
    FabricStuckError,
    LayoutError,
    LocalProtocolError,
    PeerProtocolError,
    RefusedError,
    TransferError,
)
from kvmsgr.runtime import node as node_module
from kvmsgr.runtime import peer as peer_module
from kvmsgr_protocol import (
    PROTOCOL_VERSIONS,
    Dispatch,
    FrameReader,
    Hello,
    Identity,
    Message,
    RankSpans,
    Refuse,
    Unknown,
    encode,
)
from kvmsgr_protocol import Span as WireSpan

from .engines import PAGE_TOKENS, PAGES, Pair, pair, until, within


async def taken_up(both: Pair, request_id: str, pages: list[int]) -> PrefillRequest:
    both.fetch(request_id, len(pages) * PAGE_TOKENS + 1, pages)
    request = await both.asked()
    request.accept()
    return request


# Engines


async def test_a_request_of_another_messenger_is_not_ours_to_serve() -> None:
    async with pair("net", context=False) as mine, pair("net", context=False) as theirs:
        request = await taken_up(theirs, "r", [0])
        await taken_up(mine, "r", [0])
        with pytest.raises(LocalProtocolError, match="another messenger"):
            mine.prefiller.messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, [1])])])


async def test_a_bump_of_an_older_forward_does_not_count_for_the_next() -> None:
    async with pair("net", context=False) as both:
        requests = [await taken_up(both, f"r{n}", [n]) for n in range(2)]
        steps = [
            both.prefiller.messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, [4])])])
            for request in requests
        ]
        with pytest.raises(LocalProtocolError, match="start"):
            steps[0].signal.bump()
        both.run(steps[0], 0, [4])
        steps[1].signal.start()
        with pytest.raises(LocalProtocolError, match="step 1 while the layer counter is at step 2"):
            steps[0].signal.bump()
        assert steps[1].signal.num_bumps == 0


async def test_any_object_may_be_the_reason_of_a_failure() -> None:
    async with pair("net") as both:
        fetch = both.fetch("r", 3, [0])
        request = await both.asked()
        request.accept()
        request.fail(MemoryError("no pages \udc80"))  # type: ignore[arg-type]
        with pytest.raises(EngineFailedError, match="no pages"):
            await within(fetch)
        await within(request.released())
        assert not (await within(request.outcome())).ok
        fetch = both.fetch("s", 3, [1])
        (await both.asked()).refuse("\udc80")
        with pytest.raises(RefusedError):
            await within(fetch)


@pytest.mark.parametrize(
    "spans",
    [[Span(0, 0, [0])], [Span(0, 0, [0]), Span(0, 2 * PAGE_TOKENS, [1])], [Span(0, PAGE_TOKENS, [0])]],
    ids=["too short", "a gap", "too short, from inside"],
)
async def test_pages_that_do_not_hold_the_prompt_are_refused(spans: list[Span]) -> None:
    async with pair("net") as both:
        peer = [both.prefiller.messenger.descriptor]
        with pytest.raises(LayoutError, match="pages are given up to position"):
            both.decoder.messenger.fetch("r", peer, range(3 * PAGE_TOKENS + 1), spans)


@pytest.mark.slow
def test_a_messenger_that_is_never_closed_says_so_and_keeps_its_memory_until_it_has_stopped() -> None:
    code = """
import asyncio, gc, warnings, kvmsgr
from tests.loopback.engines import SHAPES, pair

async def main():
    async with pair("net", context=False) as both:
        for n in range(3):
            lost = await kvmsgr.Messenger.open(
                kvmsgr.Config(name="lost", model="test", fabric="net"), both.decoder.cache.describe()
            )
            fetch = lost.fetch("r", [both.prefiller.messenger.descriptor], range(9), [kvmsgr.Span(0, 0, [0, 1])])
            request = await both.asked()
            request.accept()
            step = both.prefiller.messenger.begin_step([kvmsgr.Chunk(request, 0, 8, [kvmsgr.Span(0, 0, [2, 3])])])
            step.signal.start()
            step.signal.bump()
            lost._node.loop.remove_reader(lost._node.fabric.poller.fd)
    del lost, fetch, request, step, both
    gc.collect()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    asyncio.run(main())
    gc.collect()
print(sum("never closed" in str(warning.message) for warning in caught))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout.split()[-1]) >= 1


# The fabric


class Still:
    """A poller whose thread does not go round any more."""

    def __init__(self, poller: object) -> None:
        self._poller = poller

    def __getattr__(self, name: str) -> object:
        return getattr(self._poller, name)

    def stats(self) -> dict[str, int]:
        return {"rounds": 7}


async def test_a_poller_that_is_stuck_fails_everything_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "WATCH_S", 0.01)
    async with pair("net") as both:
        fetch = both.fetch("r", 3, [0])
        await both.asked()
        monkeypatch.setattr(both.decoder.node.fabric, "poller", Still(both.decoder.node.fabric.poller))
        with pytest.raises(FabricError, match="stuck inside libfabric"):
            await within(fetch)
        with pytest.raises(FabricStuckError):
            both.fetch("s", 3, [1])
        monkeypatch.undo()


# Peers


class RawPeer:
    """Speaks the control protocol as it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._frames = reader, writer, FrameReader()

    def send(self, *messages: Message) -> None:
        self._writer.write(b"".join(encode(message) for message in messages))

    async def hear(self) -> list[Message]:
        """All that comes until the other side closes."""
        heard: list[Message] = []
        while data := await self._reader.read(1 << 16):
            heard += self._frames.feed(data)
        self._writer.close()
        await self._writer.wait_closed()
        return heard


def hello() -> Hello:
    return Hello(PROTOCOL_VERSIONS, [], "ab" * 16, "raw", "test", Identity("test", ["decoder"]))


async def raw(both: Pair) -> RawPeer:
    host, port = both.prefiller.messenger.descriptor.address.removeprefix("tcp://").split(":")
    return RawPeer(*await asyncio.open_connection(host, int(port)))


async def test_a_second_hello_costs_its_sender_the_connection_and_nobody_a_window() -> None:
    async with pair("net") as both:
        for _ in range(3):
            peer = await raw(both)
            peer.send(hello(), hello())
            heard = await within(peer.hear())
            assert "second Hello" in str(heard[-1])
        await until(lambda: not both.prefiller.node.peers, "the peers are forgotten")
        assert both.prefiller.node._windows_granted == 0


async def test_a_prompt_that_cannot_fit_is_refused_before_anything_is_planned() -> None:
    async with pair("net") as both:
        await taken_up(both, "first", [0])
        (peer,) = both.decoder.node.peers
        too_long = PAGES * PAGE_TOKENS + 2
        dispatch = Dispatch(
            request_id="long",
            attempt=99,
            num_tokens=too_long,
            tokens=b"",
            slot=0,
            generation=0,
            ranks=[RankSpans(0, [WireSpan(0, 0, np.arange(PAGES, dtype="<i4").tobytes())])],
            context_slot=-1,
            expected_rows=0,
            time_allowed_s=5,
        )
        seen: list[Refuse] = []
        both.decoder.node.inbox.message_received = (  # type: ignore[method-assign]
            lambda _, message: seen.append(message) if isinstance(message, Refuse) else None
        )
        peer.send(dispatch)
        await until(lambda: bool(seen), "an answer")
        assert f"room for {PAGES * PAGE_TOKENS}" in seen[0].reason


async def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "MAX_UNREAD_BYTES", -1)  # whatever is sent is too much
    async with pair("net") as both:
        fetch = both.fetch("r", 3, [0])
        with pytest.raises(PeerProtocolError, match="does not read"):
            await within(fetch)


async def test_a_loop_that_was_busy_elsewhere_does_not_take_a_peer_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "GRACE_S", 10.0)  # enough on any machine: what is tested is that there is one
    async with pair("net", connect_timeout_s=1.0) as both:
        fetch = both.fetch("r", 3, [0])
        await until(lambda: any(peer._connection for peer in both.decoder.node.peers), "the connection")
        time.sleep(1.1)  # noqa: ASYNC251  # the loop is blocked: its timers are due before it reads
        request = await both.asked()
        request.refuse("enough")
        with pytest.raises(TransferError, match="enough"):
            await within(fetch)


async def test_what_was_said_last_is_heard_while_the_other_side_is_talking() -> None:
    async with pair("net", context=False) as both:
        request = await taken_up(both, "r", [0])
        (peer,) = both.prefiller.node.peers
        closing = asyncio.ensure_future(both.decoder.messenger.close())
        for _ in range(200):  # data the closing side never reads
            peer.send(Unknown("late", 9))
            await asyncio.sleep(0)
        await within(closing)
        assert (await within(request.outcome())).reason == "closed"
