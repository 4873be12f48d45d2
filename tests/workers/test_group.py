"""Workers that join their lead, and what keeps them from it."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvmsgr.device import worker_messages
from kvmsgr.device.cache import Rank, bytes_at
from kvmsgr.device.worker_messages import VERSION, Join, Publish, Refused
from kvmsgr.errors import AddressError, ConfigError, LeadLostError, WorkerRefusedError, WorkersMissingError
from kvmsgr.workers import WorkerGroup, WorkerLink

from .processes import ChildError, address_in, children, joined, until, within


def kv_of(rank: Rank) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The cache of a rank, in this process's mapping."""
    group = rank.cache.groups[0]
    array = group.parts[0][0]
    size = int(np.prod(array.shape)) * array.item_bytes
    return bytes_at(array.address, size, group.keep_alive).view(np.float32).reshape(array.shape)


@pytest.mark.slow
async def test_lead_and_workers_see_each_others_bytes(tmp_path: Path) -> None:
    async with joined(tmp_path, 2) as (group, workers):
        assert group.pids == [worker.pid for worker in workers]
        for number, (rank, worker) in enumerate(zip(group.ranks, workers, strict=True)):
            assert rank.cache.groups[0].head_start == number
            assert rank.cache.groups[0].total_heads == 4
            await worker(f"kv[1, 2, 1, 0, 3] = np.arange(8) + {number}")
            kv = kv_of(rank)
            assert kv[1, 2, 1, 0, 3].tolist() == [number + k for k in range(8)]
            assert np.count_nonzero(kv) == 8 - (number == 0)
            kv[0, 1, 0, 0, 2] = 5
            assert await worker("float(kv[0, 1, 0, 0, 2].sum())") == 40.0
            hidden = rank.context[0].array
            bytes_at(hidden.address, 64, group)[:4] = (1, 2, 3, 4)
            assert await worker("hidden.view(np.uint8)[0, :4].tolist()") == [1, 2, 3, 4]


@pytest.mark.slow
async def test_only_this_user_can_reach_the_socket_and_it_is_gone_once_all_joined(tmp_path: Path) -> None:
    async with children(1) as (worker,):
        listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 1))
        path = tmp_path / "workers"
        await until(path.exists, "it listens")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await worker(f"allocate(); link = WorkerLink.join({address_in(tmp_path)!r}, 0); publish(link)")
        async with await within(listening):
            assert not path.exists()


@pytest.mark.slow
async def test_a_worker_needs_the_native_layer_only_for_its_counter(tmp_path: Path) -> None:
    async with joined(tmp_path, 1) as (group, (worker,)):
        loaded = "[name for name in ('kvmsgr._ext.native', 'asyncio', 'kvmsgr.runtime') if name in sys.modules]"
        assert await worker(loaded) == []
        await worker("counter = link.counter()")
        assert await worker(loaded) == ["kvmsgr._ext.native"]
        await worker("counter.start(3); counter.bump(); counter.bump()")
        (counter,) = group.counters
        assert (counter.ticket, counter.bumps, counter.bumps_of(3)) == (3, 2, 2)


@pytest.mark.slow
async def test_rank_0_alone_bumps_for_all_or_each_rank_its_own(tmp_path: Path) -> None:
    async with joined(tmp_path, 2, num_streams=2, num_slots=16) as (group, (first, second)):
        assert len(group.counters) == 2
        assert group.counters[1].num_slots == 16
        await first("link.counter(1).start(7)")
        assert [counter.ticket for counter in group.counters] == [0, 7]
        with pytest.raises(ChildError, match="LocalProtocolError: rank 1 bumps no layer counter"):
            await second("link.counter()")
        with pytest.raises(ChildError, match="LocalProtocolError: there is no stream 2; the lead has 2"):
            await first("link.counter(2)")
    async with joined(tmp_path, 2, num_streams=2, layer_counters="rank") as (group, workers):
        for rank, worker in enumerate(workers):
            await worker(f"for stream in (0, 1): link.counter(stream).start(10 * stream + {rank} + 1)")
        assert [counter.ticket for counter in group.counters] == [1, 2, 11, 12]


@pytest.mark.slow
async def test_a_counter_outlives_link_and_group(tmp_path: Path) -> None:
    async with joined(tmp_path, 1) as (group, (worker,)):
        counter = group.counters[0]
        await worker("counter = link.counter(); link.close(); link.close(); counter.start(4)")
        group.close()
        group.close()
        await worker("counter.bump()")
        assert (counter.ticket, counter.bumps) == (4, 1)


