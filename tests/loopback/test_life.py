"""Opening, closing, being interrupted; and peers that break the rules."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import kvmsgr
from kvmsgr import Chunk, Span
from kvmsgr._ext import native
from kvmsgr.device.counters import LayerCounter
from kvmsgr.errors import (
    AddressError,
    BusyError,
    ConfigError,
    CountOverflowError,
    LayoutError,
    TransferError,
    TransferTimeout,
)
from kvmsgr.runtime.connection import Connection
from kvmsgr_protocol import Attach, Reason

from .engines import LAYERS, PAGE_TOKENS, SHAPES, Pair, TestCache, pair, until, within


async def open_one(**more: object) -> kvmsgr.Messenger:
    config = kvmsgr.Config(name="one", model="test", fabric="net", **more)  # type: ignore[arg-type]
    return await kvmsgr.Messenger.open(config, TestCache(SHAPES[0]).describe())


async def test_a_layer_counter_serves_one_messenger() -> None:
    """The second one is refused, and has closed what it had opened by then."""
    counter = LayerCounter()
    cache, config = TestCache(SHAPES[0]).describe(), kvmsgr.Config(name="one", model="test", fabric="net")
    async with await kvmsgr.Messenger.open(config, cache, counters=[counter]):
        pass
    with pytest.raises(ConfigError, match="was watched"):
        await kvmsgr.Messenger.open(config, cache, counters=[counter])
    left = native.debug_counters()
    assert (left["pollers"], left["state_files"]) == (0, 0)


@pytest.mark.parametrize("live", [False, True])
async def test_what_cannot_be_sent_is_refused_and_holds_nothing(live: bool) -> None:
    async with pair("net") as both:
        if live:
            await within(both.fetch("first", 1, [0]))
            await both.asked()
        peer = [both.prefiller.messenger.descriptor]
        fetch = both.decoder.messenger.fetch
        spans = [Span(0, 0, [1])]
        for _ in range(5):  # there are four context slots
            with pytest.raises(ConfigError, match="tokens"):
                fetch("r", peer, [-1, 1], spans)
            with pytest.raises(ConfigError, match=r"r{300}"):
                fetch("r" * 300, peer, [1, 1], spans)
            with pytest.raises(ConfigError, match="cannot be sent"):
                fetch("r\ud800", peer, [1, 1], spans)
            with pytest.raises(ConfigError, match="payload"):
                fetch("r", peer, [1, 1], spans, payload=bytes((1 << 20) + 1))
            for time_allowed_s in (0.0, -1.0, math.nan, math.inf):
                with pytest.raises(ConfigError, match="time_allowed_s"):
                    fetch("r", peer, [1, 1], spans, time_allowed_s=time_allowed_s)
            with pytest.raises(LayoutError, match="page"):
                fetch("r", peer, [1, 1], [Span(0, 0, [0.5])])  # type: ignore[list-item]
        assert both.decoder.node.outbox._pages[0][0].num_held == 0
        assert both.decoder.node.context_slots.num_held == 0
        assert both.decoder.node.slots.num_held <= 1, "only the heartbeats of the peer have a slot"
        good = fetch("r", peer, [1, 1], spans, payload=bytes(1 << 20), time_allowed_s=20, trace={"traceparent": "00"})
        request = await both.asked()
        assert len(request.payload) == 1 << 20
        assert request.trace == {"traceparent": "00"}
        request.refuse("enough")
        with pytest.raises(TransferError, match="enough"):
            await within(good)


async def test_an_answer_that_cannot_be_sent_is_refused_and_the_request_lives() -> None:
    async with pair("net") as both:
        fetch = both.fetch("r", 3, [0])
        request = await both.asked()
        with pytest.raises(ConfigError, match="retry_after_s"):
            request.busy("later", retry_after_s=-1)
        request.busy("later", retry_after_s=1)
        with pytest.raises(BusyError, match="later"):
            await within(fetch)


async def test_a_request_that_nobody_took_up_leaves_its_pages_free() -> None:
    async with pair("net") as both:
        fetch = both.fetch("r", 3, [0], time_allowed_s=1.0)
        request = await both.asked()
        with pytest.raises(TransferTimeout):
            await within(fetch)
        await within(fetch.released())
        assert both.decoder.node.outbox._pages[0][0].num_held == 0
        request.accept()  # too late, and harmless


async def test_rows_that_come_after_all_had_landed_end_the_epoch() -> None:
    async with pair("net", context=False) as both:
        fetch = both.fetch("r", PAGE_TOKENS + 1, [0])
        request = await both.asked()
        request.accept()
        first = both.prefiller.messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, [1])])])
        both.run(first, 1, [1])
        await within(fetch)
        other = both.fetch("other", PAGE_TOKENS + 1, [2])
        second = await both.asked()
        second.accept()
        # A sender that breaks the rules: it goes on writing into the slot of a request that is over.
        old = request.dispatch
        second.dispatch = replace(second.dispatch, slot=old.slot, generation=old.generation)
        both.prefiller.messenger.begin_step([Chunk(second, 0, PAGE_TOKENS, [Span(0, 0, [1])], ready=True)])
        with pytest.raises(CountOverflowError, match="after all of it had landed"):
            await within(other)


async def test_a_close_that_is_cancelled_goes_on_and_may_be_awaited_again() -> None:
    messenger = await open_one()
    path = messenger.state_path
    assert path is not None
    closing = asyncio.ensure_future(messenger.close())
    await asyncio.sleep(0)
    closing.cancel()
    await within(asyncio.gather(messenger.close(), messenger.close()))
    assert closing.cancelled()
    assert not Path(path).exists()


async def test_every_part_of_a_close_is_done_even_if_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    messenger = await open_one()
    path = messenger.state_path

    def broken() -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(messenger._node.inbox, "close", broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        await within(messenger.close())
    assert path is not None
    assert not Path(path).exists()


async def test_a_unix_socket_is_private_and_is_gone_after_the_close(tmp_path: Path) -> None:
    path = tmp_path / "control"
    messenger = await open_one(listen=f"unix:{path}")
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(AddressError, match="control"):
        await open_one(listen=f"unix:{path}")  # somebody answers there
    await within(messenger.close())
    assert not os.path.exists(path)


def leave_socket(path: Path) -> None:
    code = f"import socket; socket.socket(socket.AF_UNIX).bind({str(path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert path.exists()


async def test_a_unix_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control"
    leave_socket(path)
    await within((await open_one(listen=f"unix:{path}")).close())


async def test_a_core_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="poller_core"):
        kvmsgr.Config(name="x", model="m", poller_core=max(os.sched_getaffinity(0)) + 1)


@pytest.mark.slow
def test_an_interrupt_is_still_a_keyboard_interrupt() -> None:
    """Libraries that libfabric loads would otherwise replace the handler."""
    code = """
