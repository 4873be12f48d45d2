"""The control connection: frames in, frames out, over TCP or a unix socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from kvmsgr.address import Tcp, Unix
from kvmsgr.errors import AddressError
from kvmsgr_protocol import FrameReader, Message, WireError, encode

PATIENCE_S = 1.0


class Receiver(Protocol):
    """Who hears what a connection brings."""

    def message_received(self, message: Message) -> None: ...
    def frame_broken(self, error: WireError) -> None: ...
    def connection_lost(self, error: Exception | None) -> None: ...


class Connection(asyncio.Protocol):
    """One control connection; `attach` names its receiver."""

    def __init__(self, on_made: Callable[[Connection], None]) -> None:
        self._on_made = on_made
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._closed = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def attach(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        if self._closed or self._receiver is None:
            return
        try:
            messages = self._reader.feed(data)
        except WireError as error:
            self._receiver.frame_broken(error)
            return
        for message in messages:
            if self._closed:
                return
            self._receiver.message_received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)
        if not self._closed and self._receiver is not None:
            self._receiver.connection_lost(exc)

    def send(self, message: Message) -> None:
        """Queue a message; nothing is sent once the connection is closing."""
        if self._transport is not None and not self._closed and not self._transport.is_closing():
            self._transport.write(encode(message))

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that wait for the peer to read."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self) -> None:
        """Send what is queued, then close. The receiver hears nothing more.

        Our side is closed first, and the rest when the peer has closed its own: closing both at once while the peer is
        sending would take our last message from it. A peer that does not close is cut off after `PATIENCE_S`.
        """
        self._closed = True
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except OSError:  # the peer has cut it off, and what it sent before is still being read
            self._transport.abort()
            return
        deadline = asyncio.get_running_loop().call_later(PATIENCE_S, self._transport.abort)
        self.ended.add_done_callback(lambda _: deadline.cancel())


async def dial(address: Tcp | Unix, on_made: Callable[[Connection], None]) -> None:
    """Connect to a control socket.

    Raises:
        OSError: Nobody answers there.
    """
    loop = asyncio.get_running_loop()
    if isinstance(address, Unix):
        await loop.create_unix_connection(lambda: Connection(on_made), address.path)
    else:
        await loop.create_connection(lambda: Connection(on_made), address.host, address.port)


async def listen(address: Tcp | Unix, on_made: Callable[[Connection], None]) -> tuple[asyncio.Server, Tcp | Unix]:
    """Listen on a control socket; returns the server and the address it is bound to.

    Raises:
        AddressError: The address is in use, or not ours.
    """
    loop = asyncio.get_running_loop()
    try:
        if isinstance(address, Unix):
            server = await loop.create_unix_server(lambda: Connection(on_made), sock=_bind(address.path))
            return server, address
        server = await loop.create_server(lambda: Connection(on_made), address.host, address.port)
    except OSError as error:
        raise AddressError(f"cannot listen on {address}: {error}; choose another address, or port 0 for any") from error
    return server, Tcp(address.host, server.sockets[0].getsockname()[1])


def release(address: Tcp | Unix) -> None:
    """Remove what a server that is closed leaves behind."""
    if isinstance(address, Unix):
        Path(address.path).unlink(missing_ok=True)


def _bind(path: str) -> socket.socket:
    """A unix socket that only this user can reach, from the first moment on. One of a dead process is replaced."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _answers(path):
            Path(path).unlink(missing_ok=True)
        bound.bind(path)
        Path(path).chmod(0o600)  # before it listens, so nobody is early
    except OSError:
        bound.close()
        raise
    return bound


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0
