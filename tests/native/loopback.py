"""Two pollers in one process, each with its own memory, paired by one link."""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from kvmsgr._ext import native
from kvmsgr.fabric.interface import ORDER_FIELDS

ROW_BYTES = 64
PAGE_ROWS = 16
PAGE_BYTES = ROW_BYTES * PAGE_ROWS
PAGE = (PAGE_BYTES, 1, 0)
NUM_PAGES = 64
NUM_LAYERS = 4
LAYER_BYTES = PAGE_BYTES * NUM_PAGES
DEADLINE_S = 20.0
SLOT, GENERATION = 5, 3
BEAT_SLOT = 100
IMMEDIATE = SLOT << 18 | GENERATION << 14

Record = tuple[int, int, int, int, int]
Pairs = Sequence[tuple[int, int]]
NO_EDGES = np.zeros((0, 4), dtype=np.uint64)
Triple = tuple[int, int, int]
Offer = tuple[bytes, list[Triple], Triple]  # address, regions (base, bytes, key), heartbeats (base, key, immediate)


class Options(TypedDict, total=False):
    """Of a poller."""

    max_write_bytes: int
    link_bytes: int
    op_timeout_ns: int
    heartbeat_ns: int
    lease_ns: int
    spin: bool
    shared_endpoint: bool
    nics: Sequence[str | None]


class Node:
    """A poller with one region of memory: NUM_LAYERS layers of NUM_PAGES pages."""

    def __init__(self, provider: str, **options: Unpack[Options]) -> None:
        self.memory = np.zeros(NUM_LAYERS * LAYER_BYTES, dtype=np.uint8)
        self.state = native.StateFile(None, incarnation=secrets.randbits(64))
        self.poller = native.Poller(provider, self.state, **options)
        self.poller.register(self.memory.ctypes.data, self.memory.nbytes)
        self.counter = native.LayerCounter(8)
        self.poller.add_counter(self.counter)
        self.seen: list[Record] = []
        self.beat_slots: dict[int, int] = {}

    @property
    def pages(self) -> npt.NDArray[np.uint8]:
        """The memory as (layer, page, byte)."""
        return self.memory.reshape(NUM_LAYERS, NUM_PAGES, PAGE_BYTES)

    def wait(self, kind: int, id: int | None = None) -> Record:
        """The next record of this kind (and id); others that come first are kept for later waits."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for index, record in enumerate(self.seen):
                if record[0] == kind and id in (None, record[1]):
                    return self.seen.pop(index)
            left = deadline - time.monotonic()
            assert left > 0, f"no record {kind} {id}; seen {self.seen}, stats {self.poller.stats()}"
            select.select([self.poller.fd], [], [], left)
            self.seen += self.poller.take()

    def drain(self, *kinds: int) -> list[Record]:
        """All records of these kinds that have been made so far."""
        while batch := self.poller.take():
            self.seen += batch
        return [record for record in self.seen if record[0] in kinds]

    def open_link(self, nic: int = 0) -> int:
        link = self.poller.open_link([secrets.randbits(63), secrets.randbits(63)], nic)
        self.wait(native.LINK_OPENED, link)
        return link

    def offer(self, link: int) -> Offer:
        """What a peer needs to connect to an opened link; its heartbeats get a slot of their own."""
        slot = self.beat_slots.setdefault(link, BEAT_SLOT + len(self.beat_slots))
        self.state.link_beat(slot, 0, link)
        base, _, key = self.poller.link_cell(link)
        return self.poller.link_address(link), self.poller.link_regions(link), (base, key, slot << 18)

    def close(self) -> None:
        self.poller.close()
        self.state.close()
        del self.counter


class Pair:
    """`source` writes to `target` over one link."""

    def __init__(self, provider: str, window: int = 64, **options: Unpack[Options]) -> None:
        self.source = Node(provider, **options)
        self.target = Node(provider, **options)
        self.source.memory[:] = np.random.default_rng(7).integers(1, 256, self.source.memory.size, dtype=np.uint8)
        self.window = window
        self.num_dropped = 0
        self.reconnect()

    def reconnect(self) -> None:
        """Pairs the two by a new link."""
        self.link, self.target_link = connect(self.source, self.target, self.window)
        self.template = add_template(self.source, self.link)

    def begin(
        self,
        pairs: Pairs,
        *,
        tag: int = 1,
        ready: bool = False,
        num_bumps: int = NUM_LAYERS,
        deadline_s: float = DEADLINE_S,
    ) -> int:
        """Arms one transfer of whole pages, as a step of the source's counter."""
        transfer = (self.link, self.template, IMMEDIATE, tag, ready)
        return begin(self.source, [(transfer, pairs)], num_bumps, deadline_s)

    def arm(self, parts: Sequence[tuple[int, int]], orders: Sequence[Sequence[int]], pairs: Pairs) -> list[int]:
        """Arms a step on several counters; orders as the poller takes them, but for slices of `pairs`."""
        raw = np.array(orders, dtype=np.int64).reshape(len(orders), len(orders[0]) if orders else len(ORDER_FIELDS))
        pages = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        return self.source.poller.begin_step(parts, raw, pages, NO_EDGES, int(DEADLINE_S * 1e9))

    def begin_nothing(self, num_bumps: int = NUM_LAYERS) -> int:
        """A step of the source without transfers."""
        return begin(self.source, [], num_bumps)

    def expect(self, num_pages: int) -> None:
        self.expect_rows(num_pages * PAGE_ROWS * NUM_LAYERS)

    def expect_rows(self, num_rows: int, *, attempt: int = 1) -> None:
        """Attempt 1 of the target counts what lands in the slot that `begin` names."""
        self.target.state.open_attempt(attempt, num_rows, f"attempt-{attempt}")
        self.target.state.link_slot(SLOT, GENERATION, attempt)

    def wait_landed(self, stat: str, num: int) -> None:
        """Until `stat` of the target says that so much has landed in all, expected or not."""
        limit_ns = native.monotonic_ns() + int(DEADLINE_S * 1e9)
        while (stats := self.target.poller.stats())[stat] < num:
            assert native.monotonic_ns() < limit_ns, stats

    def run_step(self, ticket: int, num_bumps: int = NUM_LAYERS) -> None:
        self.source.counter.start(ticket)
        for _ in range(num_bumps):
            self.source.counter.bump()

    def assert_moved(self, pairs: Pairs) -> None:
        for src, dst in pairs:
            np.testing.assert_array_equal(self.target.pages[:, dst], self.source.pages[:, src])

    def __enter__(self) -> Pair:
        return self

    def inject_drop(self, nth: int) -> None:
        self.source.poller.inject("drop", nth)
        self.num_dropped += 1

    def settle(self) -> None:
        """Waits until the source posts nothing more and all of it has landed.

        Within one process libfabric's shm lends each endpoint the other's memory: closing one under traffic
        crashes the other. Two processes are safe.
        """
        before: tuple[int, int] | None = None
        while (now := self.tried()) != before:
            before = now
            self.wait_landed("landed_writes", now[0] - self.num_dropped)
            rounds = self.source.poller.stats()["rounds"]
            while self.source.poller.stats()["rounds"] < rounds + 3:  # what the words released has been tried
                pass

    def tried(self) -> tuple[int, int]:
        """Writes that the source has posted, and those that the provider has put off."""
        stats = self.source.poller.stats()
        return stats["posted_writes"], stats["again"]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.source.poller.provider == "shm" and not self.source.poller.closed:
            self.settle()
        self.source.close()
        self.target.close()


