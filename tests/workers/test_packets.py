"""Packets between a worker and its lead."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from kvmsgr.device.worker_messages import (
    MAX_PACKET_BYTES,
    REQUESTS,
    Join,
    OfferedMemory,
    PacketError,
    Publish,
    counter_index,
    num_counters,
    open_socket,
    received,
    send,
)

from .leftovers import nothing_left

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Closed at the end, with nothing left."""
    with nothing_left():
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, other:
            yield one, other


def publish(num_bytes: int) -> Publish:
    """A message whose packet has so many bytes."""
    memories = (OfferedMemory("host", 1),)
    size = len(msgspec.msgpack.encode(Publish(memories, (), (), ("",) * 1000)))
    fill = (num_bytes - size) // 127  # names of 128 characters take 130 bytes where an empty one takes 1
    return Publish(memories, (), (), ("x" * 126,) * fill + ("",) * (1000 - fill))


def test_descriptors_come_along_and_are_closed_afterwards(pair: Pair) -> None:
    read, write = os.pipe()
    send(pair[0], Join(1, 2), [write, write])
    os.close(write)
    with received(pair[1], REQUESTS) as (message, descriptors):
        assert message == Join(1, 2)
        assert len(descriptors) == 2
        assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
        os.write(descriptors[1], b"x")
        os.set_blocking(read, False)
        assert os.read(read, 9) == b"x"
    assert os.read(read, 9) == b""  # no writer is left
    os.close(read)


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"\xc1garbage", "8 bytes holds no valid message"),
        (msgspec.msgpack.encode({"type": "Leave"}), "Invalid value 'Leave'"),
        (msgspec.msgpack.encode({"type": "Join", "version": 1, "rank": 0, "more": 1}), "unknown field `more`"),
        (b"\x91" * 100_000, "holds no valid message"),
        (b" " * (MAX_PACKET_BYTES + 1), "more than 131072 bytes"),
    ],
)
def test_what_is_no_message_is_refused_and_its_descriptors_are_closed(pair: Pair, packet: bytes, why: str) -> None:
    socket.send_fds(pair[0], [packet], [pair[0].fileno()] * 5)
    with pytest.raises(PacketError, match=why), received(pair[1], REQUESTS):
        pytest.fail("it was taken for a message")


def test_a_packet_may_be_as_large_as_allowed_and_no_larger(pair: Pair) -> None:
    with open_socket() as one:  # its send buffer is the one that matters
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    largest = publish(MAX_PACKET_BYTES)
    assert MAX_PACKET_BYTES - 200 < len(msgspec.msgpack.encode(largest)) <= MAX_PACKET_BYTES
    pair[0].setblocking(False)
    send(pair[0], largest)
    with received(pair[1], REQUESTS) as (message, _):
        assert message == largest
    with pytest.raises(PacketError, match="at most 131072 can be sent"):
        send(pair[0], publish(MAX_PACKET_BYTES + 1000))


@pytest.mark.parametrize("unread", [False, True])
def test_the_end_of_the_link_is_no_message(pair: Pair, unread: bool) -> None:
    if unread:  # the kernel then says that the connection was reset
        send(pair[1], Join(1, 1))
    pair[0].close()
    with received(pair[1], REQUESTS) as (message, descriptors):
        assert message is None
        assert descriptors == []


def test_each_counter_belongs_to_one_rank_and_stream() -> None:
    assert [counter_index("rank", 3, rank, stream) for stream in range(2) for rank in range(3)] == list(range(6))
    assert num_counters("rank", 3, 2) == 6
    assert [counter_index("lead", 3, 0, stream) for stream in range(2)] == [0, 1]
    assert num_counters("lead", 3, 2) == 2
