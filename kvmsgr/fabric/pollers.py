"""Several polling threads that look like one poller: each has its own network interfaces, and all count into one state
file.

They share nothing else but the tickets of layer counters, so that a step can be armed in all of them. No two of them
give a link the same id; layer counters and regions have the same index in each.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvmsgr._ext import native
from kvmsgr._ext.native import LayerCounter

from .interface import Beat, PageUnits, Record, Remote, RemoteAt

LINK_SLOT_BITS = 10
"""As in `ext/core/link.h`: above these is the number of a link, at which the pollers take turns."""

NEW_PORT = 0
"""Of a PORT_FAILED record: the port that was to be opened."""


class PollerGroup:
    """A `Poller` made of several, each on its own thread.

    What concerns all of them is done when all have done it, and told once. A fault of a step is told when the first of
    them sees it.

    Args:
        open_poller: Opens the poller with this index.
        num_nics: How many network interfaces each poller has; they are numbered through.
    """

    def __init__(self, open_poller: Callable[[int], native.Poller], num_nics: Sequence[int]) -> None:
        self._pollers: list[native.Poller] = []
        try:
            for index in range(len(num_nics)):
                self._pollers.append(open_poller(index))
        except BaseException:
            self.close()
            raise
        starts = accumulate(num_nics, initial=0)
        self._nics = [range(start, start + num) for start, num in zip(starts, num_nics, strict=False)]
        self._watchers: list[int] = []  # of each counter, a mask
        self._ports = _Ports(len(num_nics))
        self._next = 0  # whose records are taken first
        self._progress = _Progress(len(num_nics))
        self._bells = select.epoll()
        for poller in self._pollers:
            self._bells.register(poller.fd, select.EPOLLIN)

    @property
    def fd(self) -> int:
        return self._bells.fileno()

    @property
    def provider(self) -> str:
        return self._pollers[0].provider

    @property
    def closed(self) -> bool:
        return any(poller.closed for poller in self._pollers)

    @property
    def fence_proven(self) -> bool:
        return all(poller.fence_proven for poller in self._pollers)

    # Before the first link or step

    def self_test(self) -> None:
        for poller in self._pollers:
            poller.self_test()

    def register(self, address: int, num_bytes: int, owner: object = None, nics: Sequence[int] | None = None) -> int:
        chosen = range(self._nics[-1].stop) if nics is None else nics
        for nic in chosen:
            self._of_nic(nic)
        indices = {
            poller.register(address, num_bytes, owner, [nic - own.start for nic in chosen if nic in own])
            for poller, own in zip(self._pollers, self._nics, strict=True)
        }
        (index,) = indices
        return index

    def add_counter(self, counter: LayerCounter, nics: Sequence[int] | None = None) -> int:
        """`nics`: of the links whose transfers wait for it; None: all."""
        chosen = range(self._nics[-1].stop) if nics is None else nics
        watchers = sum({1 << self._of_nic(nic) for nic in chosen})
        indices = {poller.add_counter(counter) for poller in self._pollers}
        self._watchers.append(watchers)
        (index,) = indices
        return index

    def _of_nic(self, nic: int) -> int:
        for index, own in enumerate(self._nics):
            if nic in own:
                return index
        raise ValueError(f"network interface {nic} of {self._nics[-1].stop}")

    # Links

    def open_link(self, keys: Sequence[int], nic: int = 0) -> int:
        index = self._of_nic(nic)
        return self._pollers[index].open_link(keys, nic - self._nics[index].start)

    def _of_link(self, link: int) -> native.Poller:
        return self._pollers[(link >> LINK_SLOT_BITS) % len(self._pollers)]

    def link_address(self, link: int) -> bytes:
        return self._of_link(link).link_address(link)

    def link_regions(self, link: int) -> list[Remote]:
        return self._of_link(link).link_regions(link)

    def link_cell(self, link: int) -> Remote:
        return self._of_link(link).link_cell(link)

    def connect_link(
        self, link: int, targets: Sequence[bytes], regions: Sequence[RemoteAt], window: int, beats: Sequence[Beat]
    ) -> None:
        self._of_link(link).connect_link(link, targets, regions, window, beats)

    def close_link(self, link: int, fence: bool = True) -> None:
        self._of_link(link).close_link(link, fence)

    # Ports

    def rotate(self, keys: Sequence[Sequence[int]]) -> None:
        if len(keys) != self._nics[-1].stop:
            raise ValueError(f"{len(keys)} lists of keys for {self._nics[-1].stop} interfaces")
        for poller, own in zip(self._pollers, self._nics, strict=True):
            poller.rotate([keys[nic] for nic in own])

    def close_port(self, port: int = 0) -> None:
        self._ports.close(port, self._pollers)

    def retarget_link(
        self, link: int, targets: Sequence[bytes], regions: Sequence[RemoteAt], beats: Sequence[Beat]
    ) -> None:
        self._of_link(link).retarget_link(link, targets, regions, beats)

    def resume_link(self, link: int) -> None:
        self._of_link(link).resume_link(link)

    # Steps and what they release

    def add_template(
        self,
        link: int,
        runs: npt.NDArray[np.uint64],
        src_page: PageUnits,
        dst_page: PageUnits,
        entries: npt.NDArray[np.int64],
        row_bytes: int,
        item_bytes: int,
    ) -> int:
        return self._of_link(link).add_template(link, runs, src_page, dst_page, entries, row_bytes, item_bytes)

    def begin_step(
        self,
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
        deadline_ns: int,
    ) -> list[int]:
        watched = [(counter, num_bumps, self._watchers_of(counter)) for counter, num_bumps in parts]
        return native.begin_step(self._pollers, watched, orders, pages, edges, deadline_ns)

    def join_step(
        self,
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
    ) -> None:
        """Each poller finds by itself whether its transfers can join; one that finds they cannot says so."""
        watched = [(counter, ticket, self._watchers_of(counter)) for counter, ticket in parts]
        native.join_step(self._pollers, watched, orders, pages, edges)

    def _watchers_of(self, counter: int) -> int:
        """A mask of the pollers."""
        if not 0 <= counter < len(self._watchers):
            raise ValueError(f"layer counter {counter} of {len(self._watchers)}")
        return self._watchers[counter]

    def abandon(self, counter: int, ticket: int) -> None:
        watchers = self._watchers_of(counter)
        for index, poller in enumerate(self._pollers):
            if watchers >> index & 1:
                poller.abandon(counter, ticket)

    def resume_counter(self, counter: int, ticket: int) -> None:
        """Each poller holds what it has to send by itself, as soon as it sees the fault, which one of them tells."""
        watchers = self._watchers_of(counter)
        for index, poller in enumerate(self._pollers):
            if watchers >> index & 1:
                poller.resume_counter(counter, ticket)

    def stop(self, link: int, tag: int) -> None:
        self._of_link(link).stop(link, tag)

    # What they say

    def take(self, max_records: int = 256) -> list[Record]:
        """Another poller's come first each time. Those of one poller stay in order."""
        taken: list[Record] = []
        for _ in self._pollers:
            index = self._next
            self._next = (index + 1) % len(self._pollers)
            while room := max_records - len(taken):
                batch = self._pollers[index].take(room)
                taken += [said for record in batch for said in self._ports.told(index, record)]
                if len(batch) < room:
                    break
            if not room:
                break
        return taken

    def stats(self) -> dict[str, int]:
        """Sums. `rounds` are those that every poller that runs has gone: one that is stuck holds them up."""
        each = [poller.stats() for poller in self._pollers]
        sums = {name: sum(stats[name] for stats in each) for name in each[0]}
        return sums | {"rounds": self._progress.rounds([stats["rounds"] for stats in each])}

    def trace(self, capacity: int) -> None:
        """`capacity` of each poller."""
        for poller in self._pollers:
            poller.trace(capacity)

    def take_trace(self) -> list[tuple[int, int, int, int]]:
        marks = [mark for poller in self._pollers for mark in poller.take_trace()]
        return sorted(marks, key=lambda mark: mark[3])

    # Faults on purpose, and the end

    def inject(self, kind: str, nth: int) -> None:
        """The first poller's nth write."""
        self._pollers[0].inject(kind, nth)

    def disturb(
        self,
        seed: int,
        *,
        drop: float = 0.0,
        flip: float = 0.0,
        fail: float = 0.0,
        reorder: float = 0.0,
        slow_ns: int = 0,
    ) -> None:
        """The seed is another one for each poller."""
        for index, poller in enumerate(self._pollers):
            poller.disturb(seed + index, drop=drop, flip=flip, fail=fail, reorder=reorder, slow_ns=slow_ns)

    def hold(self, held: bool) -> None:
        for poller in self._pollers:
            poller.hold(held)

    def close(self) -> None:
        """Every poller is closed, even if one does not come back.

        Raises:
            NativeError: Of the first that is stuck.
        """
        stuck = None
        for poller in self._pollers:
            try:
                poller.close()
            except native.NativeError as error:
                stuck = stuck or error
        if stuck is not None:
            raise stuck


