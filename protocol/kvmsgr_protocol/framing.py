"""Frames: the length of the body as 4 bytes big-endian, then the body, one msgpack message."""

from __future__ import annotations

from typing import Final

import msgspec

from .errors import BadFrame, FrameTooLarge
from .messages import Message

HEADER_BYTES: Final = 4
DEFAULT_MAX_FRAME_BYTES: Final = 16 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def _decode(body: bytes | memoryview) -> Message:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        start = bytes(body[:16]).hex(" ")
        raise BadFrame(f"frame of {len(body)} bytes (starts {start}) holds no valid message: {error}") from error


def encode(message: Message, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> bytes:
    """Return `message` as one frame.

    The frame is read back before it is returned, so that a value out of bounds is found here and not by the peer,
    which would end the connection.

    Raises:
        BadFrame: A field is out of its bounds.
        FrameTooLarge: The body is larger than `max_frame_bytes`.
    """
    try:
        body = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise BadFrame(f"{type(message).__name__} cannot be written: {error}") from error
    if len(body) > max_frame_bytes:
        raise FrameTooLarge(len(body), max_frame_bytes)
    _decode(body)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameReader:
    """Takes bytes as they come and gives messages. Holds at most one frame and what came with it.

    After an error the stream has no meaning any more: close the connection.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Take `data` and return the messages that are complete now.

        Raises:
            FrameTooLarge: A header announces more than `max_frame_bytes`; found before the body comes.
            BadFrame: A body is no valid message.
        """
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            num_bytes = int.from_bytes(self._buffer[start:body], "big")
            if num_bytes > self._max_frame_bytes:
                raise FrameTooLarge(num_bytes, self._max_frame_bytes)
            if len(self._buffer) < body + num_bytes:
                break
            start = body + num_bytes
            messages.append(_decode(bytes(self._buffer[body:start])))
        del self._buffer[:start]
        return messages