@pytest.mark.slow
async def test_those_that_are_missing_are_named(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    async with children(3) as (first, twice, wrong):
        listening = asyncio.ensure_future(WorkerGroup.listen(address, 4, timeout_s=2))
        await first(f"link = WorkerLink.join({address!r}, 1)")
        with pytest.raises(ChildError, match=f"WorkerRefusedError: .*rank 1, which pid {first.pid} has joined as"):
            await twice(f"WorkerLink.join({address!r}, 1)")
        with pytest.raises(ChildError, match=r"WorkerRefusedError: .*rank 4; there are ranks 0 to 3"):
            await wrong(f"WorkerLink.join({address!r}, 4)")
        with pytest.raises(WorkersMissingError) as raised:
            await within(listening)
        assert raised.value.ranks == (0, 1, 2, 3)
        for said in (
            "not all came within 2 s",
            f"rank 1 (pid {first.pid}) has joined and published nothing",
            f"pid {twice.pid} was turned away: it is rank 1, which pid {first.pid} has joined as",
            f"pid {wrong.pid} was turned away: it is rank 4; there are ranks 0 to 3",
        ):
            assert said in str(raised.value)
        assert await first("link.wait_for_lead_end(10)") is True
        assert await first("link.lead_alive") is False
    assert not (tmp_path / "workers").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("link._link.send(b'garbage')", "holds no valid message"),
        ("message = ours(); send(link._link, message, [])", "1 memories were named, and 0 handed over"),
        (
            "message = ours(); send(link._link, message, [memory.export()] * 2)",
            "1 memories were named, and 2 handed over",
        ),
        (
            "message = ours(1 << 17); send(link._link, message, [memory.export()])",
            "has 65536 bytes, and 131072 were named",
        ),
        ("message = ours(16); send(link._link, message, [memory.export()])", "of memory 0, which has 16"),
        ("message = ours(); send(link._link, message, [0])", "no memfd"),
        ("message = ours(); send(link._link, message, [os.memfd_create('x', 2)])", "may shrink"),
        (
            "message = ours(kind='cuda'); send(link._link, message, [memory.export()])",
            "kind 'cuda' cannot be mapped here",
        ),
        ("send(link._link, Join(1, 0))", "it joined as rank 0, and then as rank 0"),
    ],
)
async def test_a_rank_that_cannot_be_used_ends_the_wait_on_both_sides(tmp_path: Path, spoil: str, why: str) -> None:
    helpers = """
import msgspec
from kvmsgr.device.handover import describe_rank
from kvmsgr.device.cache import Rank
from kvmsgr.device.worker_messages import *
from kvmsgr.device.worker_messages import send

def ours(num_bytes=1 << 16, kind="host"):
    rank = Rank(kvmsgr.Cache([kvmsgr.CacheGroup.from_tensors([kv], DIMS)]))
    message = describe_rank(rank, [memory])
    return msgspec.structs.replace(message, memories=(OfferedMemory(kind, num_bytes),))
"""
    async with children(1) as (worker,):
        await worker(helpers)
        listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 2))
        await worker(f"allocate(); link = WorkerLink.join({address_in(tmp_path)!r}, 0)")
        await worker(spoil)
        with pytest.raises(WorkerRefusedError, match=why) as raised:
            await within(listening)
        assert raised.value.rank == 0
        with pytest.raises(ChildError) as told:  # what the lead said before it ended the link is not missed
            await worker("publish(link)")
        assert (told.value.kind, told.value.text) == ("WorkerRefusedError", str(raised.value))


@pytest.mark.slow
async def test_what_a_worker_can_see_is_wrong_is_not_sent(tmp_path: Path) -> None:
    async with children(1) as (worker,):
        listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 1))
        await worker(f"allocate(); link = WorkerLink.join({address_in(tmp_path)!r}, 0)")
        with pytest.raises(ChildError, match=r"LayoutError: group 'kv', part 0, array 0 reaches from .*SharedMemory"):
            await worker("mine, kv = kv, np.zeros(SHAPE, np.float32); publish(link)")
        with pytest.raises(ChildError, match=r"ConfigError: Publish has \d+ bytes; at most 131072"):
            await worker(
                "kv = mine; link.publish([kvmsgr.CacheGroup.from_tensors([[kv] * 9999], DIMS)], memories=[memory])"
            )
        await worker("publish(link)")
        with pytest.raises(ChildError, match="LocalProtocolError: rank 0 has published its memory"):
            await worker("publish(link)")
        (await within(listening)).close()


def raw_link(folder: Path) -> socket.socket:
    link = worker_messages.open_socket()
    link.connect(str(folder / "workers"))
    return link


def join(version: int = VERSION) -> bytes:
    return msgspec.msgpack.encode(Join(version, 0))


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"hello", "holds no valid message"),
        (join(version=99), "speaks version 99, the lead 1"),
        (msgspec.msgpack.encode(Publish((), (), (), ())), "before it said which rank it is"),
        (b"x" * (worker_messages.MAX_PACKET_BYTES + 1), "more than 131072 bytes"),
    ],
)
async def test_a_stranger_is_turned_away_and_keeps_nobody_out(tmp_path: Path, packet: bytes, why: str) -> None:
    listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 1, timeout_s=1.0))
    await until((tmp_path / "workers").exists, "it listens")
    with raw_link(tmp_path) as silent, raw_link(tmp_path) as stranger:
        stranger.send(packet)
        stranger.setblocking(False)
        answer: Refused | None = None

        def refused() -> bool:
            nonlocal answer
            try:
                with worker_messages.received(stranger, worker_messages.ANSWERS) as (said, _):
                    assert isinstance(said, Refused)
                    answer = said
                    return True
            except BlockingIOError:
                return False

        await until(refused, "it is refused")
        assert answer is not None
        assert why in answer.why
        with pytest.raises(WorkersMissingError, match=f"pid {os.getpid()} was turned away: .*{why}"):
            await within(listening)
        assert silent.recv(1000) != b""  # it is told why, too
        assert silent.recv(1000) == b""


