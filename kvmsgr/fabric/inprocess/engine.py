"""What the polling thread of the native layer does, one round at a time."""

from __future__ import annotations

import ctypes
import errno
from collections import deque
from collections.abc import Callable
from random import Random

from kvmsgr._ext import native
from kvmsgr._ext.native import LINK_CLOSED, LINK_FAILED, LINK_OPENED, OVERFLOW, REACHED, SLOT_REACHED, STRAY, StateFile
from kvmsgr.fabric.interface import FAILED_LEASE

from .air import Air, Flight, Region
from .links import Link, Transfer
from .posting import Posting
from .records import Records
from .steps import Stream

ENOKEY = 126
MAX_LANDINGS = 64
"""Most entries of the completion queue that one round reads."""


class Engine:
    """Links, steps and landings of one poller. Everything is done under the lock of the air."""

    def __init__(
        self,
        air: Air,
        state: StateFile,
        records: Records,
        *,
        cq_entries: int,
        link_bytes: int,
        op_timeout_ns: int,
        heartbeat_ns: int,
        lease_ns: int,
    ) -> None:
        self.on_work: Callable[[], None] | None = None
        self.links: dict[int, Link] = {}
        self.streams: list[Stream] = []
        self.held = self.vanished = False
        self._air = air
        self._state = state
        self._records = records
        self._cq_entries = cq_entries
        self._op_timeout_ns = op_timeout_ns
        self._heartbeat_ns = heartbeat_ns
        self._lease_ns = lease_ns
        self._commands: deque[Callable[[], None]] = deque()
        self._landed: deque[int] = deque()
        self._completed: deque[tuple[Flight, int]] = deque()
        self._paused_until_ns = 0
        self._heart = ctypes.create_string_buffer(b"kvmsgr", 8)
        air.num_pollers += 1
        self._random = Random(f"{air.seed}/{air.num_pollers}")
        self.posting = Posting(
            air, state, records, self._random, link_bytes, self._watch, self._is_live, self.fail_link
        )

    # What wakes it

    def command(self, command: Callable[[], None]) -> None:
        """Have it done in the next round."""
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        if self.on_work is not None:
            self.on_work()

    def completed(self, flight: Flight, error: int) -> None:
        self._completed.append((flight, error))
        self.wake()

    # One round

    def round(self) -> bool:
        """Do what can be done now; says whether anything was."""
        now_ns = self._records.clock()
        if self.vanished or now_ns < self._paused_until_ns:
            return False
        self._records.count("rounds")
        self._state.poller_seen(native.monotonic_ns())
        worked = bool(self._commands)
        self._obey()
        worked |= self._watch()
        worked |= self._beat(now_ns)
        worked |= self.posting.round(list(self.links.values()))
        worked |= not self.held and self._read_queue()
        self._check_times(now_ns)
        worked |= self._go_on_closing()
        if self.posting.faults.slow_ns:
            self._paused_until_ns = now_ns + self.posting.faults.slow_ns
        return worked

    @property
    def busy(self) -> bool:
        """Whether it should look again soon: something is under way that tells nobody when it goes on."""
        if any(link.flying or link.transfers or link.closing for link in self.links.values()):
            return True
        return bool(self._commands) or any(step.waits for stream in self.streams for step in stream.steps)

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _watch(self) -> bool:
        moved = [stream.watch() for stream in self.streams]
        return any(moved)

    def _read_queue(self) -> bool:
        """Let some writes land, then read some of the completion queue."""
        self._check_leases()
        worked = self._air.complete_some(self)
        for link in self._random.sample(list(self.links.values()), len(self.links)):
            for _ in range(self._random.randint(0, MAX_LANDINGS // 4)):
                full = len(self._landed) + len(self._completed) >= self._cq_entries
                if full or link.endpoint is None or not link.endpoint.inbox:
                    break
                worked = True
                immediate = self._air.arrive(link.endpoint)
                if immediate is not None:
                    self._landed.append(immediate)
        worked |= bool(self._landed or self._completed)
        for _ in range(min(len(self._landed), MAX_LANDINGS)):
            self._land(self._landed.popleft())
        for _ in range(min(len(self._completed), MAX_LANDINGS)):
            self._complete(*self._completed.popleft())
        return worked

    # What has landed, and what is complete

    def _land(self, immediate: int) -> None:
        landed, attempt, rows, slot_rows = self._state.land(immediate)
        if landed == native.LANDED_BEAT:
            if attempt in self.links:  # a heartbeat names its link
                self.links[attempt].heard_ns = self._records.clock()
            return
        self._records.count("landed_writes")
        self._records.count("landed_rows", (immediate & 0x3FFF) + 1)
        if landed == native.LANDED_REACHED:
            self._records.report(REACHED, attempt, rows)
        elif landed == native.LANDED_OVERFLOW:
            self._records.report(OVERFLOW, attempt, rows, immediate >> 14)
        elif landed in (native.LANDED_STRAY, native.LANDED_STRAY_SEEN):
            self._records.count("strays")
            if landed == native.LANDED_STRAY:
                self._records.report(STRAY, immediate >> 14, 0)
        if slot_rows:
            self._records.report(SLOT_REACHED, immediate >> 14, slot_rows)

    def _complete(self, flight: Flight, error: int) -> None:
        link = next((link for link in self.links.values() if flight in link.flying), None)
        if link is None:  # closed meanwhile
            return
        if error:
            self.fail_link(link, error, native.FAILED_COMPLETION)
        elif link.flying[flight].transfer is not None:
            self._records.count("completed_writes")
        self.posting.retire(link, flight)

    # Links

    def open_link(self, link: Link) -> None:
        self.links[link.number] = link
        taken = {key for other in self.links.values() if other.endpoint for key in other.keys}
        if len(set(link.keys)) < len(link.keys) or taken & set(link.keys):
            self.fail_link(link, ENOKEY, native.FAILED_REGISTER)
            return
        places = [(region.address, region.num_bytes) for region in self.posting.sources]
        places.append((ctypes.addressof(link.cell), len(link.cell)))
        regions = [Region(*place, key) for place, key in zip(places, link.keys, strict=True)]
        link.endpoint = self._air.open(self, regions)
        self._records.report(LINK_OPENED, link.number, 0)

    def connect_link(self, link: Link) -> None:
        link.connected = True
        link.heard_ns = self._records.clock()

    def fail_link(self, link: Link, error: int, call: int) -> None:
        self._records.count("errors")
        if link.failed or link.closing:
            return
        link.failed = True
        self._records.report(LINK_FAILED, link.number, error, call)
        self.posting.stop_all(link)

    def stop_tag(self, number: int, tag: int) -> None:
        if number in self.links:
            self.posting.stop_all(self.links[number], tag)

    def close_link(self, link: Link) -> None:
        """A fence: over when nothing can land and the completion queue has been read to its end."""
        link.closing = True
        self.posting.stop_all(link)

    def _go_on_closing(self) -> bool:
        closing = [link for link in self.links.values() if link.closing]
        for link in closing:
            if link.endpoint is not None:
                self._air.close(link.endpoint)
                link.endpoint = None
            elif not self._landed and not self._completed:
                self._end_link(link)
        return bool(closing)

    def _end_link(self, link: Link) -> None:
        for flight in list(link.flying):
            self.posting.retire(link, flight)
        self._records.report(LINK_CLOSED, link.number, 0)
        del self.links[link.number]

    def arrive(self, link: Link | None, transfer: Transfer) -> None:
        """A transfer takes its place on its link, or ends at once when that is gone."""
        if link is None or not link.alive:
            self.posting.stop(transfer)
            return
        transfer.link = link
        link.transfers.append(transfer)
        if transfer.ready:
            transfer.release(0)

    # Time

    def next_ns(self) -> int | None:
        """When something is to be done even if nothing happens."""
        times = [step.deadline_ns for stream in self.streams for step in stream.steps]
        for link in self.links.values():
            if link.alive and link.beat is not None:
                times += [] if link.beating else [link.beat_due_ns]
                times += [] if self.held else [link.heard_ns + self._lease_ns]
        return min(times, default=None)

    def hold(self, held: bool) -> None:
        """Read nothing, or go on; leases are judged anew from then."""
        self.held = held
        if not held:
            for link in self.links.values():
                link.heard_ns = self._records.clock()

    def vanish(self) -> None:
        """Do nothing any more; what is sent to it never completes."""
        self.vanished = True
        for link in self.links.values():
            if link.endpoint is not None:
                link.endpoint.held, link.endpoint.completes = True, False

    def _is_live(self, link: Link) -> bool:
        """Judged by a fresh clock, before anything that a peer might rely on."""
        judged = link.alive and link.beat is not None and not self.held
        if judged and self._records.clock() - link.heard_ns > self._lease_ns:
            self.fail_link(link, errno.ETIMEDOUT, FAILED_LEASE)
        return link.alive

    def _check_leases(self) -> None:
        for link in list(self.links.values()):
            self._is_live(link)

    def _beat(self, now_ns: int) -> bool:
        due = [
            link
            for link in self.links.values()
            if link.alive and link.beat is not None and not link.beating and now_ns >= link.beat_due_ns
        ]
        for link in due:
            if self._is_live(link):
                link.beat_due_ns = now_ns + self._heartbeat_ns
                self.posting.beat(link, ctypes.addressof(self._heart), now_ns)
        return bool(due)

    def _check_times(self, now_ns: int) -> None:
        for stream in self.streams:
            stream.check_deadlines(now_ns)
        for link in list(self.links.values()):
            if not link.alive:
                continue
            since_ns = min((operation.posted_ns for operation in link.flying.values()), default=now_ns)
            if now_ns - min(since_ns, link.again_since_ns or now_ns) > self._op_timeout_ns:
                self.fail_link(link, errno.ETIMEDOUT, native.FAILED_TIMEOUT)

    # The end

    def wind_down(self) -> None:
        """Stop every step, then end every link."""
        self._obey()
        for stream in self.streams:
            stream.close()
        for link in list(self.links.values()):
            self.close_link(link)
        while self.links:
            self._go_on_closing()
            while self._landed:
                self._land(self._landed.popleft())
            while self._completed:
                self._complete(*self._completed.popleft())
