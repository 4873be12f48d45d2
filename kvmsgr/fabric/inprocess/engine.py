"""What the polling thread of the native layer does, one round at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from kvmsgr._ext import native
from kvmsgr._ext.native import OVERFLOW, REACHED, SLOT_REACHED, STRAY, StateFile

from .air import Air, Flight
from .links import Link, Transfer
from .lives import Lives
from .posting import Posting
from .records import Records
from .steps import Stream

MAX_READ = 64
"""Most entries of the completion queue that one round reads."""


class Engine:
    """Steps, posts and landings of one poller. Everything is done under the lock of the air."""

    def __init__(
        self,
        air: Air,
        state: StateFile,
        records: Records,
        *,
        num_nics: int,
        cq_entries: int,
        link_bytes: int,
        op_timeout_ns: int,
        heartbeat_ns: int,
        lease_ns: int,
        shared: bool,
    ) -> None:
        self.on_work: Callable[[], None] | None = None
        self.streams: list[Stream] = []
        self.vanished = False
        self._air = air
        self._state = state
        self._records = records
        self._cq_entries = cq_entries
        self._commands: deque[Callable[[], None]] = deque()
        self._landed: deque[int] = deque()
        self._completed: deque[tuple[Flight, int]] = deque()
        self._paused_until_ns = 0
        air.num_pollers += 1
        self._random = Random(f"{air.seed}/{air.num_pollers}")
        self.posting = Posting(air, state, records, self._random, link_bytes, self._watch)
        self.lives = Lives(
            air,
            self,
            records,
            self.posting,
            num_nics=num_nics,
            shared=shared,
            op_timeout_ns=op_timeout_ns,
            heartbeat_ns=heartbeat_ns,
            lease_ns=lease_ns,
        )

    # What wakes it

    def command(self, command: Callable[[], None]) -> None:
        """Have it done in the next round."""
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        if self.on_work is not None:
            self.on_work()

    @property
    def now_ns(self) -> int:
        return self._records.clock()

    def completed(self, flight: Flight, error: int) -> None:
        self._completed.append((flight, error))
        self.wake()

    @property
    def busy(self) -> bool:
        """Whether it should look again soon: something is under way that tells nobody when it goes on."""
        if any(link.flying or link.transfers or link.closing for link in self.lives.links.values()):
            return True
        return bool(self._commands) or any(step.waits for stream in self.streams for step in stream.steps)

    @property
    def next_ns(self) -> int | None:
        """When something is to be done even if nothing happens."""
        deadlines = [step.deadline_ns for stream in self.streams for step in stream.steps]
        carried = [self._air.next_ns(port.endpoint) for port in self.lives.ports]
        return min(deadlines + self.lives.next_ns + [at for at in carried if at is not None], default=None)

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
        worked |= self.lives.beat(now_ns)
        worked |= self.posting.round(self.lives)
        worked |= not self.lives.held and self._read_queue()
        for stream in self.streams:
            stream.check_deadlines(now_ns)
        self.lives.check_timeouts(now_ns)
        self.lives.go_on_moving()
        worked |= self.lives.go_on_closing(not self._landed and not self._completed)
        if self.posting.faults.slow_ns:
            self._paused_until_ns = now_ns + self.posting.faults.slow_ns
        return worked

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _watch(self) -> bool:
        moved = [stream.watch() for stream in self.streams]
        return any(moved)

    def _read_queue(self) -> bool:
        """Let some writes land, then read some of the completion queue."""
        self.lives.check_leases()
        worked = self._air.complete_some(self)
        for port in self._random.sample(self.lives.ports, len(self.lives.ports)):
            for _ in range(self._random.randint(0, MAX_READ // 4)):
                full = len(self._landed) + len(self._completed) >= self._cq_entries
                if full or not self._air.may_arrive(port.endpoint):
                    break
                worked = True
                immediate = self._air.arrive(port.endpoint)
                if immediate is not None:
                    self._landed.append(immediate)
        worked |= bool(self._landed or self._completed)
        for _ in range(min(len(self._landed), MAX_READ)):
            self._land(self._landed.popleft())
        for _ in range(min(len(self._completed), MAX_READ)):
            self._complete(*self._completed.popleft())
        return worked

    def _land(self, immediate: int) -> None:
        landed, ident, rows, slot_rows = self._state.land(immediate)
        if landed == native.LANDED_BEAT:
            self.lives.heard(ident)
            return
        self._records.count("landed_writes")
        self._records.count("landed_rows", (immediate & 0x3FFF) + 1)
        if landed == native.LANDED_REACHED:
            self._records.report(REACHED, ident, rows)
        elif landed == native.LANDED_OVERFLOW:
            self._records.report(OVERFLOW, ident, rows, immediate >> 14)
        elif landed in (native.LANDED_STRAY, native.LANDED_STRAY_SEEN):
            self._records.count("strays")
            if landed == native.LANDED_STRAY:
                self._records.report(STRAY, immediate >> 14, 0)
        if slot_rows:
            self._records.report(SLOT_REACHED, immediate >> 14, slot_rows)

    def _complete(self, flight: Flight, error: int) -> None:
        link = next((link for link in self.lives.links.values() if flight in link.flying), None)
        if link is None:  # its port was closed meanwhile
            return
        if error:
            self.lives.fail(link, error, native.FAILED_COMPLETION)
        elif not flight.beats:
            self._records.count("completed_writes")
        self.posting.retire(link, flight)

    def arrive(self, link: Link | None, transfer: Transfer) -> None:
        """A transfer takes its place on its link, or ends at once when that is gone."""
        if link is None or not link.alive:
            self.posting.stop(transfer)
            return
        transfer.link = link
        link.transfers.append(transfer)
        if transfer.ready:
            transfer.release(0)

    def stop_tag(self, number: int, tag: int) -> None:
        if number in self.lives.links:
            self.posting.stop_all(self.lives.links[number], tag)

    # The end

    def vanish(self) -> None:
        """Do nothing any more; what is sent to it never completes."""
        self.vanished = True
        for port in self.lives.ports:
            port.endpoint.held, port.endpoint.completes = True, False

    def wind_down(self) -> None:
        """Stop every step, then end every link."""
        self._obey()
        for stream in self.streams:
            stream.close()
        self.lives.close_all()
        while self.lives.go_on_closing(not self._landed and not self._completed):
            while self._landed:
                self._land(self._landed.popleft())
            while self._completed:
                self._complete(*self._completed.popleft())
