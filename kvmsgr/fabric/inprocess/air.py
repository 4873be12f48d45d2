"""The air: which endpoints there are, and the writes that were posted and have not landed.

Writes between two endpoints keep their order unless `any_order` is set; which of several senders comes next is drawn
from the seed. A write takes its bytes from the source when it completes locally, which may be long before it lands,
and at the latest when it lands. It does neither before it has been carried, where the air has a rate.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

ROOM = 256
"""Writes towards one endpoint that the air carries; beyond that a post has to be tried again."""


class Owner(Protocol):
    """What the air knows of a poller."""

    @property
    def now_ns(self) -> int:
        """Its time."""

    def completed(self, flight: Flight, error: int) -> None:
        """A write of it is locally complete, or has failed with an errno."""

    def wake(self) -> None:
        """There is something to do for it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory. Peers name its bytes by offset and must know the key."""

    address: int
    num_bytes: int
    key: int


@dataclass(frozen=True, slots=True)
class Source:
    """Memory that is written from, through some of the network interfaces, which offer it to peers as well."""

    address: int
    num_bytes: int
    nics: frozenset[int]


@dataclass(eq=False, slots=True)
class Endpoint:
    """Where writes of one peer land. Its address is never used again."""

    address: bytes
    owner: Owner
    regions: dict[int, Region]
    inbox: list[Flight] = field(default_factory=list)
    held: bool = False
    completes: bool = True


@dataclass(eq=False, slots=True)
class Flight:
    """A write that was posted: `num_bytes` at `memory` go to `offset` of the region with `key` of endpoint `target`.

    `payload` is what it carries once it needs its source no more. One that `fails` completes with an error, and lands
    all the same.
    """

    source: Endpoint
    target: bytes
    key: int
    offset: int
    memory: int
    num_bytes: int
    immediate: int
    payload: bytes | None = None
    completed: bool = False
    fails: bool = False
    beats: bool = False
    carried_ns: int = 0

    def take_bytes(self) -> bytes:
        if self.payload is None:
            self.payload = ctypes.string_at(self.memory, self.num_bytes)
        return self.payload

    def complete(self, error: int = 0) -> None:
        """Tell its owner, once, that its source is free or that it has failed."""
        if not self.completed:
            self.completed = True
            self.source.owner.completed(self, errno.EIO if self.fails else error)


class Air:
    """Everything between the pollers of one process.

    Args:
        seed: Of every choice that is made in this air.
        any_order: Writes may land in any order, as on an unordered transport.
        bytes_per_s: What is carried towards one endpoint, in the order of posting; None: everything at once.
    """

    def __init__(self, seed: int = 0, *, any_order: bool = False, bytes_per_s: float | None = None) -> None:
        self.seed = seed
        self.any_order = any_order
        self.bytes_per_s = bytes_per_s
        self.lock = threading.RLock()
        self.random = Random(seed)
        self.num_pollers = 0
        self._num_made = 0
        self._endpoints: dict[bytes, Endpoint] = {}

    def __len__(self) -> int:
        """Endpoints that are open."""
        return len(self._endpoints)

    # What tests look at, and switch

    def flights(self, address: bytes | None = None) -> list[Flight]:
        """Writes in the air towards one endpoint, or towards all, in the order of posting; no heartbeats."""
        with self.lock:
            found = self._endpoints.values() if address is None else [self._endpoints[address]]
            return [flight for endpoint in found for flight in endpoint.inbox if not flight.beats]

    def hold(self, address: bytes, *, completes: bool = True) -> None:
        """Let nothing land at this endpoint. `completes`: whether its writers are told of local completions."""
        with self.lock:
            endpoint = self._endpoints[address]
            endpoint.held, endpoint.completes = True, completes

    def release(self, address: bytes) -> None:
        """Let go what is held."""
        with self.lock:
            endpoint = self._endpoints[address]
            endpoint.held, endpoint.completes = False, True
            endpoint.owner.wake()

    # What pollers do

    def open(self, owner: Owner, regions: Sequence[Region]) -> Endpoint:
        with self.lock:
            self._num_made += 1
            address = f"inprocess:{self._num_made}:{self.random.getrandbits(32):08x}".encode()
            endpoint = Endpoint(address, owner, {region.key: region for region in regions})
            self._endpoints[address] = endpoint
            return endpoint

    def close(self, endpoint: Endpoint) -> None:
        """Nothing lands at it from now on, and no write of it reads its source any more. What had completed stays in
        the air."""
        if self._endpoints.pop(endpoint.address, None) is None:
            return
        for flight in endpoint.inbox:
            flight.complete(errno.ECONNRESET)
        endpoint.inbox.clear()
        for other in self._endpoints.values():
            other.inbox = [flight for flight in other.inbox if flight.source is not endpoint or flight.completed]

    def has_room(self, address: bytes) -> bool:
        """Whether a write towards this endpoint can be posted now."""
        endpoint = self._endpoints.get(address)
        return endpoint is None or len(endpoint.inbox) < ROOM

    def send(self, flight: Flight) -> None:
        """Put a write into the air; where nobody is, it fails."""
        endpoint = self._endpoints.get(flight.target)
        if endpoint is None:
            flight.complete(errno.ENOTCONN)
            return
        if self.bytes_per_s is not None:
            free_ns = max((other.carried_ns for other in endpoint.inbox), default=0)
            starts_ns = max(free_ns, flight.source.owner.now_ns)
            flight.carried_ns = starts_ns + int(flight.num_bytes / self.bytes_per_s * 1e9)
        endpoint.inbox.append(flight)
        endpoint.owner.wake()

    def complete_some(self, owner: Owner) -> bool:
        """Complete some of the owner's writes before they land: their bytes have been taken over. Says if any was."""
        ready = [
            flight
            for endpoint in self._endpoints.values()
            if endpoint.completes
            for flight in endpoint.inbox
            if flight.source.owner is owner and not flight.completed and flight.carried_ns <= owner.now_ns
        ]
        for flight in ready:
            if self.random.random() < 0.5:
                flight.take_bytes()
                flight.complete()
        return bool(ready)

    def may_arrive(self, endpoint: Endpoint) -> list[Flight]:
        """Writes that could land at this endpoint now."""
        if endpoint.held:
            return []
        if self.bytes_per_s is None:
            return endpoint.inbox
        return [flight for flight in endpoint.inbox if flight.carried_ns <= endpoint.owner.now_ns]

    def next_ns(self, endpoint: Endpoint) -> int | None:
        """When the next write that is on its way to this endpoint has been carried."""
        later = [flight.carried_ns for flight in endpoint.inbox if flight.carried_ns > endpoint.owner.now_ns]
        return None if endpoint.held else min(later, default=None)

    def arrive(self, endpoint: Endpoint) -> int | None:
        """Land one write at this endpoint and return its immediate; None: there is none, or its key reaches nothing."""
        ready = self.may_arrive(endpoint)
        if not ready:
            return None
        flight = self.random.choice(ready)
        if not self.any_order:
            flight = next(other for other in endpoint.inbox if other.source is flight.source)
        endpoint.inbox.remove(flight)
        region = endpoint.regions.get(flight.key)
        reaches = region is not None and flight.offset + flight.num_bytes <= region.num_bytes
        if region is not None and reaches:
            ctypes.memmove(region.address + flight.offset, flight.take_bytes(), flight.num_bytes)
        flight.complete(0 if reaches else errno.EACCES)
        return flight.immediate if reaches else None


_air = Air()


def current_air() -> Air:
    """The air that messengers of this process are opened in."""
    return _air


@contextmanager
def use_air(air: Air) -> Iterator[Air]:
    """Open messengers in another air for a while."""
    global _air
    before, _air = _air, air
    try:
        yield air
    finally:
        _air = before