import asyncio, os, signal, kvmsgr
from tests.loopback.engines import SHAPES, TestCache

async def main():
    config = kvmsgr.Config(name="n", model="m", fabric="shm")
    async with await kvmsgr.Messenger.open(config, TestCache(SHAPES[0]).describe()):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted, and closed")
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert child.stdout.strip().endswith("interrupted, and closed"), child.stderr
    assert child.returncode == 0


@pytest.mark.slow
def test_a_fatal_signal_kills_as_it_should() -> None:
    code = "import os, signal, kvmsgr._ext.native as n; n.providers(); os.kill(os.getpid(), signal.SIGTERM)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert child.returncode == -signal.SIGTERM
    assert child.stderr == b""


def spoil(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Everybody lies in Attach from now on."""
    real = Connection.send

    def lying(connection: Connection, message: object) -> None:
        if isinstance(message, Attach):
            rank = message.ranks[0]
            endpoint = replace(rank.endpoints[0], **changes.get("endpoint", {}))  # type: ignore[arg-type]
            rank = replace(rank, endpoints=[endpoint], **changes.get("rank", {}))  # type: ignore[arg-type]
            message = replace(message, ranks=[rank])
        real(connection, message)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "send", lying)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": {"region_bytes": [100, 100]}}, "does not have"),
        ({"endpoint": {"address": bytes(1000)}}, "cannot be connected to"),
    ],
)
async def test_an_attach_that_cannot_be_true_ends_the_epoch_by_name(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], said: str
) -> None:
    async with pair("net") as both:
        spoil(monkeypatch, **changes)
        fetch = both.fetch("r", 3, [0])
        with pytest.raises(TransferError, match=said) as raised:
            await within(fetch)
        assert raised.value.reason is Reason.protocol
        monkeypatch.undo()
        await serve_one(both)


async def serve_one(both: Pair) -> None:
    fetch = both.fetch("good", PAGE_TOKENS + 1, [5])
    request = await both.asked()
    request.accept()
    both.run(both.prefiller.messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, [6])])]), 1, [6])
    await within(fetch)
    both.decoder.cache.check(1, range(LAYERS), [5], 0, PAGE_TOKENS)


async def test_a_window_without_measure_is_cut_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair("net") as both:
        spoil(monkeypatch, endpoint={"window": (1 << 31) - 1})
        await serve_one(both)


async def test_garbage_costs_only_its_own_connection() -> None:
    async with pair("net") as both:
        host, port = both.prefiller.messenger.descriptor.address.removeprefix("tcp://").split(":")
        for garbage in (b"\xff" * 64, b"\x00\x00\x00\x04oops", b"\x00\x00\x00\x01\x80"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            await within(reader.read())  # Hello, Goodbye, end
            writer.close()
            await writer.wait_closed()
        await until(lambda: len(both.prefiller.node.peers) == 0, "the bad peers are forgotten")
        await serve_one(both)


async def test_a_peer_that_sends_our_attach_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have us write to ourselves, and our own heartbeats would keep it alive."""
    async with pair("net") as both:
        ours, real = both.decoder.node, Connection.send
        held: list[tuple[Connection, Attach]] = []
        sent: list[Attach] = []

        def mirror(connection: Connection, message: object) -> None:
            if not isinstance(message, Attach):
                real(connection, message)  # type: ignore[arg-type]
                return
            if connection in ours.connections:
                sent.append(message)
                real(connection, message)
            else:
                held.append((connection, message))
            if sent and held:  # it knows ours, now
                late, attach = held.pop()
                real(late, replace(attach, ranks=sent[0].ranks))

        monkeypatch.setattr(Connection, "send", mirror)
        with pytest.raises(TransferError, match="an endpoint of ours as its own"):
            await within(both.fetch("r", 3, [0]))


async def test_a_peer_has_only_so_many_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair("net") as both:
        real = Connection.send

        def boast(connection: Connection, message: object) -> None:
            if isinstance(message, Attach):
                [rank] = message.ranks
                rank = replace(rank, endpoints=rank.endpoints * 64)
                message = replace(message, ranks=[replace(rank, rank=number) for number in range(17)])
            real(connection, message)  # type: ignore[arg-type]

        monkeypatch.setattr(Connection, "send", boast)
        with pytest.raises(TransferError, match="1088 endpoints; at most 1024"):
            await within(both.fetch("r", 3, [0]))
