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
from .inprocess import InProcessPoller, current_air
from .inprocess.driver import Driver, Loop
from .interface import Poller
from .leftovers import lock, state_folder, sweep
from .pollers import PollerGroup

NativePoller = native.Poller
libfabric_version, providers = native.libfabric_version, native.providers
StateFile = native.StateFile

FEW_QUEUE_PAIRS = frozenset({"efa", "verbs;ofi_rxm"})
"""Where an endpoint a peer does not go far: about 256 queue pairs a network interface."""

NO_ROTATION = (
    "shm: it completes the writes of an endpoint in order, so one peer that dies would stall all others that share it; "
    "set fence to 'endpoint' (endpoints are not scarce there)"
)


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """What `open_fabric` needs to know. `local`: every peer is on this host; `nics`: the address of each network
    interface of all ranks, None for any; `pollers`: of each polling thread, how many of these it serves, in order, and
    its CPU; the rest as in `kvmsgr.Config`."""

    fabric: str
    local: bool
    nics: Sequence[str | None]
    incarnation: str
    cq_entries: int
    heartbeat_s: float
    lease_s: float
    connect_timeout_s: float
    fence: str
    pollers: Sequence[tuple[int, int | None]]
    poller_spins: bool | None
    state_dir: str | None


class Fabric:
    """One poller, or a group that is like one, its state file, and the registered regions of one messenger.

    Attributes:
        rotates: All peers write to one endpoint of a network interface, which is fenced by opening another one
            (`rotate`).
    """

    def __init__(
        self,
        poller: Poller,
        state: native.StateFile,
        choice: FabricChoice,
        nic_regions: Sequence[int],
        state_lock: int,
        rotates: bool,
    ) -> None:
        self.poller = poller
        self.state = state
        self.choice = choice
        self._nic_regions = tuple(nic_regions)  # how many are registered on each
        self._state_lock = state_lock
        self.rotates = rotates

    def open_link(self, nic: int = 0) -> int:
        """Start to open an endpoint for one peer, registered under keys that nobody can guess or has seen before.

        Args:
            nic: Network interface, by its place in `FabricSettings.nics`.

        Raises:
            FabricUnavailableError: Too many are open, or the polling thread does not start.
        """
        try:
            # The last key is the heartbeat cell's.
            return self.poller.open_link(self._new_keys(self._nic_regions[nic] + 1), nic)
        except (native.NativeError, native.RingFullError, OSError) as error:
            raise FabricUnavailableError(f"no endpoint can be opened: {error}") from error

    def rotate(self) -> None:
        """Start to open another endpoint for all peers on every network interface, under new keys."""
        self.poller.rotate([self._new_keys(num) for num in self._nic_regions])

    def close_old_port(self) -> None:
        """Start to close the endpoints that all peers wrote to before, or the only ones."""
        self.poller.close_port()

    @staticmethod
    def _new_keys(num: int) -> list[int]:
        return [secrets.randbits(64) for _ in range(num)]

    def add_counter(self, counter: native.LayerCounter, nics: Sequence[int]) -> None:
        """Watch a layer counter that releases what goes by these network interfaces."""
        if isinstance(self.poller, PollerGroup):
            self.poller.add_counter(counter, nics)
        else:
            self.poller.add_counter(counter)

    def drive(self, loop: Loop) -> None:
        """Lend the loop to a poller that has no thread of its own."""
        if isinstance(self.poller, InProcessPoller):
            Driver(self.poller, loop)

    def begin_step(
        self,
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
        deadline_ns: int,
    ) -> list[int]:
        """Arm a step; see `native.Poller.begin_step`.

        Raises:
            StepLimitError: No slot of one of the layer counters is free.
        """
        try:
            return self.poller.begin_step(parts, orders, pages, edges, deadline_ns)
        except native.RingFullError as error:
            raise StepLimitError(str(error)) from error

    def join_step(
        self,
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
    ) -> None:
        """Have transfers go with an armed step; see `native.Poller.join_step`.

        Raises:
            StepLimitError: The poller has too much to do yet.
        """
        try:
            self.poller.join_step(parts, orders, pages, edges)
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


def open_fabric(
    settings: FabricSettings, regions: Sequence[tuple[int, int, Sequence[int]]], owner: object = None
) -> Fabric:
    """Open the first candidate that passes the self-test, and register `regions` with it: (address, bytes, and the
    network interfaces by number) each. Their places are the region indices of templates.

    `owner` keeps their memory alive; it is held until the poller has stopped.

    Raises:
        FabricUnavailableError: None passed; the message says what each one answered.
    """
    folder = Path(settings.state_dir) if settings.state_dir else state_folder()
    sweep(folder)
    path = str(folder / f"kvmsgr-{os.getpid()}-{settings.incarnation[:8]}.state")
    answers: list[str] = []
    for provider in candidates(settings.fabric, settings.local):
        if provider == "shm" and _rotates(settings, provider):
            answers.append(NO_ROTATION)
            continue
        state = _open_state(path, settings.incarnation)
        poller: Poller | None = None
        try:
            poller = _open_poller(provider, state, settings)
            poller.self_test()
            for address, num_bytes, nics in regions:
                poller.register(address, num_bytes, owner, nics)
        except (native.NativeError, OSError) as error:
            answers.append(f"{provider}: {error}")
            if poller is not None:
                poller.close()
            state.close()
            continue
        choice = FabricChoice(poller.provider, _why(settings, provider, answers))
        nic_regions = [sum(nic in nics for _, _, nics in regions) for nic in range(len(settings.nics))]
        return Fabric(poller, state, choice, nic_regions, lock(path), _rotates(settings, provider))
    found = ", ".join(native.providers()) or "none"
    raise FabricUnavailableError(
        f"fabric {settings.fabric!r} cannot be used: {' / '.join(answers)}. libfabric offers here: {found}"
    )


def _rotates(settings: FabricSettings, provider: str) -> bool:
    return settings.fence == "rotation" or (settings.fence == "auto" and provider in FEW_QUEUE_PAIRS)


def _open_poller(provider: str, state: native.StateFile, settings: FabricSettings) -> Poller:
    heartbeat_ns, lease_ns = int(settings.heartbeat_s * 1e9), int(settings.lease_s * 1e9)
    rotates = _rotates(settings, provider)
    if provider == "inprocess":
        return InProcessPoller(
            current_air(),
            state,
            nics=settings.nics,
            cq_entries=settings.cq_entries,
            heartbeat_ns=heartbeat_ns,
            lease_ns=lease_ns,
            shared_endpoint=rotates,
        )
    sizes, cores = zip(*settings.pollers, strict=True)

    def open_one(index: int) -> native.Poller:
        first = sum(sizes[:index])
        return native.Poller(
            provider,
            state,
            nics=settings.nics[first : first + sizes[index]],
            core=-1 if cores[index] is None else cores[index],
            cq_entries=settings.cq_entries,
            spin=settings.poller_spins,
            heartbeat_ns=heartbeat_ns,
            lease_ns=lease_ns,
            first_lease_ns=int(settings.connect_timeout_s * 1e9),
            shared_endpoint=rotates,
            index=index,
            num_pollers=len(sizes),
        )

    return open_one(0) if len(sizes) == 1 else PollerGroup(open_one, sizes)


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
