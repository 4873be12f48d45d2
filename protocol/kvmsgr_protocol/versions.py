"""Versions of the protocol and how two sides agree on one."""

from __future__ import annotations

from typing import Final

from .errors import VersionMismatch

PROTOCOL_VERSIONS: Final = (1, 1)
"""Lowest and highest version this package speaks: the current one, and the one before it where there is one."""


def negotiate(ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """Return the highest version both ranges (lowest, highest) hold.

    Raises:
        VersionMismatch: No version is in both.
    """
    version = min(ours[1], theirs[1])
    if version < max(ours[0], theirs[0]):
        raise VersionMismatch(ours, theirs)
    return version
