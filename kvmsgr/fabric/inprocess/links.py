"""Links of the in-process poller, and the transfers that go over them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmsgr.fabric.interface import Beat, RemoteAt

from .air import Endpoint, Flight
from .plan import Entry, Run, Template


@dataclass(eq=False, slots=True)
class Transfer:
    """One template x the pages of one chunk, posted entry by entry."""

    template: Template
    writes: list[Run]
    immediate: int
    tag: int
    ready: bool
    link: Link | None = None
    released: int = 0
    bumps_seen: int = 0
    entry_index: int = 0
    write_index: int = 0
    in_flight: int = 0
    num_aside: int = 0
    rows_posted: int = 0
    writes_posted: int = 0
    stopped: bool = False

    @property
    def num_entries(self) -> int:
        return len(self.template.entries)

    @property
    def is_released(self) -> bool:
        """Whether all of it may go."""
        return self.released == self.num_entries

    @property
    def may_post(self) -> bool:
        """Whether its next write may go."""
        return not self.stopped and self.entry_index < self.released

    @property
    def ended(self) -> bool:
        """Nothing of it is in flight and nothing more will be."""
        everything = self.entry_index == self.num_entries and not self.num_aside
        return not self.in_flight and (self.stopped or everything)

    def release(self, bumps: int) -> None:
        """Let entries go whose signal has come."""
        entries = self.template.entries
        before = self.released
        while self.released < len(entries) and (self.ready or entries[self.released].signal <= bumps):
            self.released += 1
        if self.released > before:
            self.bumps_seen = bumps

    @property
    def next_entry(self) -> Entry:
        return self.template.entries[self.entry_index]

    def advance(self) -> tuple[Entry, Run]:
        """The next write; it will not come again."""
        entry, write = self.template.entries[self.entry_index], self.writes[self.write_index]
        self.write_index += 1
        if self.write_index == len(self.writes):
            self.write_index = 0
            self.entry_index += 1
        return entry, write


@dataclass(eq=False, slots=True)
class Aside:
    """A write that others overtake: `left` more of them."""

    transfer: Transfer
    entry: Entry
    write: Run
    left: int


@dataclass(eq=False, slots=True)
class Heart:
    """Where heartbeats to one endpoint of the peer go, and when the next one is due."""

    address: bytes
    offset: int
    key: int
    immediate: int
    due_ns: int = 0
    beating: bool = False


@dataclass(eq=False, slots=True)
class Operation:
    """A write in flight: of a transfer, or a heartbeat."""

    link: Link
    transfer: Transfer | None
    heart: Heart | None
    num_bytes: int
    posted_ns: int


@dataclass(eq=False, slots=True)
class Port:
    """An endpoint of ours on one network interface, with the keys of its regions. A link has one to itself, or shares
    it with all others of that interface. Shared ones have the same number on every interface."""

    number: int
    nic: int
    endpoint: Endpoint
    keys: tuple[int, ...]
    closed: bool = False
    asked: bool = False  # to close, by a caller who is told


@dataclass(eq=False, slots=True)
class Link:
    """What goes to endpoints of one peer and comes from them.

    `port` is what it sends through; `told` are the ports that its peer may write to. `targets` are the addresses that
    its writes go to.
    """

    number: int
    nic: int
    keys: tuple[int, ...]
    cell: ctypes.Array[ctypes.c_char] = field(default_factory=lambda: ctypes.create_string_buffer(8))
    port: Port | None = None
    told: set[Port] = field(default_factory=set)
    targets: Sequence[bytes] = ()
    regions: Sequence[RemoteAt] = ()
    hearts: Sequence[Heart] = ()
    window: int = 0
    retarget: tuple[Sequence[bytes], Sequence[RemoteAt]] | None = None  # until nothing is in flight
    held: bool = False  # until it may resume
    asked: bool = False  # to connect, by a caller
    connected: bool = False
    failed: bool = False
    closing: bool = False
    heard_ns: int = 0
    again_since_ns: int = 0
    flying_bytes: int = 0
    flying: dict[Flight, Operation] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    aside: list[Aside] = field(default_factory=list)

    @property
    def num_flying(self) -> int:
        """Operations that count against the window."""
        return len(self.flying) - sum(heart.beating for heart in self.hearts)

    @property
    def alive(self) -> bool:
        return self.connected and not self.failed and not self.closing

    @property
    def waits(self) -> bool:
        """It is held back, whatever it has to post."""
        return self.held or self.retarget is not None


def hearts_of(targets: Sequence[bytes], regions: Sequence[RemoteAt], beats: Sequence[Beat]) -> list[Heart]:
    """Check what a peer tells of itself.

    Raises:
        ValueError: It names a target that there is not, or none, or heartbeats carry rows.
    """
    if not targets:
        raise ValueError("no targets; want each endpoint of the peer that this link writes to or hears")
    for index, region in enumerate(regions):
        if not 0 <= region[3] < len(targets):
            raise ValueError(f"region {index} of the peer is reached through target {region[3]} of {len(targets)}")
    for index, (target, _, _, immediate) in enumerate(beats):
        if not 0 <= target < len(targets):
            raise ValueError(f"heartbeats {index} go to target {target} of {len(targets)}")
        if immediate & 0x3FFF:
            raise ValueError(f"immediate {immediate:#x} of the heartbeats already carries rows")
    return [Heart(targets[target], base, key, immediate) for target, base, key, immediate in beats]
