"""Posting: which write goes next on which link, and the faults that may meet it."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from kvmsgr._ext.native import FAILED_POST, SENT, STOPPED, StateFile

from .air import Air, Flight, Source
from .faults import Faults
from .links import Aside, Heart, Link, Operation, Transfer
from .plan import Entry, Run
from .records import Records

if TYPE_CHECKING:
    from .lives import Lives

MAX_POSTS = 32
"""Most writes of one round."""


class Posting:
    """The way of transfers into the air and back.

    Args:
        watch: Looks at the layer counters, after every post.
    """

    def __init__(
        self,
        air: Air,
        state: StateFile,
        records: Records,
        random: Random,
        link_bytes: int,
        watch: Callable[[], bool],
    ) -> None:
        self.faults = Faults()
        self.sources: list[Source] = []
        self.trace: list[tuple[int, int, int, int]] | None = None
        self.trace_capacity = 0
        self._air = air
        self._state = state
        self._records = records
        self._random = random
        self._link_bytes = link_bytes
        self._watch = watch

    # Transfers

    def stop(self, transfer: Transfer) -> None:
        """Drop what is not posted of it; it ends when nothing of it is in flight."""
        if transfer.stopped:
            return
        transfer.stopped = True
        if transfer.link is not None:
            transfer.link.aside = [aside for aside in transfer.link.aside if aside.transfer is not transfer]
            transfer.num_aside = 0
        self._settle(transfer)

    def stop_all(self, link: Link, tag: int | None = None) -> None:
        for transfer in list(link.transfers):
            if tag in (None, transfer.tag):
                self.stop(transfer)

    def retire(self, link: Link, flight: Flight) -> None:
        """An operation has come back, or never will."""
        operation = link.flying.pop(flight)
        link.flying_bytes -= operation.num_bytes
        link.again_since_ns = 0
        if operation.heart is not None:
            operation.heart.beating = False
        if operation.transfer is not None:
            operation.transfer.in_flight -= 1
            self._settle(operation.transfer)

    def _settle(self, transfer: Transfer) -> None:
        if not transfer.ended:
            return
        if transfer.link is not None:
            transfer.link.transfers.remove(transfer)
        kind = STOPPED if transfer.stopped else SENT
        self._records.report(kind, transfer.tag, transfer.rows_posted, transfer.writes_posted)

    # Posting

    def round(self, lives: Lives) -> bool:
        """Post some writes of some links; says whether any went."""
        ready = [link for link in lives.links.values() if link.alive]
        left = self._random.randint(1, MAX_POSTS)
        posted = False
        while ready and left:
            link = self._random.choice(ready)
            if self._post(link, lives):
                posted = True
                left -= 1
                self._watch()
            else:
                ready.remove(link)
        return posted

    def _post(self, link: Link, lives: Lives) -> bool:
        """Post the next write of a link. False: nothing may go on it now."""
        queue = [transfer for transfer in link.transfers if transfer.may_post]
        due = next((aside for aside in link.aside if aside.left <= 0 or not queue), None)
        full = link.num_flying >= link.window or link.flying_bytes >= self._link_bytes
        if full or not (queue or due) or not lives.may_post(link):
            return False
        transfer = self._random.choice(queue) if due is None else due.transfer
        entry = transfer.next_entry if due is None else due.entry
        if not self._air.has_room(link.targets[link.regions[entry.dst_region][3]]):
            self._records.count("again")
            link.again_since_ns = link.again_since_ns or self._records.clock()
            return False
        if due is not None:
            link.aside.remove(due)
            due.transfer.num_aside -= 1
            return self._send(link, due.transfer, due.entry, due.write)
        fault = self.faults.next()
        if fault == "fail" or link.nic in self.faults.broken_nics:
            lives.fail(link, errno.EIO, FAILED_POST)
            return False
        self._note(transfer)
        entry, write = transfer.advance()
        if fault == "reorder":
            link.aside.append(Aside(transfer, entry, write, self.faults.distance()))
            transfer.num_aside += 1
            return True
        return self._send(link, transfer, entry, write, fault)

    def _send(self, link: Link, transfer: Transfer, entry: Entry, write: Run, fault: str = "") -> bool:
        assert link.port is not None
        memory = self.sources[entry.src_region].address + entry.src_base + write.src
        base, _, key, target = link.regions[entry.dst_region]
        flight = Flight(
            link.port.endpoint, link.targets[target], key, base + entry.dst_base + write.dst, memory, write.num_bytes,
            transfer.immediate | write.rows - 1,
        )  # fmt: skip
        link.flying[flight] = Operation(link, transfer, None, write.num_bytes, self._records.clock())
        link.flying_bytes += write.num_bytes
        link.again_since_ns = 0
        transfer.in_flight += 1
        transfer.rows_posted += write.rows
        transfer.writes_posted += 1
        self._state.leg_posted(transfer.tag, write.rows, transfer.entry_index, transfer.num_entries)
        for aside in link.aside:
            aside.left -= 1
        for stat, change in (("writes", 1), ("bytes", write.num_bytes), ("rows", write.rows)):
            self._records.count(f"posted_{stat}", change)
        if fault == "drop":
            self._records.count("completed_writes")
            self.retire(link, flight)
            return True
        if fault == "flip":
            flight.payload = flipped(memory, write.num_bytes, transfer.template.item_bytes)
        flight.fails = fault == "error"
        self._air.send(flight)
        return True

    def _note(self, transfer: Transfer) -> None:
        if self.trace is not None and not transfer.write_index and len(self.trace) < self.trace_capacity:
            self.trace.append((transfer.tag, transfer.entry_index, transfer.bumps_seen, self._records.clock()))

    def beat(self, link: Link, heart: Heart, memory: int, now_ns: int) -> None:
        """Write a heartbeat to a cell of the peer, past the queue and the window. One to each is in flight at most."""
        assert link.port is not None
        to = heart.address, heart.key, heart.offset
        flight = Flight(link.port.endpoint, *to, memory, 8, heart.immediate, beats=True)
        link.flying[flight] = Operation(link, None, heart, 0, now_ns)
        heart.beating = True
        self._records.count("beats_sent")
        self._air.send(flight)


def flipped(memory: int, num_bytes: int, item_bytes: int) -> bytes:
    """The bytes with the highest byte of their first element flipped."""
    copy = bytearray(ctypes.string_at(memory, num_bytes))
    copy[item_bytes - 1] ^= 0xFF
    return bytes(copy)