async def test_another_user_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 1, timeout_s=1.0))
    await until((tmp_path / "workers").exists, "it listens")
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    with pytest.raises(LeadLostError, match=f"user {mine} listens at .*runs as user {mine + 1}"):
        WorkerLink.join(address_in(tmp_path), 0)
    with pytest.raises(WorkersMissingError, match=f"it runs as user {mine}; the lead as user {mine + 1}"):
        await within(listening)


async def test_those_that_connect_and_say_nothing_are_not_collected(tmp_path: Path) -> None:
    listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 1, timeout_s=1.0))
    await until((tmp_path / "workers").exists, "it listens")
    links = [raw_link(tmp_path) for _ in range(65)]
    with pytest.raises(WorkersMissingError, match="64 others have connected and not said which rank they are"):
        await within(listening)
    for link in links:
        link.close()


async def test_it_can_be_cancelled_while_it_waits(tmp_path: Path) -> None:
    listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 1))
    await until((tmp_path / "workers").exists, "it listens")
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    assert not (tmp_path / "workers").exists()


async def test_an_address_in_use_is_refused_and_one_of_a_dead_lead_is_taken(tmp_path: Path) -> None:
    with worker_messages.open_socket() as dead:
        dead.bind(str(tmp_path / "workers"))
    with pytest.raises(WorkersMissingError):
        await WorkerGroup.listen(address_in(tmp_path), 1, timeout_s=0.01)
    with worker_messages.open_socket() as alive:
        alive.bind(str(tmp_path / "workers"))
        alive.listen()
        with pytest.raises(AddressError, match=r"cannot join at unix:.*choose another path"):
            await WorkerGroup.listen(address_in(tmp_path), 1)
    (tmp_path / "a file").touch()
    for path in (tmp_path / "a file", tmp_path / "no folder" / "workers", tmp_path / ("x" * 120)):
        with pytest.raises(AddressError, match="cannot join"):
            await WorkerGroup.listen(f"unix:{path}", 1)
    assert (tmp_path / "a file").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_ranks": 1025}, "num_ranks is 1025"),
        ({"num_ranks": 1, "num_streams": 0}, "num_streams is 0"),
        ({"num_ranks": 1, "layer_counters": "all"}, "layer_counters is 'all'; known are lead, rank"),
    ],
)
async def test_numbers_out_of_bounds_are_refused(tmp_path: Path, options: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        await WorkerGroup.listen(address_in(tmp_path), **options)  # type: ignore[arg-type]  # that is the point


async def test_only_a_unix_address_will_do(tmp_path: Path) -> None:
    for listen in (
        WorkerGroup.listen("tcp://127.0.0.1:0", 1),
        asyncio.to_thread(WorkerLink.join, "tcp://127.0.0.1:1", 0),
    ):
        with pytest.raises(AddressError, match=r"'tcp://.*over \"unix:path\" alone"):
            await listen


async def test_without_a_lead_a_worker_gives_up(tmp_path: Path) -> None:
    with pytest.raises(LeadLostError, match=r"no lead could be reached at unix:.*No such file"):
        await asyncio.to_thread(WorkerLink.join, address_in(tmp_path), 0, timeout_s=0.05)
    (tmp_path / "workers").touch()
    with pytest.raises(LeadLostError, match="Connection refused"):
        await asyncio.to_thread(WorkerLink.join, address_in(tmp_path), 0, timeout_s=0.05)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda link: link.send(b"220 mail"), "what answers at unix:.* is no lead of this version"),
        (lambda link: link.send(msgspec.msgpack.encode(worker_messages.Accepted())), "Accepted with 0 descriptors"),
        (lambda link: link.close(), "has ended, or has ended the link"),
        (lambda link: None, "took no Join, or did not answer it, in time"),
    ],
)
async def test_what_is_no_lead_is_named(tmp_path: Path, answer: Callable[[socket.socket], object], why: str) -> None:
    with worker_messages.open_socket() as listener:
        listener.bind(str(tmp_path / "workers"))
        listener.listen()
        joining = asyncio.ensure_future(asyncio.to_thread(WorkerLink.join, address_in(tmp_path), 0, timeout_s=0.3))
        link, _ = await within(asyncio.to_thread(listener.accept))
        with link:
            answer(link)
            with pytest.raises(LeadLostError, match=why):
                await within(joining)


def test_the_face_is_complete() -> None:
    import kvmsgr.workers

    for name in kvmsgr.workers.__all__:
        assert getattr(kvmsgr.workers, name).__module__.startswith("kvmsgr.")
    with pytest.raises(AttributeError, match="no attribute 'Worker'"):
        kvmsgr.workers.Worker  # noqa: B018
    assert "kvmsgr.runtime.workers" in sys.modules
