"""libfabric through the native poller: opened, tested, and its errors translated once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmsgr._ext import native
from kvmsgr.errors import ConfigError, FabricStuckError, FabricUnavailableError, StepLimitError

from .choice import FabricChoice, candidates
from .leftovers import lock, state_folder, sweep


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """What `open_fabric` needs to know. `local`: every peer is on this host; the rest as in `kvmsgr.Config`."""

    fabric: str
    local: bool
    address: str
    incarnation: str
    cq_entries: int
    poller_core: int | None
    poller_spins: bool | None
    state_dir: str | None


class Fabric:
    """One poller, its state file, and the registered regions of one messenger."""

    def __init__(
        self,
        poller: native.Poller,
        state: native.StateFile,
        choice: FabricChoice,
        num_regions: int,
        state_lock: int,
    ) -> None:
        self.poller = poller
        self.state = state
        self.choice = choice
        self._num_regions = num_regions
        self._state_lock = state_lock

    def open_link(self) -> int:
        """Start to open an endpoint for one peer, with keys for it that nobody can guess or has seen before."""
        return self.poller.open_link([secrets.randbits(64) for _ in range(self._num_regions + 1)])

    def begin_step(
        self,
        counter: int,
        num_bumps: int,
        transfers: Sequence[tuple[int, int, int, int, bool]],
        pages: npt.NDArray[np.int32],
        page_starts: Sequence[int],
        edges: npt.NDArray[np.uint64],
        edge_starts: Sequence[int],
        deadline_ns: int,
    ) -> int:
        """Arm a step; see `native.Poller.begin_step`.

        Raises:
            StepLimitError: No slot of the layer counter is free.
        """
        try:
            return self.poller.begin_step(
                counter, num_bumps, transfers, pages, page_starts, edges, edge_starts, deadline_ns
            )
        except native.RingFullError as error:
            raise StepLimitError(str(error)) from error

    def stop(self) -> None:
        """Stop the poller and close every link. May take seconds; what was recorded can still be taken.

        Raises:
            FabricStuckError: It does not stop.
        """
        try:
            self.poller.close()
        except native.NativeError as error:
            if self.state.path is not None:
                Path(self.state.path).unlink(missing_ok=True)
            raise FabricStuckError(str(error)) from error

    def close(self) -> None:
        """Close every link, the poller and the state file. Idempotent."""
        self.stop()
        self.state.close()
        if self._state_lock >= 0:
            os.close(self._state_lock)
            self._state_lock = -1


def open_fabric(settings: FabricSettings, regions: Sequence[tuple[int, int]], owner: object = None) -> Fabric:
    """Open the first candidate that passes the self-test, and register `regions` (address, bytes) with it.

    `owner` keeps their memory alive; it is held until the poller has stopped.

    Raises:
        FabricUnavailableError: None passed; the message says what each one answered.
    """
    folder = Path(settings.state_dir) if settings.state_dir else state_folder()
    sweep(folder)
    path = str(folder / f"kvmsgr-{os.getpid()}-{settings.incarnation[:8]}.state")
    answers: list[str] = []
    for provider in candidates(settings.fabric, settings.local):
        state = _open_state(path, settings.incarnation)
        poller = None
        try:
            poller = native.Poller(
                provider,
                state,
                node=settings.address,
                core=-1 if settings.poller_core is None else settings.poller_core,
                cq_entries=settings.cq_entries,
                spin=settings.poller_spins,
            )
            poller.self_test()
            for address, num_bytes in regions:
                poller.register(address, num_bytes, owner)
        except native.NativeError as error:
            answers.append(f"{provider}: {error}")
            if poller is not None:
                poller.close()
            state.close()
            continue
        choice = FabricChoice(poller.provider, _why(settings, provider, answers))
        return Fabric(poller, state, choice, len(regions), lock(path))
    found = ", ".join(native.providers()) or "none"
    raise FabricUnavailableError(
        f"fabric {settings.fabric!r} cannot be used: {' / '.join(answers)}. libfabric offers here: {found}"
    )


def _open_state(path: str, incarnation: str) -> native.StateFile:
    try:
        return native.StateFile(path, incarnation=incarnation)
    except OSError as error:
        raise ConfigError(
            f"the state file {path} cannot be made: {error}; set state_dir to a writable folder"
        ) from error


def _why(settings: FabricSettings, provider: str, answers: Sequence[str]) -> str:
    if settings.fabric != "auto":
        return f"{provider} was asked for and passed the self-test"
    reach = "every peer is on this host" if settings.local else "peers may be on other hosts"
    failed = f"; tried before: {' / '.join(answers)}" if answers else ""
    return f"{reach}, and {provider} is the best that passed the self-test{failed}"


class StateView:
    """The state file of a messenger of this host, read only. It need not be running."""

    def __init__(self, path: str) -> None:
        self._state = native.StateFile(path, writable=False)

    def landed_rows(self, request_id: str) -> int | None:
        """Rows landed for the youngest attempt at a request, None when there is none."""
        attempt = self._state.find(request_id)
        return None if attempt is None else self._state.attempt_rows(attempt)

    def __enter__(self) -> StateView:
        return self

    def __exit__(self, *exc: object) -> None:
        self._state.close()
