"""Types of the native layer; `ext/kvmsgr/_ext/native.pyx` documents what each call does."""

from collections.abc import Sequence
from os import PathLike
from typing import Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer, disjoint_base

REACHED: Final[int]
OVERFLOW: Final[int]
STRAY: Final[int]
SENT: Final[int]
STOPPED: Final[int]
LINK_OPENED: Final[int]
LINK_FAILED: Final[int]
LINK_CLOSED: Final[int]
STEP_ENDED: Final[int]
STEP_FAULT: Final[int]
SLOT_REACHED: Final[int]
LINK_HELD: Final[int]
PORT_OPENED: Final[int]
PORT_FAILED: Final[int]
PORT_CLOSED: Final[int]
JOIN_LOST: Final[int]

LANDED_COUNTED: Final[int]
LANDED_REACHED: Final[int]
LANDED_OVERFLOW: Final[int]
LANDED_STRAY_SEEN: Final[int]
LANDED_STRAY: Final[int]
LANDED_BEAT: Final[int]

FEWER: Final[int]
MORE: Final[int]
DEADLINE: Final[int]

FAILED_OPEN: Final[int]
FAILED_REGISTER: Final[int]
FAILED_CONNECT: Final[int]
FAILED_POST: Final[int]
FAILED_COMPLETION: Final[int]
FAILED_TIMEOUT: Final[int]
FAILED_CLOSE: Final[int]
FAILED_LEASE: Final[int]
FAILED_STUCK: Final[int]

ATTEMPT_STATES: Final[tuple[str, ...]]
LABEL_BYTES: Final[int]
NUM_LEGS: Final[int]
MAX_GROUPS: Final[int]

class NativeError(Exception):
    call: str
    errno: int
    provider: str
    def __init__(self, message: str, call: str, errno: int, provider: str) -> None: ...

class RingFullError(Exception): ...

def libfabric_version() -> tuple[int, int]: ...
def error_text(code: int) -> str: ...
def providers() -> list[str]: ...
def debug_counters() -> dict[str, int]: ...
def monotonic_ns() -> int: ...

class Info(NamedTuple):
    pid: int
    pid_started: int
    incarnation: str
    name: str
    address: str
    provider: str
    software: str
    libfabric: tuple[int, int]
    started_ns: int

class GroupPages(NamedTuple):
    group: int
    name: str
    held: int
    total: int

class Leg(NamedTuple):
    number: int
    role: Literal["fetch", "serve"]
    state: str
    request_id: str
    peer: str
    attempt: int
    slot: int
    generation: int
    rows_expected: int
    num_layers: int
    pages_held: int
    started_ns: int
    since_ns: int
    reason: str
    why: str
    rows_posted: int
    writes_posted: int
    signals_seen: int
    entries_posted: int
    num_entries: int
    slot_rows: int | None
    attempt_rows: int | None
    attempt_expected: int | None
    torn: bool

@disjoint_base
class StateFile:
    def __new__(
        cls, path: str | PathLike[str] | None, *, incarnation: int | str = 0, writable: bool = True
    ) -> Self: ...
    @property
    def path(self) -> str | None: ...
    @property
    def writable(self) -> bool: ...
    @property
    def pid(self) -> int: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def poller_seen_ns(self) -> int: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def expecting(self) -> int: ...
    def open_attempt(self, attempt: int, expected_rows: int, label: str) -> None: ...
    def end_attempt(self, attempt: int) -> None: ...
    def link_slot(self, slot: int, generation: int, attempt: int) -> None: ...
    def unlink_slot(self, slot: int, generation: int) -> None: ...
    def land(self, immediate: int) -> tuple[int, int, int, int]: ...
    def leg_posted(self, tag: int, rows: int, entries: int, num_entries: int) -> None: ...
    def leg_rows_posted(self, number: int) -> int: ...
    def leg_signalled(self, tag: int, bumps: int) -> None: ...
    def poller_seen(self, now_ns: int) -> None: ...
    def link_beat(self, slot: int, generation: int, link: int) -> None: ...
    def await_slot(self, slot: int, generation: int, rows: int) -> int: ...
    def open_leg(
        self,
        number: int,
        *,
        role: str,
        state: str,
        request_id: str,
        peer: str,
        attempt: int,
        slot: int,
        generation: int,
        rows_expected: int,
        num_layers: int,
    ) -> None: ...
    def update_leg(self, number: int, *, state: str, reason: str = "", why: str = "", pages_held: int = 0) -> None: ...
    def close_leg(self, number: int) -> None: ...
    def legs(self) -> list[Leg]: ...
    def set_info(self, *, name: str, address: str, provider: str, software: str) -> None: ...
    def info(self) -> Info: ...
    def set_pages(self, group: int, name: str, held: int, total: int) -> None: ...
    def pages(self) -> list[GroupPages]: ...
    def set_quarantined(self, num_pages: int) -> None: ...
    def attempt_rows(self, attempt: int) -> int: ...
    def slot_rows(self, slot: int, generation: int) -> int: ...
    def attempts(self) -> list[tuple[int, int, int, int, str]]: ...
    def find(self, label: str) -> int | None: ...
    def close(self) -> None: ...

