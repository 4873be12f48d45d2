"""The fabrics that are put to the test, and how their pollers are made to go on."""

from __future__ import annotations

import select
from typing import Protocol, TypedDict, Unpack

from kvmsgr.fabric.inprocess import Air, InProcessPoller
from kvmsgr.fabric.interface import Poller, StateFile
from kvmsgr.fabric.libfabric import NativePoller
from kvmsgr.fabric.pollers import PollerGroup


class Options(TypedDict, total=False):
    """Of a poller; each fabric has defaults for those that are left out."""

    cq_entries: int
    max_write_bytes: int
    link_bytes: int
    op_timeout_ns: int
    heartbeat_ns: int
    lease_ns: int
    shared_endpoint: bool


class FabricUnderTest(Protocol):
    """One fabric. Write one for yours and hand it to the suite.

    `closes_in_process`: an endpoint may be closed under traffic while the peer lives in the same process. Where it may
    not, the suite puts the target into a process of its own, which opens the fabric by `name`.
    """

    @property
    def name(self) -> str: ...
    @property
    def fence_proven(self) -> bool: ...
    @property
    def closes_in_process(self) -> bool: ...
    def poller(self, state: StateFile, *, num_nics: int = 1, **options: Unpack[Options]) -> Poller:
        """Open one more with so many network interfaces, which can reach the others."""

    def progress(self, poller: Poller) -> None:
        """Let all pollers go on; return at once when `poller` has records, and after a millisecond at the latest."""


class Libfabric:
    """A provider of libfabric, by its name there. Its pollers have threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fence_proven = name != "tcp;ofi_rxm"
        self.closes_in_process = name != "shm"

    def poller(self, state: StateFile, *, num_nics: int = 1, **options: Unpack[Options]) -> Poller:
        return NativePoller(self.name, state, nics=["127.0.0.1"] * num_nics, **options)

    def progress(self, poller: Poller) -> None:
        select.select([poller.fd], [], [], 0.001)


class LibfabricGroup(Libfabric):
    """A provider of libfabric served by several threads: one for each network interface, and `num_idle` more that watch
    what the others do, and have interfaces that nobody uses."""

    def __init__(self, name: str, num_idle: int = 0) -> None:
        super().__init__(name)
        self._num_idle = num_idle

    def poller(self, state: StateFile, *, num_nics: int = 1, **options: Unpack[Options]) -> Poller:
        num_pollers = num_nics + self._num_idle

        def open_one(index: int) -> NativePoller:
            return NativePoller(self.name, state, nics=["127.0.0.1"], index=index, num_pollers=num_pollers, **options)

        return PollerGroup(open_one, [1] * num_pollers)


class InProcess:
    """The in-process fabric: whatever waits pumps all of its pollers, in an order drawn from the seed."""

    name = "inprocess"
    fence_proven = closes_in_process = True

    def __init__(self, seed: int = 0, *, any_order: bool = False) -> None:
        self.air = Air(seed, any_order=any_order)
        self._pollers: list[InProcessPoller] = []

    def poller(self, state: StateFile, *, num_nics: int = 1, **options: Unpack[Options]) -> Poller:
        poller = InProcessPoller(self.air, state, nics=[None] * num_nics, **options)
        self._pollers.append(poller)
        return poller

    def progress(self, poller: Poller) -> None:
        self._pollers = [each for each in self._pollers if not each.closed]
        for each in self.air.random.sample(self._pollers, len(self._pollers)):
            each.pump()
