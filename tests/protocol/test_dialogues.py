"""The dialogues of the test vectors, with a real messenger on one side and the script on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest

from kvmsgr import Descriptor, Fetch, PrefillRequest
from kvmsgr.errors import TransferError
from kvmsgr.runtime.connection import Connection, Receiver
from kvmsgr_protocol import FrameReader, Message, WireError, encode
from kvmsgr_protocol.answer import from_json, to_json
from tests.loopback.engines import settle, until, within
from tests.protocol.cluster import Nodes, nodes
from tools.specification.dialogues import dialogues
from tools.specification.script import HELLO, PROVIDER

END = {"t": "(closed)"}


class Wire(Protocol):
    """The script's end of a control connection."""

    heard: asyncio.Queue[dict[str, Any]]
    sources: list[Descriptor] | None  # what is fetched from, where it is not the prefillers

    def send(self, data: bytes) -> None: ...


class Socket:
    """A connection of its own."""

    def __init__(self, sources: list[Descriptor] | None = None) -> None:
        self.heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sources = sources
        self.over = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    def send(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear what comes until the other side has closed."""
        self._writer = writer
        try:
            await self._read(reader)
        finally:
            writer.close()
            self.over.set()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        while data := await reader.read(1 << 16):
            for message in frames.feed(data):
                self.heard.put_nowait(to_json(message))
        self.heard.put_nowait(END)


class Tap:
    """Sits in a live connection between two messengers. It speaks for one of them, which hears only of the end."""

    sources = None

    def __init__(self, connection: Connection, receiver: Receiver) -> None:
        self.heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._connection, self._receiver = connection, receiver
        connection.attach(self)

    def send(self, data: bytes) -> None:
        assert self._connection._transport is not None
        self._connection._transport.write(data)

    def message_received(self, message: Message) -> None:
        plain = to_json(message)
        if plain.get("request_id") != "first":
            self.heard.put_nowait(plain)

    def frame_broken(self, error: WireError) -> None:
        raise error

    def connection_lost(self, error: Exception | None) -> None:
        self.heard.put_nowait(END)
        self._receiver.connection_lost(error)


class Script:
    """Plays the steps of one dialogue."""

    def __init__(self, nodes: Nodes, wire: Wire) -> None:
        self._nodes, self._wire = nodes, wire
        self._optional: list[dict[str, Any]] = []
        self._request: PrefillRequest | None = None
        self._fetch: Fetch | None = None

    async def play(self, step: dict[str, Any]) -> None:
        match step:
            case {"send": message}:
                self._wire.send(encode(from_json(self._with_attempt(message))))
            case {"bytes": data}:
                self._wire.send(bytes.fromhex(data))
            case {"may": pattern}:
                self._optional.append(pattern)
            case {"expect": pattern}:
                await self._expect(pattern)
            case {"closed": True}:
                await self._expect(END)
            case {"engine": what, **more}:
                await self._engine(what, more)
            case _:
                raise AssertionError(f"a step of no known kind: {step}")

    def _with_attempt(self, message: dict[str, Any]) -> dict[str, Any]:
        """Where the messenger is the decoder, it has chosen the number of the attempt."""
        return message if self._fetch is None else {**message, "attempt": self._fetch.attempt}

    async def _expect(self, pattern: dict[str, Any]) -> None:
        while True:
            heard = await within(self._wire.heard.get())
            if _matches(heard, pattern):
                self._optional.clear()
                return
            assert any(_matches(heard, optional) for optional in self._optional), f"{heard} came, expected is {pattern}"

    async def _engine(self, what: str, more: dict[str, Any]) -> None:
        match what:
            case "accept":
                (await self._asked()).accept()
            case "refuse":
                (await self._asked()).refuse("no")
            case "busy":
                (await self._asked()).busy("not now", more["retry_after_s"])
            case "fail":
                (await self._asked()).fail("out of memory")
            case "preempt":
                request, self._request = await self._asked(), None
                assert await within(request.preempt()) == 0
            case "fetch":
                ask = (more["request_id"], more["num_tokens"], more["pages"], more.get("ranks"))
                self._fetch = self._nodes.fetch(*ask, self._wire.sources)
            case _:
                assert self._fetch is not None
                await self._decoder(self._fetch, what, more)

    async def _asked(self) -> PrefillRequest:
        self._request = self._request or await self._nodes.prefillers[0].asked()
        return self._request

    async def _decoder(self, fetch: Fetch, what: str, more: dict[str, Any]) -> None:
        match what:
            case "cancel":
                fetch.cancel()
            case "has failed":
                with pytest.raises(TransferError) as caught:
                    await within(fetch)
                assert str(caught.value.reason) == more["code"]
            case "pages are held":
                await until(lambda: fetch.quarantine is not None, "the pages are in quarantine")
                await settle(self._nodes.decoder)
                assert fetch.quarantine is not None
            case "pages are free":
                await within(fetch.released())
            case _:
                raise AssertionError(f"an engine cannot {what}")


def _matches(heard: dict[str, Any], pattern: dict[str, Any]) -> bool:
    return all(key in heard and heard[key] == value for key, value in pattern.items())


@asynccontextmanager
async def connected(nodes: Nodes) -> AsyncIterator[Wire]:
    """A control connection to a prefiller on which nothing was said."""
    host, port = nodes.prefillers[0].messenger.descriptor.address.removeprefix("tcp://").split(":")
    socket = Socket()
    running = asyncio.ensure_future(socket.run(*await asyncio.open_connection(host, int(port))))
    try:
        yield socket
        await within(running)
    finally:
        running.cancel()


@asynccontextmanager
async def dialled() -> AsyncIterator[Wire]:
    """One that the decoder opens when it fetches."""
    socket = Socket()
    async with await asyncio.start_server(socket.run, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        socket.sources = [Descriptor(f"tcp://{host}:{port}", HELLO.incarnation)]
        yield socket
        await within(socket.over.wait())


@asynccontextmanager
async def live(nodes: Nodes, implementation: str) -> AsyncIterator[Wire]:
    """One that is live, over a fabric; the script speaks for the other side, and for one of two prefillers."""
    fetch = nodes.fetch("first", 5, [0])
    requests = [await side.asked() for side in nodes.prefillers]
    for request in requests:
        request.accept()
    name = nodes.prefillers[0].node.config.name
    (source,) = (peer for peer in fetch._attempt.slots if peer.name == name)
    peer = source if implementation == "prefiller" else requests[0].peer
    assert peer._connection is not None
    yield Tap(peer._connection, peer)


@pytest.mark.parametrize(
    "dialogue", dialogues(), ids=lambda each: f"{each['implementation']}, {each['cache']}: {each['name']}"
)
async def test_a_messenger_answers_as_written(dialogue: dict[str, Any]) -> None:
    async with nodes(dialogue["cache"], PROVIDER) as messengers:
        match dialogue["begins"]:
            case "connected":
                begin = connected(messengers)
            case "dialled":
                begin = dialled()
            case _:
                begin = live(messengers, dialogue["implementation"])
        async with begin as wire:
            script = Script(messengers, wire)
            for step in dialogue["steps"]:
                await script.play(step)
