"""What a worker and its lead say to each other, over a Unix socket of one host.

worker  Join(rank)                    ->
                                      <-  lead  Welcome(counters), with the descriptor of their memory; or Refused
worker  Publish(memories, arrays),    ->
        with a descriptor a memory    <-  lead  Accepted; or Refused

Then nothing more is said: that the socket ends says the rest. Packets (SOCK_SEQPACKET) come whole, with their
descriptors, or not at all, so that there is no half message to wait for.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvmsgr.address import Unix, parse
from kvmsgr.errors import AddressError

VERSION: Final = 1
"""Of these messages; a worker of another version is refused."""
MAX_PACKET_BYTES: Final = 128 << 10
MAX_MEMORIES: Final = 253  # Linux passes no more descriptors with a packet

LayerCounters = Literal["lead", "rank"]

_I63 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Size = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_Name = Annotated[str, Meta(max_length=128)]
_MAX_AXES = 16


class _Said(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class SharedArray(Struct, frozen=True, array_like=True):
    """An array by its place in one of the memories of its message; otherwise as `RawArray`."""

    memory: _U63
    offset_bytes: _U63
    shape: Annotated[tuple[_Size, ...], Meta(max_length=_MAX_AXES)]
    strides_bytes: Annotated[tuple[_I63, ...], Meta(max_length=_MAX_AXES)]
    dtype: _Name
    item_bytes: _Size


class SharedGroup(Struct, frozen=True):
    """A `CacheGroup`."""

    name: _Name
    parts: tuple[tuple[SharedArray, ...], ...]
    dims: _Name
    head_start: _I63
    total_heads: _I63 | None
    layers: tuple[_I63, ...] | None
    recurrent: bool


class SharedContext(Struct, frozen=True):
    """A `ContextBuffer`."""

    name: _Name
    array: SharedArray


class OfferedMemory(Struct, frozen=True):
    """What a descriptor stands for."""

    kind: _Name
    num_bytes: _Size


class Join(_Said, frozen=True):
    """Which rank the worker is; the first thing it says."""

    version: int
    rank: int


class Welcome(_Said, frozen=True):
    """The worker is that rank. With it comes the descriptor of the counters' memory, host memory in any case.

    Args:
        layer_counters: Who bumps: rank 0 for all, or each rank for itself.
        num_ranks: Ranks of the messenger.
        num_streams: Streams of the engine, each with its layer counter or counters.
        counter_bytes: Memory of a counter.
    """

    num_descriptors: ClassVar[int] = 1

    layer_counters: LayerCounters
    num_ranks: int
    num_streams: int
    counter_bytes: int

    @property
    def num_counters(self) -> int:
        """Counters in the memory."""
        return num_counters(self.layer_counters, self.num_ranks, self.num_streams)


class Publish(_Said, frozen=True):
    """What the rank holds. With it comes a descriptor a memory, in the same order."""

    memories: Annotated[tuple[OfferedMemory, ...], Meta(max_length=MAX_MEMORIES)]
    groups: tuple[SharedGroup, ...]
    context: tuple[SharedContext, ...]
    interfaces: tuple[_Name | None, ...]


class Accepted(_Said, frozen=True):
    """Everything is mapped."""

    num_descriptors: ClassVar[int] = 0


class Refused(_Said, frozen=True):
    """The lead has no use for the worker, and ends the link."""

    why: str


Request = Join | Publish
Answer = Welcome | Accepted | Refused

REQUESTS: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)

_encode = msgspec.msgpack.Encoder().encode
_M = TypeVar("_M")


class PacketError(Exception):
    """A packet is too large, or none of the messages."""


def unix_path(address: str) -> str:
    """The path in an address "unix:path".

    Raises:
        AddressError: It is another kind of address: descriptors pass over Unix sockets alone.
    """
    parsed = parse(address)
    if not isinstance(parsed, Unix):
        raise AddressError(
            f'workers and their lead meet at {address!r}; memory can be passed on over "unix:path" alone'
        )
    return parsed.path


def num_counters(layer_counters: LayerCounters, num_ranks: int, num_streams: int) -> int:
    """How many layer counters a messenger has."""
    return num_streams * (1 if layer_counters == "lead" else num_ranks)


def counter_index(layer_counters: LayerCounters, num_ranks: int, rank: int, stream: int) -> int:
    """Which of the messenger's counters a rank bumps for a stream: all of a stream's counters lie together."""
    return stream if layer_counters == "lead" else stream * num_ranks + rank


def open_socket() -> socket.socket:
    """A socket for these messages, large enough for the largest."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_PACKET_BYTES)  # the kernel doubles it, for its own needs
    return opened


def send(link: socket.socket, message: Request | Answer, descriptors: Sequence[int] = ()) -> None:
    """Send one packet.

    Raises:
        PacketError: It is too large.
        OSError: The other end is closed, or does not take it in time.
    """
    packet = _encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise PacketError(f"{type(message).__name__} has {len(packet)} bytes; at most {MAX_PACKET_BYTES} can be sent")
    socket.send_fds(link, [packet], descriptors)


@contextmanager
def received(link: socket.socket, decoder: msgspec.msgpack.Decoder[_M]) -> Iterator[tuple[_M | None, list[int]]]:
    """Take one packet: its message (None: the other end is closed) and its descriptors, which are closed at the end.

    Raises:
        PacketError: It is none of the messages.
        BlockingIOError, TimeoutError: There is none (in time).
    """
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(MAX_MEMORIES * descriptors.itemsize)
    try:
        try:
            packet, ancillary, flags, _ = link.recvmsg(MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            packet, ancillary, flags = b"", [], 0
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if flags & socket.MSG_TRUNC:
            raise PacketError(f"a packet has more than {MAX_PACKET_BYTES} bytes")
        if flags & socket.MSG_CTRUNC:
            raise PacketError("descriptors of a packet were lost: this process may open no more files")
        try:
            message = decoder.decode(packet) if packet else None
        except (msgspec.DecodeError, RecursionError) as error:
            raise PacketError(f"a packet of {len(packet)} bytes holds no valid message: {error}") from error
        yield message, list(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
