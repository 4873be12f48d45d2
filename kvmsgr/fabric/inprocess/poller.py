"""The in-process poller as its callers see it: the calls of `native.Poller`, checked the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvmsgr._ext.native import LayerCounter, StateFile
from kvmsgr.fabric.interface import ORDER_FIELDS, Beat, PageUnits, Record, Remote, RemoteAt

from .air import Air, Source
from .engine import Engine
from .links import Link, Port, Transfer, hearts_of
from .orders import MAX_BUMPS, part_streams, read_orders
from .plan import Entry, Run, Template, check_page, check_run
from .records import Records
from .steps import Step, Stream

LONGEST_NS = (1 << 63) - 1


class InProcessPoller:
    """Posts, counts what lands and watches layer counters, for messengers of one process.

    It has no thread of its own: each `pump` is one round, and what it does next is drawn from the seed of the air.
    Every method may be called from any thread. Where nothing else is said it does what `native.Poller` does.

    Args:
        air: What it shares with its peers.
        state: What landed rows are counted in.
        nics: Network interfaces: what they are called makes no difference.
        clock: Now, in nanoseconds.
    """

    provider = "inprocess"
    fence_proven = True

    def __init__(
        self,
        air: Air,
        state: StateFile,
        *,
        nics: Sequence[str | None] = (None,),
        clock: Callable[[], int] = time.monotonic_ns,
        cq_entries: int = 8192,
        max_write_bytes: int = 1 << 20,
        link_bytes: int = 1 << 20,
        op_timeout_ns: int = 5_000_000_000,
        heartbeat_ns: int = 500_000_000,
        lease_ns: int = 2_000_000_000,
        shared_endpoint: bool = False,
    ) -> None:
        if not nics:
            raise ValueError("0 network interfaces: want at least 1")
        self.air = air
        self.closed = False
        self._state = state
        self._records = Records(clock)
        self._engine = Engine(
            air,
            state,
            self._records,
            num_nics=len(nics),
            cq_entries=cq_entries,
            link_bytes=link_bytes,
            op_timeout_ns=op_timeout_ns,
            heartbeat_ns=heartbeat_ns,
            lease_ns=lease_ns,
            shared=shared_endpoint,
        )
        self._max_write_bytes = max_write_bytes
        self._started = False
        self._shared = shared_endpoint
        self._owners: list[object] = []
        self._links: dict[int, Link] = {}  # those that nobody has asked to close
        self._templates: dict[int, Template] = {}
        self._num_links = self._num_templates = 0

    # Its rounds

    def pump(self) -> bool:
        """Do one round; says whether there was anything to do."""
        with self.air.lock:
            return not self.closed and self._engine.round()

    def drive(self, clock: Callable[[], int], on_work: Callable[[], None]) -> None:
        """Go by `clock` from now on, and call `on_work`, from any thread, when a round would do something."""
        with self.air.lock:
            self._records.clock, self._engine.on_work = clock, on_work

    @property
    def busy(self) -> bool:
        """Something is under way of which nobody tells when it goes on: pump again soon."""
        with self.air.lock:
            return not self.closed and not self._engine.vanished and self._engine.busy

    @property
    def next_ns(self) -> int | None:
        """When there is something to do even if nothing happens until then."""
        with self.air.lock:
            return None if self.closed or self._engine.vanished else self._engine.next_ns

    @property
    def fd(self) -> int:
        return self._records.fd

    def take(self, max_records: int = 256) -> list[Record]:
        with self.air.lock:
            return self._records.take(max_records)

    def stats(self) -> dict[str, int]:
        with self.air.lock:
            return dict(self._records.stats)

    def close(self) -> None:
        with self.air.lock:
            if not self.closed:
                self._engine.wind_down()
                self.closed = True
                self._engine.on_work = None
                self._links.clear()
                self._templates.clear()
                self._owners.clear()
                self._engine.streams.clear()

    # Memory and counters

    def self_test(self) -> None:
        """There is nothing that could fail; it only has its time, before the first link or step."""
        with self.air.lock:
            self._check_not_started("the self-test comes before the first link or step")

    def register(self, address: int, num_bytes: int, owner: object = None, nics: Sequence[int] | None = None) -> int:
        with self.air.lock:
            self._check_not_started("regions are registered before the first link or step")
            sources = self._engine.posting.sources
            if num_bytes <= 0:
                raise ValueError(f"region {len(sources)}: {num_bytes} bytes at {address:#x}")
            every = range(self._engine.lives.num_nics)
            chosen = frozenset(every if nics is None else nics)
            if not chosen or not chosen <= set(every):
                raise ValueError(f"network interfaces {sorted(chosen)} of {len(every)}")
            sources.append(Source(address, num_bytes, chosen))
            self._owners.append(owner)
            return len(sources) - 1

    def add_counter(self, counter: LayerCounter) -> int:
        with self.air.lock:
            self._check_open()
            engine = self._engine
            if any(stream.counter is counter for stream in engine.streams):
                raise ValueError("this layer counter is watched already")
            index = len(engine.streams)
            engine.streams.append(
                Stream(counter, index, self._state, self._records.report, self._arrive, engine.posting.stop)
            )
            return index

    # Links

    def open_link(self, keys: Sequence[int], nic: int = 0) -> int:
        with self.air.lock:
            self._check_open()
            if not 0 <= nic < self._engine.lives.num_nics:
                raise ValueError(f"interface {nic} of {self._engine.lives.num_nics}")
            num_regions = self._num_regions(nic)
            if len(keys) != num_regions + 1:
                raise ValueError(f"{len(keys)} keys for {num_regions} regions and a cell")
            self._started = True
            self._num_links += 1
            link = self._links[self._num_links] = Link(self._num_links, nic, tuple(keys))
            self._engine.command(lambda: self._engine.lives.open(link))
            return link.number

    def link_address(self, link: int) -> bytes:
        with self.air.lock:
            return self._landing(link).endpoint.address

    def link_regions(self, link: int) -> list[Remote]:
        with self.air.lock:
            return self._places(link)[:-1]

    def link_cell(self, link: int) -> Remote:
        with self.air.lock:
            return self._places(link)[-1]

    def connect_link(
        self,
        link: int,
        targets: Sequence[bytes],
        regions: Sequence[RemoteAt],
        window: int,
        beats: Sequence[Beat],
    ) -> None:
        with self.air.lock:
            ours = self._opened(link)
            if ours.asked:
                raise RuntimeError(f"link {link} is connected already")
            if window < 1:
                raise ValueError(f"a window of {window} operations; want at least 1")
            ours.hearts = hearts_of(targets, regions, beats)
            ours.asked = True
            ours.targets, ours.regions, ours.window = list(targets), list(regions), window
            self._engine.command(lambda: self._engine.lives.connect(ours))

    def close_link(self, link: int, fence: bool = True) -> None:
        with self.air.lock:
            ours = self._find(link)
            del self._links[link]
            self._templates = {number: other for number, other in self._templates.items() if other.link != link}
            self._engine.command(lambda: self._engine.lives.close(ours, fence))

    # Ports that all links share

    def rotate(self, keys: Sequence[Sequence[int]]) -> None:
        with self.air.lock:
            self._check_shared()
            if len(keys) != self._engine.lives.num_nics:
                raise ValueError(f"{len(keys)} lists of keys for {self._engine.lives.num_nics} interfaces")
            for nic, its_keys in enumerate(keys):
                if len(its_keys) != self._num_regions(nic):
                    raise ValueError(f"{len(its_keys)} keys for {self._num_regions(nic)} regions of interface {nic}")
            self._engine.command(lambda: self._engine.lives.rotate(keys))

    def close_port(self, port: int = 0) -> None:
        with self.air.lock:
            self._check_shared()
            open_ports = [each.number for each in self._engine.lives.ports]
            port = port or min(open_ports, default=0)
            if port not in open_ports:
                raise KeyError(f"port {port} is not open")
            self._engine.command(lambda: self._engine.lives.close_port(port))

    def retarget_link(
        self, link: int, targets: Sequence[bytes], regions: Sequence[RemoteAt], beats: Sequence[Beat]
    ) -> None:
        with self.air.lock:
            ours, new, hearts = self._find(link), list(regions), hearts_of(targets, regions, beats)
            if not ours.asked:
                raise RuntimeError(f"link {link} is not connected: there is nothing to point elsewhere")
            if len(targets) != len(ours.targets) or len(hearts) != len(ours.hearts):
                raise ValueError(f"link {link}: {len(targets)} targets and {len(hearts)} heartbeats are not as before")
            if [(*region[:2], region[3]) for region in new] != [(*region[:2], region[3]) for region in ours.regions]:
                raise ValueError(f"link {link}: the peer's regions are {new}; only their keys may change")
            self._engine.command(lambda: self._engine.lives.retarget(ours, list(targets), new, hearts))

    def resume_link(self, link: int) -> None:
        with self.air.lock:
            ours = self._find(link)
            self._engine.command(lambda: setattr(ours, "held", False))

    def _num_regions(self, nic: int) -> int:
        return sum(nic in source.nics for source in self._engine.posting.sources)

    def _check_shared(self) -> None:
        self._check_open()
        if not self._shared:
            raise RuntimeError("each link has a port of its own: open the poller with shared_endpoint=True")

    # What is written

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
        with self.air.lock:
            ours = self._find(link)
            if not ours.asked:
                raise RuntimeError(f"link {link} is not connected: a template needs the peer's regions")
            listed = tuple(Entry(*entry) for entry in entries.tolist())
            if not listed or any(after.signal < before.signal for before, after in pairwise(listed)):
                raise ValueError("a template needs entries, and they come by signal")
            if not 1 <= item_bytes <= row_bytes:
                raise ValueError(f"row_bytes {row_bytes} and item_bytes {item_bytes}: want 1 <= item <= row")
            check_page(src_page, "source")
            check_page(dst_page, "destination")
            moved = tuple(Run(*run) for run in runs.tolist())
            for index, run in enumerate(moved):
                check_run(run, f"run {index}")
            rooms = tuple(self._rooms(ours, index, entry) for index, entry in enumerate(listed))
            self._num_templates += 1
            self._templates[self._num_templates] = Template(
                link, moved, src_page, dst_page, listed, rooms, row_bytes, item_bytes
            )
            return self._num_templates

    def begin_step(
        self,
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
        deadline_ns: int,
    ) -> list[int]:
        with self.air.lock:
            self._check_open()
            self._started = True
            streams = part_streams(self._engine.streams, parts)
            for counter, num_bumps in parts:
                if not 0 <= num_bumps <= MAX_BUMPS:
                    raise ValueError(f"layer counter {counter}: {num_bumps} bumps")
            bumps = [num_bumps for _, num_bumps in parts]
            transfers = read_orders(self._templates, bumps, orders, pages, edges, self._max_write_bytes)
            tickets = [stream.next_ticket() for stream in streams]
            limit_ns = min(self._records.clock() + deadline_ns, LONGEST_NS)
            steps = [
                Step(ticket, num_bumps, limit_ns, its)
                for ticket, (_, num_bumps), its in zip(tickets, parts, transfers, strict=True)
            ]

            def arm() -> None:
                for stream, step in zip(streams, steps, strict=True):
                    stream.arm(step)

            for stream, ticket in zip(streams, tickets, strict=True):
                stream.claim(ticket)
            self._engine.command(arm)
            return tickets

    def join_step(
        self,
        parts: Sequence[tuple[int, int]],
        orders: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        edges: npt.NDArray[np.uint64],
    ) -> None:
        with self.air.lock:
            self._check_open()
            streams = part_streams(self._engine.streams, parts)
            if not all(ticket for _, ticket in parts):
                raise ValueError(f"{list(parts)}: ticket 0 is no step's")
            bumps = [MAX_BUMPS] * len(parts)  # how many it shows the step knows
            transfers = read_orders(self._templates, bumps, orders, pages, edges, self._max_write_bytes)
            for index, transfer in enumerate(orders[:, ORDER_FIELDS.index("ready")].tolist()):
                if transfer:
                    raise ValueError(f"transfer {index}: it joins a step, and cannot be ready before it")

            def join() -> None:
                for stream, (_, ticket), its in zip(streams, parts, transfers, strict=True):
                    stream.join(ticket, its)

            self._engine.command(join)

    def abandon(self, counter: int, ticket: int) -> None:
        with self.air.lock:
            self._check_open()
            streams = self._engine.streams
            if not 0 <= counter < len(streams):
                raise ValueError(f"there is no layer counter {counter}")
            self._engine.command(lambda: streams[counter].abandon(ticket))

    def resume_counter(self, counter: int, ticket: int) -> None:
        with self.air.lock:
            self._check_open()
            streams = self._engine.streams
            if not 0 <= counter < len(streams):
                raise ValueError(f"there is no layer counter {counter}")
            self._engine.command(lambda: streams[counter].resume(ticket))

    def stop(self, link: int, tag: int) -> None:
        with self.air.lock:
            self._check_open()
            self._engine.command(lambda: self._engine.stop_tag(link, tag))

    def _arrive(self, transfer: Transfer) -> None:
        self._engine.arrive(self._links.get(transfer.template.link), transfer)

    def _rooms(self, link: Link, index: int, entry: Entry) -> tuple[int, int]:
        sources = self._engine.posting.sources
        known = 0 <= entry.src_region < len(sources) and 0 <= entry.dst_region < len(link.regions)
        if known and 0 <= entry.signal <= MAX_BUMPS:
            if link.nic not in sources[entry.src_region].nics:
                raise ValueError(
                    f"entry {index}: source region {entry.src_region} is not registered on the interface of link "
                    f"{link.number}"
                )
            src = sources[entry.src_region].num_bytes - entry.src_base
            dst = link.regions[entry.dst_region][1] - entry.dst_base
            if min(src, dst, entry.src_base, entry.dst_base) >= 0:
                return src, dst
        raise ValueError(
            f"entry {index}: no such place: {entry} of {len(sources)} regions of ours, {len(link.regions)}"
        )

    # Faults and tests

    def inject(self, kind: str, nth: int) -> None:
        """Spoil the nth write from now. Besides the native kinds there is "error": its completion fails."""
        with self.air.lock:
            self._engine.posting.faults.inject(kind, nth)

    def break_nic(self, nic: int, broken: bool = True) -> None:
        """Have every write that is posted on a network interface fail, or go well again."""
        with self.air.lock:
            broken_nics = self._engine.posting.faults.broken_nics
            (broken_nics.add if broken else broken_nics.discard)(nic)

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
        with self.air.lock:
            chances = {"drop": drop, "flip": flip, "fail": fail, "reorder": reorder}
            self._engine.posting.faults.disturb(seed, chances, slow_ns)

    def hold(self, held: bool) -> None:
        """Read nothing, so that what is sent to it stays in the air; `Air.hold` does it to one endpoint alone."""
        with self.air.lock:
            self._engine.lives.hold(held)
            self._engine.wake()

    def vanish(self) -> None:
        """Do nothing any more, as if the process were gone: what is sent to it stays in the air, its links stay open
        and silent. Only `close` still works, and takes it all down."""
        with self.air.lock:
            self._engine.vanish()

    def trace(self, capacity: int) -> None:
        with self.air.lock:
            posting = self._engine.posting
            if capacity < 1:
                raise ValueError("a trace needs room")
            if posting.trace is not None:
                raise RuntimeError("the trace is on already")
            posting.trace, posting.trace_capacity = [], capacity

    def take_trace(self) -> list[tuple[int, int, int, int]]:
        with self.air.lock:
            posting = self._engine.posting
            taken = list(posting.trace or ())
            if posting.trace is not None:
                posting.trace.clear()
            return taken

    # Checks

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the poller is closed")

    def _check_not_started(self, otherwise: str) -> None:
        self._check_open()
        if self._started:
            raise RuntimeError(otherwise)

    def _find(self, link: int) -> Link:
        self._check_open()
        if link not in self._links:
            raise KeyError(f"link {link} is not open")
        return self._links[link]

    def _opened(self, link: int) -> Link:
        found = self._find(link)
        if found.port is None:
            raise RuntimeError(f"link {link} has not been opened yet: wait for its LINK_OPENED record")
        return found

    def _landing(self, link: int) -> Port:
        port = self._engine.lives.landing(self._opened(link))
        if port is None:
            raise RuntimeError(f"link {link} has no port: the one that all links shared is closed")
        return port

    def _places(self, link: int) -> list[Remote]:
        """Base, bytes and key of each region and of the cell. Peers name bytes by offset: every base is 0."""
        port = self._landing(link)
        keys = (*port.keys, self._find(link).keys[-1])
        return [(0, port.endpoint.regions[key].num_bytes, key) for key in keys]
