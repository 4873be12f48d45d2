"""A cache in which any byte says whose it is.

Bytes of requests are below 0x80, and tell request, layer, plane, head and position. Those of the next owners of pages
that came back are above, another value on each side: a single one in the wrong place is seen. Several ranks share the
heads evenly, and a page is one on all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvmsgr

LAYERS, PAGES, PLANES, PAGE_TOKENS, DIM = 8, 384, 2, 8, 128
HEADS = {1: 2, 3: 3}  # of all ranks, by their number: 4 or 6 KiB a page and layer, 12 or 18 MiB in all
DIMS = "layer page plane head token dim"
CONTEXT_SLOTS, CONTEXT_BYTES = 64, 1024
RUN = 8  # pages that lie side by side, and go in one write a layer
EMPTY, SOURCE_OWNER, DESTINATION_OWNER = 0x00, 0xA5, 0xC3

Bytes = npt.NDArray[np.uint8]
Pages = Sequence[int]


def tagged(tag: int, layers: range, heads: int, start: int, stop: int) -> Bytes:
    """What positions [start, stop) of a request hold, shape (positions, layers, planes, heads, DIM)."""
    rows = np.empty((stop - start, len(layers), PLANES, heads, DIM), np.uint8)
    words = rows.reshape(*rows.shape[:-1], -1, 8)
    positions = np.arange(start, stop).reshape(-1, 1, 1, 1, 1)
    words[..., 0], words[..., 1], words[..., 2] = tag & 0x7F, tag >> 7 & 0x7F, 0x40 | tag >> 14
    words[..., 3] = np.array(layers).reshape(1, -1, 1, 1, 1) + 1
    words[..., 4] = (np.arange(PLANES * heads) + 1).reshape(1, 1, PLANES, heads, 1)
    words[..., 5], words[..., 6] = positions & 0x7F, positions >> 7
    words[..., 7] = np.arange(words.shape[-2]) + 1
    return rows


class TaggedCache:
    """The memory of all ranks of one process, and which of its pages are whose.

    `kept` are pages that came back from a request that failed: their next owner keeps them.
    """

    def __init__(self, next_owner: int, seed: int, num_ranks: int = 1) -> None:
        self.heads = HEADS[num_ranks]
        shape = num_ranks, LAYERS, PAGES, PLANES, self.heads // num_ranks, PAGE_TOKENS, DIM
        self.bytes: Bytes = np.full(shape, EMPTY, np.uint8)
        self.hidden: Bytes = np.zeros((num_ranks, CONTEXT_SLOTS, CONTEXT_BYTES), np.uint8)
        self.kept: list[int] = []
        self._next_owner = next_owner
        self._free = list(range(0, PAGES, RUN))
        random.Random(seed).shuffle(self._free)

    def describe(self, num_interfaces: int = 1) -> list[kvmsgr.Rank]:
        """The ranks, each with so many network interfaces."""
        return [
            kvmsgr.Rank(
                kvmsgr.Cache(
                    [
                        kvmsgr.CacheGroup.from_tensors(
                            [own], DIMS, head_start=rank * own.shape[3], total_heads=self.heads
                        )
                    ]
                ),
                [kvmsgr.ContextBuffer("hidden", self.hidden[rank])],
                [None] * num_interfaces,
            )
            for rank, own in enumerate(self.bytes)
        ]

    @property
    def context_units(self) -> int:
        """Rows of a request that are context."""
        return len(self.hidden)

    def num_rows(self, num_positions: int) -> int:
        """Rows of a request, context included."""
        return num_positions * LAYERS * PLANES * self.heads + self.context_units

    # Whose pages

    def has_room(self, num_pages: int) -> bool:
        return len(self._free) * RUN >= num_pages

    def take(self, num_pages: int) -> list[int]:
        starts = [self._free.pop() for _ in range(-(-num_pages // RUN))]
        return [start + index for start in starts for index in range(RUN)][:num_pages]

    def came_back(self, pages: Pages) -> Bytes:
        """Hand pages to their next owner, who writes all over them at once. Returns what was in them."""
        before = self.bytes[:, :, pages].copy()
        self.bytes[:, :, pages] = self._next_owner
        return before

    def give(self, pages: Pages) -> None:
        self._free.extend(sorted({page - page % RUN for page in pages}))

    def keep(self, pages: Pages) -> None:
        self.kept.extend(pages)

    def give_kept(self) -> None:
        pages, self.kept = self.kept, []
        self.give(pages)

    # What is in them

    def clear(self, pages: Pages) -> None:
        self.bytes[:, :, pages] = EMPTY

    def put(self, tag: int, layer: int, pages: Pages, start: int, stop: int) -> None:
        """Compute a layer of positions [start, stop) of a request; `pages` hold it from position 0 on."""
        page, token = _where(pages, start, stop)
        rows = tagged(tag, range(layer, layer + 1), self.heads, start, stop)[:, 0]  # position plane head dim
        by_rank = rows.reshape(stop - start, PLANES, len(self.bytes), -1, DIM).swapaxes(1, 2)
        self.bytes[:, layer, page, :, :, token] = by_rank

    def flaw(self, tag: int, pages: Pages, num_positions: int) -> str | None:
        """What is wrong with a request that has arrived."""
        return _flaw(self.bytes[:, :, pages], tag, num_positions, complete=True)

    @staticmethod
    def flaw_of_failed(before: Bytes, tag: int, num_positions: int) -> str | None:
        """What is wrong with the pages of a request that failed: each byte of it is there, or nothing is."""
        return _flaw(before, tag, num_positions, complete=False)

    def flaws(self, foreign_owner: int) -> list[str]:
        """Who wrote where they must not: into pages of a next owner of ours, or bytes of one at the other side."""
        found = self.bytes[:, :, self.kept]
        flaws = []
        if (wrong := found != self._next_owner).any():
            pages = sorted({self.kept[index] for index in wrong.nonzero()[2]})
            flaws.append(f"{wrong.sum()} bytes were written into pages {pages} after these came back: {found[wrong]}")
        if (foreign := self.bytes == foreign_owner).any():
            pages = sorted(set(foreign.nonzero()[2].tolist()))
            flaws.append(f"{foreign.sum()} bytes of a next owner at the other side are in pages {pages}")
        return flaws


def _where(pages: Pages, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    positions = np.arange(start, stop)
    return np.asarray(pages)[positions // PAGE_TOKENS], positions % PAGE_TOKENS


def _flaw(found: Bytes, tag: int, num_positions: int, *, complete: bool) -> str | None:
    """`found` has shape (ranks, LAYERS, pages, PLANES, heads of a rank, PAGE_TOKENS, DIM)."""
    heads = found.shape[0] * found.shape[4]
    by_position = found.transpose(2, 5, 1, 3, 0, 4, 6).reshape(-1, LAYERS, PLANES, heads, DIM)[:num_positions]
    wanted = tagged(tag, range(LAYERS), heads, 0, num_positions)
    wrong = by_position != wanted
    if not complete:
        wrong &= by_position != EMPTY
    if not wrong.any():
        return None
    position, layer = (int(index) for index in np.argwhere(wrong)[0][:2])
    row = by_position[position, layer].reshape(-1)[:8].tolist()
    return f"{wrong.sum()} wrong bytes; position {position}, layer {layer} of request {tag} begins with {row}"
