"""The dialogues of the test vectors, with a real messenger on one side and the script on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest

from kvmsgr import Fetch, PrefillRequest
from kvmsgr.errors import TransferError
from kvmsgr.runtime.connection import Connection, Receiver
from kvmsgr_protocol import FrameReader, Message, WireError, encode
from kvmsgr_protocol.answer import from_json, to_json
from tests.loopback.engines import Pair, pair, settle, until, within
from tools.specification.dialogues import dialogues

FABRIC = "net"
END = {"t": "(closed)"}


class Wire(Protocol):
    """The script's end of a control connection."""

    heard: asyncio.Queue[dict[str, Any]]

    def send(self, data: bytes) -> None: ...


class Socket:
    """A connection of its own."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        while data := await reader.read(1 << 16):
            for message in frames.feed(data):
                self.heard.put_nowait(to_json(message))
        self.heard.put_nowait(END)


class Tap:
    """Sits in a live connection between two messengers. It speaks for one of them, which hears only of the end."""

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

    def __init__(self, both: Pair, wire: Wire) -> None:
        self._both, self._wire = both, wire
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
            case "fetch":
                self._fetch = self._both.fetch(more["request_id"], more["num_tokens"], more["pages"])
            case _:
                assert self._fetch is not None
                await self._decoder(self._fetch, what, more)

    async def _asked(self) -> PrefillRequest:
        self._request = self._request or await self._both.asked()
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
                await settle(self._both.decoder)
                assert fetch.quarantine is not None
            case "pages are free":
                await within(fetch.released())
            case _:
                raise AssertionError(f"an engine cannot {what}")


def _matches(heard: dict[str, Any], pattern: dict[str, Any]) -> bool:
    return all(key in heard and heard[key] == value for key, value in pattern.items())


@asynccontextmanager
async def connected(both: Pair) -> AsyncIterator[Wire]:
    """A control connection on which nothing was said."""
    host, port = both.prefiller.messenger.descriptor.address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    socket = Socket(writer)
    reading = asyncio.ensure_future(socket.read(reader))
    try:
        yield socket
        await within(reading)
    finally:
        reading.cancel()
        writer.close()


@asynccontextmanager
async def live(both: Pair, implementation: str) -> AsyncIterator[Wire]:
    """One that is live, over a fabric; the script speaks for the other side."""
    fetch = both.fetch("first", 5, [0])
    request = await both.asked()
    request.accept()
    (peer,) = fetch.slots if implementation == "prefiller" else (request.peer,)
    assert peer._connection is not None
    yield Tap(peer._connection, peer)


@pytest.mark.parametrize(
    "dialogue", dialogues(), ids=lambda dialogue: f"{dialogue['implementation']}: {dialogue['name']}"
)
async def test_a_messenger_answers_as_written(dialogue: dict[str, Any]) -> None:
    async with pair(FABRIC, context=False) as both:
        begin = connected(both) if dialogue["begins"] == "connected" else live(both, dialogue["implementation"])
        async with begin as wire:
            script = Script(both, wire)
            for step in dialogue["steps"]:
                await script.play(step)
