"""Every failure ends both sides with the same reason, in time, and never as success."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

import kvmsgr
from kvmsgr import Chunk, Span
from kvmsgr.errors import (
    AddressError,
    BusyError,
    ConfigError,
    EngineFailedError,
    FabricUnavailableError,
    IncompatiblePeerError,
    LayoutError,
    LocalProtocolError,
    MessengerClosedError,
    PeerLostError,
    RefusedError,
    ShortCountError,
    StepFaultError,
    TransferTimeout,
)
from kvmsgr_protocol import Reason

from .engines import HEADS, LAYERS, PAGE_TOKENS, SHAPES, Pair, TestCache, pair, until, within

FABRICS = ["net", "shm"]
SRC, DST = [0, 1], [2, 3]
NUM_TOKENS = 2 * PAGE_TOKENS + 1
ROWS_A_POSITION = LAYERS * 2 * HEADS


async def started(both: Pair, **more: object) -> tuple[kvmsgr.Fetch, kvmsgr.PrefillRequest]:
    fetch = both.fetch("r", NUM_TOKENS, DST, **more)
    request = await both.asked()
    request.accept()
    return fetch, request


def whole(request: kvmsgr.PrefillRequest) -> Chunk:
    return Chunk(request, 0, NUM_TOKENS - 1, [Span(0, 0, SRC)])


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_lost_write_is_named_with_its_counts(fabric: str) -> None:
    async with pair(fabric, context=False, stall_s=0.2) as both:
        fetch, request = await started(both)
        both.prefiller.messenger.inject("drop", 2)
        both.run(both.prefiller.messenger.begin_step([whole(request)]), 1, SRC)
        with pytest.raises(ShortCountError, match="'r'") as raised:
            await within(fetch)
        error = raised.value
        assert error.rows_landed < error.rows_expected
        assert f"{error.rows_landed} of {error.rows_expected} rows landed" in str(error)
        outcome = await within(request.outcome())
        assert (outcome.ok, outcome.reason) == (False, Reason.short_count)
        assert await within(request.released()) == error.rows_expected  # all were posted, as far as the sender knows


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_corrupted_write_keeps_the_count_and_the_source(fabric: str) -> None:
    async with pair(fabric, context=False) as both:
        fetch, request = await started(both)
        both.prefiller.messenger.inject("flip", 1)
        both.run(both.prefiller.messenger.begin_step([whole(request)]), 1, SRC)
        await within(fetch)
        both.prefiller.cache.check(1, range(LAYERS), SRC, 0, NUM_TOKENS - 1)
        with pytest.raises(AssertionError, match="belongs"):
            both.decoder.cache.check(1, range(LAYERS), DST, 0, NUM_TOKENS - 1)


@pytest.mark.parametrize(("num_bumps", "said"), [(LAYERS - 1, "signal 3 never came"), (LAYERS + 1, "more layers ran")])
async def test_a_step_that_runs_fewer_or_more_layers_is_named(num_bumps: int, said: str) -> None:
    async with pair("net", context=False) as both:
        fetch, request = await started(both)
        step = both.prefiller.messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, SRC)])])
        with pytest.raises(LocalProtocolError, match="4 layer signals, 3") if num_bumps > LAYERS else nullcontext():
            both.run(step, 1, SRC, num_bumps)
        other = both.fetch("other", PAGE_TOKENS + 1, [5])
        second = await both.asked()
        second.accept()
        both.run(both.prefiller.messenger.begin_step([Chunk(second, 0, PAGE_TOKENS, [Span(0, 0, [6])])]), 2, [6])
        with pytest.raises(StepFaultError, match=said):
            await within(fetch)
        assert (await within(request.outcome())).reason is Reason.step_fault
        await within(other)  # the next step is sound
        both.decoder.cache.check(2, range(LAYERS), [5], 0, PAGE_TOKENS)


async def test_a_step_that_never_ends_fails_at_its_deadline() -> None:
    async with pair("net", context=False, step_timeout_s=0.5) as both:
        fetch, request = await started(both)
        both.run(both.prefiller.messenger.begin_step([whole(request)]), 1, SRC, num_bumps=1)
        with pytest.raises(StepFaultError, match=f"1 of {LAYERS} layer signals"):
            await within(fetch)


async def test_busy_and_refused_say_so_and_free_the_pages() -> None:
    async with pair("net") as both:
        fetch = both.fetch("r", NUM_TOKENS, DST)
        (await both.asked()).busy("all pages are taken", retry_after_s=0.5)
        with pytest.raises(BusyError, match="all pages are taken") as busy:
            await within(fetch)
        assert busy.value.retry_after_s == 0.5
        await within(fetch.released())
        fetch = both.fetch("r", NUM_TOKENS, DST)
        (await both.asked()).refuse("no such adapter")
        with pytest.raises(RefusedError, match="no such adapter"):
            await within(fetch)
        await within(fetch.released())


async def test_an_engine_may_give_up_in_the_middle() -> None:
    async with pair("net", context=False) as both:
        fetch, request = await started(both)
        step = both.prefiller.messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, SRC)])])
        both.run(step, 1, SRC, num_bumps=1)
        request.fail("out of memory")
        with pytest.raises(EngineFailedError, match="out of memory"):
            await within(fetch)
        assert (await within(request.outcome())).reason is Reason.engine
        rows = await within(request.released())
        assert rows <= PAGE_TOKENS * LAYERS * 4
        # The forward goes on with the others; nothing more of the request is sent.
        both.prefiller.messenger.begin_step([Chunk(request, PAGE_TOKENS, NUM_TOKENS - 1, [Span(0, 0, SRC)])])
        assert both.prefiller.messenger.stats()["posted_rows"] == rows


async def test_the_time_allowed_is_kept_on_both_sides() -> None:
    async with pair("net") as both:
        fetch = both.fetch("r", NUM_TOKENS, DST, time_allowed_s=1.0)
        request = await both.asked()
        with pytest.raises(TransferTimeout, match="0 of"):
            await within(fetch)
        assert (await within(request.outcome())).reason is Reason.timeout


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("who", ["prefiller", "decoder"])
async def test_a_peer_that_closes_fails_the_requests_of_the_other(fabric: str, who: str) -> None:
    async with pair(fabric) as both:
        fetch, request = await started(both)
        both.run(both.prefiller.messenger.begin_step([Chunk(request, 0, PAGE_TOKENS, [Span(0, 0, SRC)])]), 1, SRC)
        # Over shm both ends are in this process: libfabric 1.17 crashes when one closes under writes of the other.
        await until(lambda: fetch.rows_landed == PAGE_TOKENS * ROWS_A_POSITION, "the first chunk landed")
        await within(getattr(both, who).messenger.close())
        with pytest.raises(kvmsgr.errors.TransferError) as raised:
            await within(fetch)
        assert raised.value.reason is Reason.closed
        outcome = await within(request.outcome())
        assert (outcome.ok, outcome.reason) == (False, Reason.closed)
        await within(request.released())


async def test_a_connection_that_breaks_fails_its_requests_and_the_next_one_dials_again() -> None:
    async with pair("net", context=False) as both:
        fetch, request = await started(both)
        (peer,) = both.decoder.node.peers
        assert peer._connection is not None
        assert peer._connection._transport is not None
        peer._connection._transport.abort()
        with pytest.raises(PeerLostError, match="ended"):
            await within(fetch)
        assert (await within(request.outcome())).reason is Reason.peer_lost
        await within(request.released())
        await within(fetch.released())  # by the fence: the endpoint of that epoch is closed
        fetch = both.fetch("s", NUM_TOKENS, DST)
        request = await both.asked()
        request.accept()
        both.run(both.prefiller.messenger.begin_step([whole(request)]), 1, SRC)
        await within(fetch)
        both.decoder.cache.check(1, range(LAYERS), DST, 0, NUM_TOKENS - 1)


async def test_nobody_answers() -> None:
    async with pair("net") as both:
        gone = kvmsgr.Descriptor("unix:/nonexistent/socket", "0" * 32, "gone")
        fetch = both.decoder.messenger.fetch("r", [gone], [1, 2], [Span(0, 0, [0])])
        with pytest.raises(PeerLostError, match="cannot reach gone"):
            await within(fetch)
        await within(fetch.released())


async def test_a_black_hole_is_given_up_in_time() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    async with pair("net", connect_timeout_s=0.2) as both:
        hole = kvmsgr.Descriptor(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", "0" * 32, "hole")
        fetch = both.decoder.messenger.fetch("r", [hole], [1, 2], [Span(0, 0, [0])])
        with pytest.raises(TransferTimeout, match=r"not ready within 0\.2 s"):
            await within(fetch)
        await within(fetch.released())
    server.close()


async def test_a_restarted_messenger_is_another_peer() -> None:
    async with pair("net") as both:
        known = both.prefiller.messenger.descriptor
        old = kvmsgr.Descriptor(known.address, "f" * 32, known.name)
        fetch = both.decoder.messenger.fetch("r", [old], [1, 2], [Span(0, 0, [0])])
        with pytest.raises(PeerLostError, match="restarted"):
            await within(fetch)


@pytest.mark.parametrize("different", ["model", "layout", "provider"])
async def test_what_must_match_is_compared_before_any_page_is_given(different: str) -> None:
    mine, theirs = TestCache(SHAPES[0]), TestCache(SHAPES[0])
    if different == "layout":
        theirs.parts[0][0] = theirs.parts[0][0].astype("float64")
    ours = kvmsgr.Config(name="ours", model="a", fabric="net")
    other = kvmsgr.Config(
        name="other", model="b" if different == "model" else "a", fabric="shm" if different == "provider" else "net"
    )
    async with (
        await kvmsgr.Messenger.open(ours, mine.describe()) as decoder,
        await kvmsgr.Messenger.open(other, theirs.describe()) as prefiller,
    ):
        fetch = decoder.fetch("r", [prefiller.descriptor], [1, 2], [Span(0, 0, [0])])
        values = {"model": ("'a'", "'b'"), "layout": ("float32", "float64"), "provider": ("net", "shm")}[different]
        with pytest.raises(IncompatiblePeerError, match="differs") as raised:
            await within(fetch)
        assert all(value in str(raised.value) for value in values)


async def test_what_an_engine_gets_wrong_is_told_at_once() -> None:
    async with pair("net", context=False) as both:
        decoder = both.decoder.messenger
        peer = [both.prefiller.messenger.descriptor]
        with pytest.raises(LayoutError, match="there are 12"):
            decoder.fetch("r", peer, [1, 2], [Span(0, 0, [12])])
        with pytest.raises(LayoutError, match="twice"):
            decoder.fetch("r", peer, range(9), [Span(0, 0, [1, 1])])
        with pytest.raises(LayoutError, match="group 1"):
            decoder.fetch("r", peer, [1, 2], [Span(1, 0, [1])])
        with pytest.raises(AddressError, match="expected"):
            decoder.fetch("r", [kvmsgr.Descriptor("nowhere", "0" * 32)], [1, 2], [Span(0, 0, [1])])
        with pytest.raises(ConfigError, match="names no source"):
            decoder.fetch("r", [], [1, 2], [Span(0, 0, [1])])
        with pytest.raises(ConfigError, match="no tokens"):
            decoder.fetch("r", peer, [], [])
        with pytest.raises(LayoutError, match=r"group 'kv': no span says where it goes.*Span\(0, 8, \[\]\)"):
            decoder.fetch("r", peer, range(9), [])
        with pytest.raises(LayoutError, match="gives 1 pages from position 20 on, where nothing comes"):
            decoder.fetch("r", peer, range(9), [Span(0, 20, [1])])
        fetch, request = await started(both)
        with pytest.raises(RefusedError, match="already"):
            both.fetch("r", NUM_TOKENS, [6, 7])
        with pytest.raises(LayoutError, match="may still be written to"):
            both.fetch("s", NUM_TOKENS, DST)
        prefiller = both.prefiller.messenger
        with pytest.raises(LayoutError, match=r"\[2, 4\) was announced, expected is one that starts at 0"):
            prefiller.begin_step([Chunk(request, 2, 4, [Span(0, 0, SRC)])])
        with pytest.raises(LayoutError, match="no source page"):
            prefiller.begin_step([Chunk(request, 0, PAGE_TOKENS, [])])
        first = prefiller.begin_step([Chunk(request, 0, 2, [Span(0, 0, SRC)])])
        second = prefiller.begin_step([Chunk(request, 2, 4, [Span(0, 0, SRC)])])
        with pytest.raises(LocalProtocolError, match="abandon the later one first"):
            first.abandon()
        second.abandon()
        first.abandon()
        both.run(prefiller.begin_step([whole(request)]), 1, SRC)  # nothing of all this has left a trace
        await within(fetch)
        both.decoder.cache.check(1, range(LAYERS), DST, 0, NUM_TOKENS - 1)


async def test_a_closed_messenger_takes_nothing_more() -> None:
    async with pair("net") as both:
        await within(both.decoder.messenger.close())
        with pytest.raises(MessengerClosedError):
            both.fetch("r", NUM_TOKENS, DST)
        await within(both.prefiller.messenger.close())
        assert [request async for request in both.prefiller.messenger.requests()] == []


async def test_addresses_and_fabrics_that_cannot_be() -> None:
    cache = TestCache(SHAPES[0]).describe()
    with pytest.raises(ConfigError, match="sockets"):
        kvmsgr.Config(name="x", model="m", fabric="sockets")
    with pytest.raises(AddressError, match="expected"):
        kvmsgr.Config(name="x", model="m", listen="127.0.0.1:0")
    with pytest.raises(ConfigError, match="advertise"):
        kvmsgr.Config(name="x", model="m", listen="tcp://0.0.0.0:0")
    with pytest.raises(FabricUnavailableError, match="tcp"):
        await kvmsgr.Messenger.open(
            kvmsgr.Config(name="x", model="m", fabric="tcp", fabric_address="203.0.113.1"), cache
        )
    async with pair("net") as both:
        taken = both.prefiller.messenger.descriptor.address
        with pytest.raises(AddressError, match=taken):
            await kvmsgr.Messenger.open(kvmsgr.Config(name="x", model="m", fabric="net", listen=taken), cache)