@disjoint_base
class LayerCounter:
    def __new__(cls, num_slots: int = 64, memory: Buffer | None = None) -> Self: ...
    @staticmethod
    def size_bytes(num_slots: int = 64) -> int: ...
    @classmethod
    def attach(cls, memory: Buffer) -> Self: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def ticket(self) -> int: ...
    @property
    def bumps(self) -> int: ...
    @property
    def address(self) -> int: ...
    def bumps_of(self, ticket: int) -> int | None: ...
    def start(self, ticket: int) -> None: ...
    def bump(self) -> None: ...

def begin_step(
    pollers: Sequence[Poller],
    parts: Sequence[tuple[int, int, int]],
    orders: npt.NDArray[np.int64],
    pages: npt.NDArray[np.int32],
    edges: npt.NDArray[np.uint64],
    deadline_ns: int,
) -> list[int]: ...
def join_step(
    pollers: Sequence[Poller],
    parts: Sequence[tuple[int, int, int]],
    orders: npt.NDArray[np.int64],
    pages: npt.NDArray[np.int32],
    edges: npt.NDArray[np.uint64],
) -> None: ...

@disjoint_base
class Poller:
    def __new__(
        cls,
        provider: str,
        state: StateFile,
        *,
        nics: Sequence[str | None] = ("127.0.0.1",),
        core: int = -1,
        cq_entries: int = 8192,
        spin: bool | None = None,
        spin_ns: int = 50_000,
        sleep_max_ns: int = 8_000_000,
        max_write_bytes: int = ...,
        link_bytes: int = ...,
        op_timeout_ns: int = 5_000_000_000,
        heartbeat_ns: int = 500_000_000,
        lease_ns: int = 2_000_000_000,
        first_lease_ns: int = 0,
        shared_endpoint: bool = False,
        index: int = 0,
        num_pollers: int = 1,
    ) -> Self: ...
    @property
    def index(self) -> int: ...
    @property
    def num_pollers(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def provider(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def fence_proven(self) -> bool: ...
    def self_test(self) -> None: ...
    def register(
        self, address: int, num_bytes: int, owner: object = None, nics: Sequence[int] | None = None
    ) -> int: ...
    def add_counter(self, counter: LayerCounter) -> int: ...
    def open_link(self, keys: Sequence[int], nic: int = 0) -> int: ...
    def link_address(self, link: int) -> bytes: ...
    def link_regions(self, link: int) -> list[tuple[int, int, int]]: ...
    def link_cell(self, link: int) -> tuple[int, int, int]: ...
    def connect_link(
        self,
        link: int,
        targets: Sequence[bytes],
        regions: Sequence[tuple[int, int, int, int]],
        window: int,
        beats: Sequence[tuple[int, int, int, int]],
    ) -> None: ...
    def close_link(self, link: int, fence: bool = True) -> None: ...
    def rotate(self, keys: Sequence[Sequence[int]]) -> None: ...
    def close_port(self, port: int = 0) -> None: ...
    def retarget_link(
        self,
        link: int,
        targets: Sequence[bytes],
        regions: Sequence[tuple[int, int, int, int]],
        beats: Sequence[tuple[int, int, int, int]],
    ) -> None: ...
    def resume_link(self, link: int) -> None: ...
    def add_template(
        self,
        link: int,
        runs: npt.NDArray[np.uint64],
        src_page: tuple[int, int, int],
        dst_page: tuple[int, int, int],
        entries: npt.NDArray[np.int64],
        row_bytes: int,
        item_bytes: int,
    ) -> int: ...
    def begin_step(
        self,
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
        deadline_ns: int,
    ) -> list[int]: ...
    def join_step(
        self,
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
    ) -> None: ...
    def abandon(self, counter: int, ticket: int) -> None: ...
    def resume_counter(self, counter: int, ticket: int) -> None: ...
    def stop(self, link: int, tag: int) -> None: ...
    def take(self, max_records: int = 256) -> list[tuple[int, int, int, int, int]]: ...
    def stats(self) -> dict[str, int]: ...
    def inject(self, kind: str, nth: int) -> None: ...
    def disturb(
        self,
        seed: int,
        *,
        drop: float = 0.0,
        flip: float = 0.0,
        fail: float = 0.0,
        reorder: float = 0.0,
        slow_ns: int = 0,
    ) -> None: ...
    def hold(self, hold: bool) -> None: ...
    def trace(self, capacity: int) -> None: ...
    def take_trace(self) -> list[tuple[int, int, int, int]]: ...
    def close(self) -> None: ...
