"""What the runtime asks of a fabric. `native.Poller` (libfabric) and `InProcessPoller` both are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvmsgr._ext.native import (
    FAILED_COMPLETION,
    FAILED_LEASE,
    FAILED_POST,
    FAILED_TIMEOUT,
    LINK_HELD,
    PORT_CLOSED,
    PORT_FAILED,
    PORT_OPENED,
    SLOT_REACHED,
    LayerCounter,
    RingFullError,
    StateFile,
)

__all__ = [
    "FAILED_COMPLETION",
    "FAILED_LEASE",
    "FAILED_POST",
    "FAILED_TIMEOUT",
    "LINK_HELD",
    "ORDER_FIELDS",
    "PORT_CLOSED",
    "PORT_FAILED",
    "PORT_OPENED",
    "SLOT_REACHED",
    "Beat",
    "LayerCounter",
    "PageUnits",
    "Poller",
    "Record",
    "Remote",
    "RemoteAt",
    "RingFullError",
    "StateFile",
]

Record = tuple[int, int, int, int, int]
"""(kind, id, value, time in ns, extra); `ext/core/records.h` says what each kind means by them."""

Remote = tuple[int, int, int]
"""(base, bytes, key): memory that a peer may write to."""

RemoteAt = tuple[int, int, int, int]
"""(base, bytes, key, target): the same, reached through this one of a link's targets."""

Beat = tuple[int, int, int, int]
"""(target, base, key, immediate): where a peer wants our heartbeats."""

PageUnits = tuple[int, int, int]
"""(page bytes, units a page, unit bytes): unit u lies at u // units * page bytes + u % units * unit bytes."""

ORDER_FIELDS = (
    "part", "link", "template", "immediate", "tag", "ready", "page_start", "page_stop", "edge_start", "edge_stop",
)  # fmt: skip
"""Columns of a step's orders: one transfer a row. Several may share slices of pages and edges."""


@runtime_checkable
class Poller(Protocol):
    """Posts writes as layer counters release them, and counts what lands.

    It has one or several network interfaces (`nics`, given when it is made). Memory is registered on some of them; a
    link belongs to one, and writes to the endpoints of its peer that it was connected to, its targets.

    It goes on by itself: what it has to say comes as records, and `fd` is readable while there are some. Every method
    may be called from any thread; none waits for the network.

    It promises, whatever the peer does:

    - A transfer ends with one record: SENT when every write of it is locally complete, STOPPED when it ended early and
      nothing of it is in flight. Rows posted are in it.
    - A write lands at most once, and its rows are counted after its bytes are in memory.
    - At most `window` operations of a link are in flight, heartbeats not counted.
    - After the STEP_FAULT of a step that was over before it had shown all its signals (FEWER, DEADLINE), nothing is
      released by later steps of that counter before `resume_counter` was called for it: what must not be posted because
      of it is stopped first. Every STEP_FAULT is answered so. It was known before anything of these was released.
    - After LINK_CLOSED nothing lands through the link, and nothing of it reads source memory; where `fence_proven` is
      False, only if no peer was writing.
    """

    @property
    def fd(self) -> int: ...
    @property
    def provider(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def fence_proven(self) -> bool: ...

    # Before the first link or step

    def self_test(self) -> None: ...
    def register(
        self, address: int, num_bytes: int, owner: object = None, nics: Sequence[int] | None = None
    ) -> int: ...
    def add_counter(self, counter: LayerCounter) -> int: ...

    # Links: LINK_OPENED or LINK_FAILED follows `open_link`, LINK_CLOSED is the last record of each

    def open_link(self, keys: Sequence[int], nic: int = 0) -> int: ...
    def link_address(self, link: int) -> bytes: ...
    def link_regions(self, link: int) -> list[Remote]: ...
    def link_cell(self, link: int) -> Remote: ...
    def connect_link(
        self, link: int, targets: Sequence[bytes], regions: Sequence[RemoteAt], window: int, beats: Sequence[Beat]
    ) -> None: ...
    def close_link(self, link: int, fence: bool = True) -> None: ...

    # Ports, where all links of a network interface share one endpoint (`shared_endpoint=True`): PORT_OPENED or
    # PORT_FAILED follows `rotate`, LINK_HELD `retarget_link`, PORT_CLOSED `close_port`

    def rotate(self, keys: Sequence[Sequence[int]]) -> None: ...
    def close_port(self, port: int = 0) -> None: ...
    def retarget_link(
        self, link: int, targets: Sequence[bytes], regions: Sequence[RemoteAt], beats: Sequence[Beat]
    ) -> None: ...
    def resume_link(self, link: int) -> None: ...

    # Steps and what they release. JOIN_LOST, then STOPPED, follows a `join_step` whose step it cannot join

    def add_template(
        self,
        link: int,
        runs: npt.NDArray[np.uint64],
        src_page: PageUnits,
        dst_page: PageUnits,
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

    # What it says

    def take(self, max_records: int = 256) -> list[Record]: ...
    def stats(self) -> dict[str, int]: ...
    def trace(self, capacity: int) -> None: ...
    def take_trace(self) -> list[tuple[int, int, int, int]]: ...

    # Faults on purpose, and the end

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
    def hold(self, held: bool, /) -> None: ...
    def close(self) -> None: ...


Order = object