def connect(source: Node, target: Node, window: int = 64) -> tuple[int, int]:
    """Opens a link on both and pairs them."""
    ours, theirs = source.open_link(), target.open_link()
    our_offer, their_offer = source.offer(ours), target.offer(theirs)
    connect_link(source, ours, their_offer, window)
    connect_link(target, theirs, our_offer, window)
    return ours, theirs


def connect_link(node: Node, link: int, offer: Offer, window: int = 64) -> None:
    address, regions, beat = offer
    node.poller.connect_link(link, [address], [(*region, 0) for region in regions], window, [(0, *beat)])


def retarget_link(node: Node, link: int, offer: Offer) -> None:
    address, regions, beat = offer
    node.poller.retarget_link(link, [address], [(*region, 0) for region in regions], [(0, *beat)])


def add_template(node: Node, link: int, num_bytes: int = PAGE_BYTES) -> int:
    """Whole pages, one run a page, in every layer; layer l goes at bump l + 1."""
    runs = np.array([[0, 0, num_bytes, num_bytes // ROW_BYTES]], dtype=np.uint64)
    layers = np.arange(NUM_LAYERS)
    zeros = np.zeros_like(layers)
    entries = np.stack([zeros, layers * LAYER_BYTES, zeros, layers * LAYER_BYTES, layers + 1], axis=1)
    return node.poller.add_template(link, runs, PAGE, PAGE, entries.astype(np.int64), ROW_BYTES, 2)


def begin(
    node: Node,
    transfers: Sequence[tuple[tuple[int, int, int, int, bool], Pairs]],
    num_bumps: int = NUM_LAYERS,
    deadline_s: float = DEADLINE_S,
    edges: npt.NDArray[np.uint64] = NO_EDGES,
) -> int:
    """Arms several transfers of whole pages in one step: (link, template, immediate, tag, ready) each. The edges are
    those of the first one."""
    orders = np.zeros((len(transfers), len(ORDER_FIELDS)), dtype=np.int64)
    pages = np.array([pair for _, pairs in transfers for pair in pairs], dtype=np.int32).reshape(-1, 2)
    page = 0
    for row, (transfer, pairs) in zip(orders, transfers, strict=True):
        row[:] = (0, *transfer, page, page + len(pairs), 0, 0)
        page += len(pairs)
    orders[:1, -1] = len(edges)
    (ticket,) = node.poller.begin_step([(0, num_bumps)], orders, pages, edges, int(deadline_s * 1e9))
    return ticket
