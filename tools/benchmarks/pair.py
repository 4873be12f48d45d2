"""The process under test beside its target: both ways to move the same pages."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvmsgr._ext import native

from .bare import Bare
from .machine import Cores, pin
from .target import POOL_BYTES, WINDOW, Node, Pool, Target, immediate

ROW_BYTES = 256
ITEM_BYTES = 2
TAG = 7
DEADLINE_NS = 20_000_000_000

Pages = npt.NDArray[np.int32]  # (source page, destination page)


def shuffled_pages(generator: np.random.Generator, page_bytes: int, num_bytes: int) -> Pages:
    """Pages of either pool in random order, each at most once."""
    sides = [generator.permutation(POOL_BYTES // page_bytes)[: num_bytes // page_bytes] for _ in range(2)]
    return np.ascontiguousarray(np.stack(sides, axis=1), dtype=np.int32)


class Pair:
    """A source poller and a bare source in this process, each connected to its like in the target process."""

    def __init__(self, provider: str, cores: Cores, *, target_spins: bool) -> None:
        self.cores = cores
        self.pool: Pool = np.random.default_rng(1).integers(1, 256, POOL_BYTES, dtype=np.uint8)
        self._target = Target(provider, cores.target, spin=target_spins)
        self._source = Node(provider, self.pool, cores.source, spin=True)
        self.poller = self._source.poller
        self.counter = native.LayerCounter()
        self._stream = self.poller.add_counter(self.counter)
        self._bare = Bare(provider, self.pool, is_target=False)
        self._link, ours = self._source.open_link()
        theirs, their_bare = self._target.ask("connect", ours, self._bare.name)
        self._source.connect(self._link, theirs)
        self._bare.connect(their_bare)
        self._run = 0
        self._templates: dict[tuple[int, int], int] = {}

    def template(self, page_bytes: int, num_layers: int) -> int:
        """Whole pages. Every layer lies at the same place; layer l goes at bump l + 1."""
        key = page_bytes, num_layers
        if key not in self._templates:
            runs = np.array([[0, 0, page_bytes, page_bytes // ROW_BYTES]], dtype=np.uint64)
            entries = np.zeros((num_layers, 5), dtype=np.int64)
            entries[:, 4] = np.arange(num_layers) + 1
            page = page_bytes, 1, 0
            arguments = runs, page, page, entries, ROW_BYTES, ITEM_BYTES
            self._templates[key] = self.poller.add_template(self._link, *arguments)
        return self._templates[key]

    def arm(self, pages: Pages, page_bytes: int, num_layers: int = 1) -> int:
        """Arm a step that moves the pages once a layer. Returns its ticket."""
        order = 0, self._link, self.template(page_bytes, num_layers), immediate(self._run), TAG, 0, 0, len(pages), 0, 0
        no_edges = np.zeros((0, 4), dtype=np.uint64)
        parts = [(self._stream, num_layers)]
        (ticket,) = self.poller.begin_step(parts, np.array([order], dtype=np.int64), pages, no_edges, DEADLINE_NS)
        return ticket

    def expect(self, pages: Pages, page_bytes: int, num_layers: int = 1) -> None:
        self._run += 1
        self._target.ask("expect", self._run, pages.size // 2 * num_layers * (page_bytes // ROW_BYTES))

    def finish(self, num_writes: int) -> int:
        """Wait until the step has landed. Returns when that was, in ns."""
        landed_ns: int = self._target.ask("reached")
        sent = self._source.wait(native.SENT)
        if sent[4] != num_writes:
            raise RuntimeError(f"{sent[4]} writes for {num_writes} pages; the comparison needs as many")
        return landed_ns

    def move(self, pages: Pages, page_bytes: int) -> float:
        """Move the pages as one armed step, its one layer ready at once. Returns the seconds, arming included."""
        pin(self.cores.source)
        self.expect(pages, page_bytes)
        started_ns = native.monotonic_ns()
        self.counter.start(self.arm(pages, page_bytes))
        self.counter.bump()
        return (self.finish(len(pages)) - started_ns) / 1e9

    def move_bare(self, pages: Pages, page_bytes: int) -> float:
        """Move the pages by the bare loop on the same core. Returns the seconds."""
        pin(self.cores.source)
        self._target.tell("count", len(pages))
        started_ns = self._bare.write(pages, page_bytes, WINDOW)
        landed_ns: int = self._target.answer()
        return (landed_ns - started_ns) / 1e9

    def num_wrong(self, pages: Pages, page_bytes: int) -> int:
        """The pages whose bytes in the target's pool are not ours."""
        ours, theirs = (pool.reshape(-1, page_bytes) for pool in (self.pool, self._target.pool))
        return sum(not np.array_equal(ours[src], theirs[dst]) for src, dst in pages)

    def clear_target(self) -> None:
        self._target.pool[:] = 0

    def rest(self) -> None:
        """Until both pollers sleep."""
        self._source.rest()
        self._target.ask("rest")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._source.close()
        self._bare.close()
        self._target.close()
