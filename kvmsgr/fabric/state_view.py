"""The state file of a messenger of this host, read only. The messenger need not be running."""

from __future__ import annotations

import os

from kvmsgr._ext import native
from kvmsgr._ext.native import GroupPages, Info, Leg
from kvmsgr.errors import StateFileError

__all__ = ["GroupPages", "Info", "Leg", "StateView", "monotonic_ns"]

monotonic_ns = native.monotonic_ns  # the clock that stamps what the file holds


class StateView:
    """What a messenger wrote into its state file. Nothing here waits for it, or changes the file.

    Raises:
        StateFileError: It is not a state file that this kvmsgr can read.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._state = native.StateFile(path, writable=False)
        except ValueError as error:
            raise StateFileError(str(error)) from error

    def info(self) -> Info:
        """Who the messenger is."""
        return self._state.info()

    def pages(self) -> list[GroupPages]:
        """Pages of each cache group, and how many are held."""
        return self._state.pages()

    def legs(self) -> list[Leg]:
        """Every leg that is alive."""
        return self._state.legs()

    @property
    def quarantined(self) -> int:
        """Pages that a lost peer may still write into."""
        return self._state.quarantined

    @property
    def poller_seen_ns(self) -> int:
        """When the polling thread last looked at the clock; 0: never."""
        return self._state.poller_seen_ns

    def landed_rows(self, request_id: str) -> int | None:
        """Rows landed for the youngest attempt at a request, None when there is none."""
        attempt = self._state.find(request_id)
        return None if attempt is None else self._state.attempt_rows(attempt)

    def __enter__(self) -> StateView:
        return self

    def __exit__(self, *exc: object) -> None:
        self._state.close()
