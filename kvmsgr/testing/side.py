"""One end of a pair of pollers: its memory, its records, and what tests ask of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from kvmsgr.fabric import records
from kvmsgr.fabric.interface import (
    ORDER_FIELDS,
    PORT_CLOSED,
    PORT_OPENED,
    Beat,
    LayerCounter,
    PageUnits,
    Record,
    Remote,
    RemoteAt,
    StateFile,
)
from kvmsgr_protocol import NUM_GENERATIONS, immediate

from .fabrics import FabricUnderTest, Options

ROW_BYTES = 64
PAGE_ROWS = 16
PAGE_BYTES = ROW_BYTES * PAGE_ROWS
NUM_PAGES = 64
NUM_LAYERS = 4
LAYER_BYTES = PAGE_BYTES * NUM_PAGES
ROWS_A_PAGE = PAGE_ROWS * NUM_LAYERS
DEADLINE_S = 20.0
SLOT, GENERATION = 5, 3
BEAT_SLOT = 6
SLOT_INDEX = immediate.counter_index(SLOT, GENERATION)
IMMEDIATE = immediate.base(SLOT, GENERATION)
WARM_SLOT = 7
WARM_IMMEDIATE = immediate.base(WARM_SLOT, 0)
WARM_ATTEMPT = 100

Pairs = Sequence[tuple[int, int]]
Order = tuple[int, int, int, int, bool]
"""(link, template, immediate, tag, ready): a transfer."""
WHOLE = (PAGE_BYTES, 1, 0)
NO_EDGES = np.zeros((0, 4), dtype=np.uint64)


class Place(NamedTuple):
    """Where a peer may write to: what one side tells the other about its link."""

    address: bytes
    regions: list[Remote]
    beat: tuple[int, int, int]


class Side:
    """A poller with one region of memory: NUM_LAYERS layers of NUM_PAGES pages."""

    def __init__(self, fabric: FabricUnderTest, num_nics: int = 1, **options: Unpack[Options]) -> None:
        self.fabric = fabric
        self.num_nics = num_nics
        self.memory = np.zeros(NUM_LAYERS * LAYER_BYTES, dtype=np.uint8)
        self.state = StateFile(None, incarnation=secrets.randbits(60))
        self.poller = fabric.poller(self.state, num_nics=num_nics, **options)
        self.poller.register(self.memory.ctypes.data, self.memory.nbytes)
        self.counter = LayerCounter(8)
        self.poller.add_counter(self.counter)
        self._seen: list[Record] = []
        self._numbers: dict[int, int] = {}  # of links, as they were asked for their place

    @property
    def pages(self) -> npt.NDArray[np.uint8]:
        """The memory as (layer, page, byte)."""
        return self.memory.reshape(NUM_LAYERS, NUM_PAGES, PAGE_BYTES)

    # Waiting

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Let the pollers go on until it holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}; {self.stats()}, {self._seen}"
            self.fabric.progress(self.poller)
            self._seen += self.poller.take()

    def wait(self, kind: int, ident: int | None = None) -> Record:
        """The next record of this kind (and id); others that come first are kept for later waits."""
        fitting: list[Record] = []

        def found() -> bool:
            fitting[:] = [record for record in self._seen if record[0] == kind and ident in (None, record[1])]
            return bool(fitting)

        self.until(found, f"record {kind} of {ident}")
        self._seen.remove(fitting[0])
        return fitting[0]

    def wait_stat(self, stat: str, least: int) -> None:
        self.until(lambda: self.stats()[stat] >= least, f"{stat} of at least {least}")

    def wait_rounds(self, num_rounds: int = 20) -> None:
        """Give the poller time in which it could do what it must not."""
        self.wait_stat("rounds", self.stats()["rounds"] + num_rounds)

    def seen(self, *kinds: int) -> list[Record]:
        """All records of these kinds that nobody has waited for."""
        while taken := self.poller.take():
            self._seen += taken
        return [record for record in self._seen if record[0] in kinds]

    def stats(self) -> dict[str, int]:
        return self.poller.stats()

    # Links

    def open_link(self, nic: int = 0, num_regions: int = 1) -> int:
        link = self.poller.open_link([secrets.randbits(63) for _ in range(num_regions + 1)], nic)  # and of its cell
        self.wait(records.LINK_OPENED, link)
        return link

    def place(self, link: int) -> Place:
        """Where a peer may write to, and how it sends heartbeats."""
        base, _, key = self.poller.link_cell(link)
        generation = self._numbers.setdefault(link, len(self._numbers)) % NUM_GENERATIONS
        self.state.link_beat(BEAT_SLOT, generation, link)
        beat = base, key, immediate.base(BEAT_SLOT, generation)
        return Place(self.poller.link_address(link), self.poller.link_regions(link), beat)

    def connect(self, link: int, place: Place, window: int) -> None:
        self.connect_all(link, [place], window, [0])

    def connect_all(self, link: int, places: Sequence[Place], window: int, beats: Sequence[int]) -> None:
        """To several endpoints of a peer, with heartbeats to some of them. Regions are numbered by places."""
        addresses, regions, cells = targets_of(places, beats)
        self.poller.connect_link(link, addresses, regions, window, cells)

    def close_link(self, link: int) -> None:
        self.poller.close_link(link)
        self.wait(records.LINK_CLOSED, link)

    def close_under_traffic(self, *links: int, held: bool = False) -> int:
        """Close while writes land, or while they are held, and clear the memory. Returns the rows counted by then."""
        if not held:
            self.until_landed(1)
        for link in links:
            self.poller.close_link(link)
        self.hold(False)
        for link in links:
            self.wait(records.LINK_CLOSED, link)
        self.clear()
        return self.slot_rows()

    def begin_closing(self, link: int) -> None:
        self.poller.close_link(link)

    def rotate(self) -> int:
        """Open another port for all links; returns its number."""
        self.poller.rotate([[secrets.randbits(63)] for _ in range(self.num_nics)])
        return self.wait(PORT_OPENED)[1]

    def close_port(self, port: int) -> None:
        self.poller.close_port(port)
        self.wait(PORT_CLOSED, port)

    def retarget(self, link: int, *places: Place, beats: Sequence[int] = (0,)) -> None:
        self.poller.retarget_link(link, *targets_of(places, beats))

    # What is counted

    def expect(self, num_rows: int, *, attempt: int = 1) -> None:
        """The attempt counts what lands in the slot that IMMEDIATE names."""
        self.state.open_attempt(attempt, num_rows, f"attempt-{attempt}")
        self.state.link_slot(SLOT, GENERATION, attempt)

    def expect_warm(self) -> None:
        self.state.open_attempt(WARM_ATTEMPT, ROWS_A_PAGE, "warm")
        self.state.link_slot(WARM_SLOT, 0, WARM_ATTEMPT)

    def await_slot(self, num_rows: int) -> int:
        return self.state.await_slot(SLOT, GENERATION, num_rows)

    def slot_rows(self) -> int:
        return self.state.slot_rows(SLOT, GENERATION)

    def attempt_rows(self, attempt: int = 1) -> int:
        return self.state.attempt_rows(attempt)

    def until_landed(self, least: int) -> None:
        self.until(lambda: self.slot_rows() >= least, f"{least} rows landed")

    def clear(self) -> None:
        self.memory[:] = 0

    def is_clear(self) -> bool:
        return not self.memory.any()

    def fill(self) -> None:
        """No byte of it is 0, and pages differ."""
        self.memory[:] = np.random.default_rng(7).integers(1, 256, self.memory.size, dtype=np.uint8)

    def copy(self) -> npt.NDArray[np.uint8]:
        return self.pages.copy()

    def hold(self, held: bool) -> None:
        self.poller.hold(held)

    def disturb(self, seed: int, **how: float) -> None:
        self.poller.disturb(seed, **how)  # type: ignore[arg-type]  # slow_ns is an int

    # Sending

    def add_template(
        self,
        link: int,
        layers: Sequence[int] = range(NUM_LAYERS),
        *,
        target: int = 0,
        pages: tuple[PageUnits, PageUnits] = (WHOLE, WHOLE),
        unit_rows: int = PAGE_ROWS,
    ) -> int:
        """Whole units (pages, if nothing is said), one run each, in these layers; layer l goes at bump l + 1."""
        runs = np.array([[0, 0, unit_rows * ROW_BYTES, unit_rows]], dtype=np.uint64)
        entries = [[0, layer * LAYER_BYTES, target, layer * LAYER_BYTES, layer + 1] for layer in layers]
        return self.poller.add_template(link, runs, *pages, np.array(entries, dtype=np.int64), ROW_BYTES, 2)

    def begin(
        self,
        transfers: Sequence[tuple[Order, Pairs]],
        num_bumps: int = NUM_LAYERS,
        edges: npt.NDArray[np.uint64] = NO_EDGES,
    ) -> int:
        """Arm whole pages of several transfers in one step; `edges` are the first one's."""
        (ticket,) = self.arm([(0, num_bumps)], [(0, *transfer) for transfer in transfers], edges)
        return ticket

    def arm(
        self,
        parts: Sequence[tuple[int, int]],
        transfers: Sequence[tuple[int, Order, Pairs]],
        edges: npt.NDArray[np.uint64] = NO_EDGES,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> list[int]:
        """Arm a step on several layer counters; the part of each transfer comes first."""
        return self.poller.begin_step(parts, *listed(transfers, edges), edges, int(deadline_s * 1e9))

    def join(self, parts: Sequence[tuple[int, int]], transfers: Sequence[tuple[int, Order, Pairs]]) -> None:
        """Have transfers join steps that were armed before: (counter, ticket) each."""
        self.poller.join_step(parts, *listed(transfers), NO_EDGES)

    def run_step(self, ticket: int, num_bumps: int = NUM_LAYERS) -> None:
        self.counter.start(ticket)
        for _ in range(num_bumps):
            self.counter.bump()

    def close(self) -> None:
        self.poller.close()
        self.state.close()
        del self.counter


def targets_of(places: Sequence[Place], beats: Sequence[int]) -> tuple[list[bytes], list[RemoteAt], list[Beat]]:
    """Addresses, regions and heartbeats as a poller takes them."""
    regions = [(*region, target) for target, place in enumerate(places) for region in place.regions]
    return [place.address for place in places], regions, [(target, *places[target].beat) for target in beats]


def listed(
    transfers: Sequence[tuple[int, Order, Pairs]], edges: npt.NDArray[np.uint64] = NO_EDGES
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Orders and pages as a poller takes them. Transfers of equal pages share them; the edges are the first one's."""
    starts: dict[tuple[tuple[int, int], ...], int] = {}
    pages: list[tuple[int, int]] = []
    orders = np.zeros((len(transfers), len(ORDER_FIELDS)), dtype=np.int64)
    for row, (part, order, pairs) in zip(orders, transfers, strict=True):
        start = starts.setdefault(tuple(pairs), len(pages))
        if start == len(pages):
            pages += pairs
        row[:] = (part, *order, start, start + len(pairs), 0, 0)
    orders[:1, -1] = len(edges)
    return orders, np.array(pages, dtype=np.int32).reshape(-1, 2)
