"""Errors of the wire.

WireError
├── FrameTooLarge       a frame announces more bytes than are allowed
├── BadFrame            a frame holds no valid message
└── VersionMismatch     the two sides speak no common version
"""

from __future__ import annotations


class WireError(ValueError):
    """Bytes or values that do not follow the protocol."""


class FrameTooLarge(WireError):
    """A frame is larger than the limit.

    Args:
        num_bytes: Length of the frame's body.
        limit_bytes: Largest length allowed.
    """

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"frame of {num_bytes} bytes, at most {limit_bytes} are allowed; close the connection")
        self.num_bytes, self.limit_bytes = num_bytes, limit_bytes


class BadFrame(WireError):
    """A frame's body is no valid message."""


class VersionMismatch(WireError):
    """The two sides speak no common protocol version.

    Args:
        ours: Lowest and highest version spoken here.
        theirs: Lowest and highest version the peer offers.
    """

    def __init__(self, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        super().__init__(
            f"no common protocol version: ours are {ours[0]} to {ours[1]}, theirs are {theirs[0]} to {theirs[1]}; "
            "upgrade the older side"
        )
        self.ours, self.theirs = ours, theirs
