"""Requests that stand still in the middle: some layers have landed, the others have not been computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import kvmsgr

from .sharded import Node, within

POLL_S = 0.0005


@dataclass
class Halfway:
    """A request, and where its pages are on both sides. `rank` is the one that holds it there; None: all do."""

    source: Node
    target: Node
    number: int
    rank: int | None
    num_positions: int
    fetch: kvmsgr.Fetch
    request: kvmsgr.PrefillRequest
    pages: list[list[int]]  # destination
    source_pages: list[list[int]]

    def chunk(self, start: int = 0, stop: int | None = None) -> kvmsgr.Chunk:
        """`stop`: None: its end."""
        spans = self.source.spans(self.source_pages, self.num_positions)
        return kvmsgr.Chunk(self.request, start, self.num_positions if stop is None else stop, spans)

    def compute(self, layer: int) -> None:
        self.source._compute(self.number, layer, self.source_pages, 0, self.num_positions, self.num_positions)

    def check(self) -> None:
        """All its bytes are there."""
        for rank in range(len(self.target.shards)) if self.rank is None else [self.rank]:
            self.target.shards[rank][0].check(self.number, self.pages[0], self.num_positions, 0)

    async def check_arrives(self) -> None:
        await within(self.fetch)
        self.check()
        await within(self.request.released())
        await within(self.fetch.released())


async def asked(
    source: Node,
    target: Node,
    number: int,
    num_tokens: int,
    *,
    rank: int | None = None,
    pages: list[int] | None = None,
) -> Halfway:
    """A request that the prefiller has not answered. `pages`: of both sides; None: any."""
    num_positions = num_tokens - 1
    theirs, ours = ([pages] if pages is not None else side.draw_pages(num_positions) for side in (target, source))
    fetch = target.lead.fetch(
        f"request {number}",
        source.descriptors,
        range(num_tokens),
        target.spans(theirs, num_positions),
        ranks=None if rank is None else [rank],
    )
    request = await within(anext(aiter(source.lead.requests())))
    return Halfway(source, target, number, rank, num_positions, fetch, request, theirs, ours)


async def halfway(*requests: Halfway, stop: int | None = None) -> kvmsgr.Step:
    """Run a forward pass of these requests, or of their positions below `stop`, up to the first layer."""
    for one in requests:
        one.request.accept(None if one.rank is None else [one.rank])
    step = requests[0].source.lead.begin_step([one.chunk(0, stop) for one in requests])
    start(step)
    run_layer(step, 0, *requests)
    for one in requests:
        await until(lambda one=one: one.fetch.rows_landed > 0, f"rows of request {one.number}")
    return step


def start(step: kvmsgr.Step, dead: Sequence[int] = ()) -> None:
    """On the ranks that live."""
    for rank, signal in enumerate(step.signals):
        if rank not in dead:
            signal.start()


def run_layer(step: kvmsgr.Step, layer: int, *computed: Halfway, dead: Sequence[int] = ()) -> None:
    """The ranks that live compute a layer."""
    for one in computed:
        one.compute(layer)
    for rank, signal in enumerate(step.signals):
        if rank not in dead:
            signal.bump()


def forward(one: Halfway, first: int = 0, stop: int | None = None) -> None:
    """Run a whole forward pass of one request."""
    step = one.source.lead.begin_step([one.chunk(first, stop)])
    start(step)
    for layer in one.source.layers:
        run_layer(step, layer, one)


async def until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(POLL_S)  # with 0 a simulated clock would stand still