class _Ports:
    """Makes one record of what all pollers say about their ports, which are numbered for all of them here."""

    def __init__(self, num_pollers: int) -> None:
        self._opened: list[deque[Record]] = [deque() for _ in range(num_pollers)]
        self._closed: list[deque[Record]] = [deque() for _ in range(num_pollers)]
        self._lock = Lock()
        self._newest = 1
        self._rotated = False  # there are two generations

    @property
    def _oldest(self) -> int:
        return self._newest - self._rotated

    def close(self, port: int, pollers: Sequence[native.Poller]) -> None:
        """Close the oldest, which one poller or another may not have."""
        if port not in (0, self._oldest):
            raise KeyError(f"port {port} cannot be closed: the one to close is port {self._oldest}")
        with self._lock:  # no answer is read before it is known how many come
            found = [_closes_port(poller) for poller in pollers]
            if not any(found):
                raise KeyError(f"port {self._oldest} is not open")
            for index, has_one in enumerate(found):
                if not has_one:
                    self._closed[index].append((native.PORT_CLOSED, port, 0, native.monotonic_ns(), 0))

    def told(self, index: int, record: Record) -> list[Record]:
        """What a record of a poller gives the outside to read."""
        kind, port = record[:2]
        if kind == native.PORT_OPENED or (kind == native.PORT_FAILED and port == NEW_PORT):
            self._opened[index].append(record)
            return [self._all_opened(answers) for answers in _complete(self._opened)]
        if kind == native.PORT_CLOSED:
            with self._lock:
                self._closed[index].append(record)
                return [self._all_closed(answers) for answers in _complete(self._closed)]
        return [record]

    def _all_opened(self, answers: Sequence[Record]) -> Record:
        for answer in answers:
            if answer[0] == native.PORT_FAILED:
                return answer  # whoever has opened one is left with two, and closes the older one all the same
        self._newest, self._rotated = self._newest + 1, True
        return native.PORT_OPENED, self._newest, 0, max(answer[3] for answer in answers), 0

    def _all_closed(self, answers: Sequence[Record]) -> Record:
        port = self._oldest
        self._newest, self._rotated = self._newest + (not self._rotated), False
        return native.PORT_CLOSED, port, 0, max(answer[3] for answer in answers), 0


def _closes_port(poller: native.Poller) -> bool:
    try:
        poller.close_port()
    except KeyError:
        return False
    return True


def _complete(said: Sequence[deque[Record]]) -> list[list[Record]]:
    """Takes out the answers of all pollers, if each has given one."""
    return [[answers.popleft() for answers in said]] if all(said) else []


class _Progress:
    """Rounds that all pollers have gone: each of these is at least one round of every poller that runs."""

    def __init__(self, num_pollers: int) -> None:
        self._counted = [0] * num_pollers
        self._total = 0
        self._lock = Lock()

    def rounds(self, each: Sequence[int]) -> int:
        with self._lock:
            gone = [now - before for now, before in zip(each, self._counted, strict=True) if now]
            if least := min(gone, default=0):
                self._total += least
                self._counted = list(each)
            return self._total
