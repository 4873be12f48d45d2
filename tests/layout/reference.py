"""The algebra's oracle: slow, element by element, from addresses of its own. Shares no code with kvmsgr.layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from random import Random

import numpy as np

from kvmsgr.layout import (
    Balance,
    DescribedGroup,
    PageCursor,
    Template,
    build_templates,
    check_bounds,
    check_covered,
    describe_group,
    divide,
)
from kvmsgr.layout.cursor import PageWrites
from kvmsgr.types import RawArray
from kvmsgr_protocol import Span, expected_rows, pack_pages, rows_per_position

ORDERS = {
    "hnd": "page plane head token dim",
    "nhd": "page plane token head dim",
    "plane first": "plane page head token dim",
    "token first": "page token plane head dim",
}


@dataclass(frozen=True)
class Shard:
    """One rank's cache.

    Args:
        layers: Global indices.
        heads: Global indices.
        total_heads: Heads of the model.
        page_tokens: Tokens of a page.
        num_pages: Pages.
        widths: Bytes of a row, by plane.
        order: Name of the order of the axes.
        apart: Each plane has a tensor of its own.
        recurrent: A page holds a state.
        shared: Layer -> the layer whose buffer it uses.
    """

    layers: tuple[int, ...]
    heads: range
    total_heads: int
    page_tokens: int
    num_pages: int
    widths: tuple[int, ...]
    order: str
    apart: bool = False
    recurrent: bool = False
    shared: dict[int, int] = field(default_factory=dict)

    def _tensor(self, layer: int, plane: int) -> int:
        """Address of the tensor with a plane of a layer."""
        return (1 + self.shared.get(layer, layer) * 8 + (plane if self.apart else 0)) << 32

    def address(self, layer: int, plane: int, head: int, page: int, token: int) -> int:
        """Address of a row."""
        planes, plane_index = (1, 0) if self.apart else (len(self.widths), plane)
        heads, head_index = len(self.heads), head - self.heads.start
        tokens = self.page_tokens
        if self.order == "hnd":
            row = ((page * planes + plane_index) * heads + head_index) * tokens + token
        elif self.order == "nhd":
            row = ((page * planes + plane_index) * tokens + token) * heads + head_index
        elif self.order == "plane first":
            row = ((plane_index * self.num_pages + page) * heads + head_index) * tokens + token
        else:
            row = ((page * tokens + token) * planes + plane_index) * heads + head_index
        return self._tensor(layer, plane) + row * self.widths[plane]

    def describe(self) -> DescribedGroup:
        """What kvmsgr is told."""
        axes = [axis for axis in ORDERS[self.order].split() if not (self.apart and axis == "plane")]
        sizes = {
            "page": self.num_pages,
            "plane": len(self.widths),
            "head": len(self.heads),
            "token": self.page_tokens,
        }
        parts = []
        for plane in range(len(self.widths)) if self.apart else [0]:
            shape = tuple(sizes.get(axis, self.widths[plane]) for axis in axes)
            strides = tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
            parts.append([RawArray(self._tensor(layer, plane), shape, strides, "int8", 1) for layer in self.layers])
        return describe_group(
            parts,
            " ".join(axes),
            name="kv",
            head_start=self.heads.start,
            total_heads=self.total_heads,
            layers=self.layers,
            recurrent=self.recurrent,
        )


@dataclass(frozen=True)
class Prompt:
    """A request on one side: pages by position.

    Args:
        num_tokens: Length of the prompt.
        spans: (first_token, pages), the same for every rank of the side.
    """

    num_tokens: int
    spans: Sequence[tuple[int, Sequence[int]]]

    def positions(self, page_tokens: int) -> Iterator[tuple[int, int, int]]:
        """(position, page, token) of every position that the spans hold, beyond the prompt's end too."""
        for first, pages in self.spans:
            start = first - first % page_tokens
            for at in range(first - start, len(pages) * page_tokens):
                yield start + at, pages[at // page_tokens], at % page_tokens


def rows_of(template: Template, src: DescribedGroup, dst: DescribedGroup, writes: PageWrites) -> list[tuple[int, int]]:
    """Carry out a transfer: (source address, destination address) of every row that is written."""
    src_units, dst_units = writes.pairs[:, 0].astype(np.int64), writes.pairs[:, 1].astype(np.int64)
    starts = np.stack(
        [
            src_units // template.src_units * template.src_page_bytes
            + src_units % template.src_units * template.src_unit_bytes,
            dst_units // template.dst_units * template.dst_page_bytes
            + dst_units % template.dst_units * template.dst_unit_bytes,
        ],
        axis=1,
    )
    whole = template.runs.astype(np.int64)
    runs = np.concatenate(
        [
            (starts[:, None] + whole[:, :2]).reshape(-1, 2),
            *(template.edge_runs(*edge)[:, :2].astype(np.int64) for edge in writes.edges),
        ]
    )
    sizes = np.concatenate([np.tile(whole[:, 2:], (len(starts), 1)), *_edge_sizes(template, writes)])
    assert (sizes[:, 0] % template.row_bytes == 0).all()
    lengths = sizes[:, 0] // template.row_bytes
    assert (sizes[:, 1] >= 1).all()
    assert (sizes[:, 1] <= lengths).all()
    assert sizes[:, 1].sum() * len(template.entries) == writes.num_positions * template.rows_per_position
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    offsets = np.repeat(runs, lengths, axis=0) + (within * template.row_bytes)[:, None]
    moved: list[tuple[int, int]] = []
    for src_region, src_base, dst_region, dst_base, _ in template.entries.tolist():
        at = offsets + np.array([src_base, dst_base])
        for side, (regions, region) in enumerate(((src.regions, src_region), (dst.regions, dst_region))):
            assert at[:, side].min(initial=0) >= 0
            assert at[:, side].max(initial=0) + template.row_bytes <= regions[region].num_bytes
        at += [src.regions[src_region].address, dst.regions[dst_region].address]
        moved += map(tuple, at.tolist())
    return moved


def _edge_sizes(template: Template, writes: PageWrites) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    for edge in writes.edges:
        yield template.edge_runs(*edge)[:, 2:].astype(np.int64)


def check_rank(
    sources: Sequence[Shard], destination: Shard, given: Prompt, computed: Prompt, stops: Sequence[int], random: Random
) -> int:
    """Plan and carry out what one destination rank receives, and compare it with the definition, row by row.

    Args:
        sources: The ranks of the prefiller.
        destination: The rank.
        given: The destination's pages.
        computed: The source's pages.
        stops: Where the chunks of the prefill end.
        random: Chooses between copies.

    Returns:
        The number of rows.
    """
    described = [source.describe() for source in sources]
    groups = [one.layout for one in described]
    target = destination.describe()
    for one in (*described, target):
        check_bounds([one.layout], [], [region.num_bytes for region in one.regions])
    check_covered(groups, target.layout)
    shares = divide(groups, target.layout)
    assert sum(share.rows_per_position for share in shares) == rows_per_position(target.layout)

    landed: dict[int, tuple[int, int]] = {}  # destination address -> source rank and address
    num_rows = 0
    balance = Balance(len(sources))
    for share in shares:
        chosen = balance.choose(share.sources, share.rows_per_position, random.randrange(1 << 30))
        templates = build_templates(groups[chosen], target.layout)
        assert sum(template.rows_per_position for template in templates) == share.rows_per_position
        for writes in plan(sources[chosen], destination, given, computed, stops):
            num_rows += writes.num_positions * share.rows_per_position
            for template in templates:
                for src, dst in rows_of(template, described[chosen], target, writes):
                    assert dst not in landed, f"{dst:#x} is written twice"
                    landed[dst] = chosen, src
    compare(sources, destination, given, computed, landed)
    spans = [Span(0, first, pack_pages(list(pages))) for first, pages in given.spans]
    assert num_rows == expected_rows(given.num_tokens, spans, [target.layout])
    return num_rows


def plan(source: Shard, destination: Shard, given: Prompt, computed: Prompt, stops: Sequence[int]) -> list[PageWrites]:
    """Run the prefill chunk by chunk."""
    cursor = PageCursor(
        given.num_tokens - 1,
        given.spans,
        source.page_tokens,
        destination.page_tokens,
        num_src_pages=source.num_pages,
        num_dst_pages=destination.num_pages,
        recurrent=source.recurrent,
    )
    for first, pages in computed.spans:
        cursor.add_source(first, pages)
    planned = [cursor.advance(stop) for stop in (*stops, given.num_tokens - 1)]
    assert cursor.finished
    return planned


def compare(
    sources: Sequence[Shard],
    destination: Shard,
    given: Prompt,
    computed: Prompt,
    landed: dict[int, tuple[int, int]],
) -> None:
    """Compare what landed with what is wanted; takes it out of `landed`."""
    end = given.num_tokens - 1
    if destination.recurrent:
        held = {0: (computed.spans[-1][1][-1], 0)} if end else {}
        wanted = [(0, page, 0) for _, pages in given.spans for page in pages if end]
        end = min(end, 1)
    else:
        held = {at: (page, token) for at, page, token in computed.positions(sources[0].page_tokens)}
        wanted = list(given.positions(destination.page_tokens))
    last_page = (end - 1) // destination.page_tokens
    for position, page, token in wanted:
        for layer in destination.layers:
            if destination.shared.get(layer, layer) != layer:
                continue
            for plane in range(len(destination.widths)):
                for head in destination.heads:
                    found = landed.pop(destination.address(layer, plane, head, page, token), None)
                    if position < end:
                        assert found is not None, (position, layer, plane, head)
                        rank, address = found
                        assert head in sources[rank].heads
                        assert address == sources[rank].address(layer, plane, head, *held[position])
                    else:  # what lies behind the last position may be written in its page, for fewer writes
                        assert found is None or position // destination.page_tokens == last_page
    assert not landed, f"{len(landed)} rows were written elsewhere"
