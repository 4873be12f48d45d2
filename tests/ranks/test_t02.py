"""T02 with three ranks of two interfaces each: one write fails to post, or completes with an error."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmsgr.errors import TransferError
from kvmsgr.fabric.inprocess import Air, InProcessPoller
from kvmsgr.testing.loop import simulate
from kvmsgr_protocol import Reason

from .halfway import Halfway, asked, forward, until
from .sharded import Group, Node, Sharding, move, node, within

RANKS, INTERFACES, LAYERS, NUM_PAGES = 3, 2, 3, 8
GROUP = Group(heads=RANKS, layers=tuple(range(LAYERS)), num_pages=2 * NUM_PAGES)
NUM_TOKENS = NUM_PAGES * GROUP.page_tokens + 1
NUM_WRITES = RANKS * LAYERS * NUM_PAGES
OURS, OTHERS = (list(range(first, 2 * NUM_PAGES, 2)) for first in (0, 1))  # apart, so that no two go in one write
PATIENT = {"lease_s": 20.0, "stall_s": 20.0}
SOON_S = 5.0  # much sooner than any of these
WHERE = re.compile(r"the link of rank (\d), interface (\d), over (\S+), to d: .*Input/output error")


@asynccontextmanager
async def world(fabric: str, fence: str = "endpoint") -> AsyncIterator[list[Node]]:
    """Two decoders and two prefillers: `d`, `e`, `p`, `q`."""
    async with AsyncExitStack() as stack:
        more: dict[str, Any] = {"fabric": fabric, "fence": fence, "interfaces": INTERFACES, **PATIENT}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield [
            await stack.enter_async_context(
                node(name, [GROUP], Sharding(RANKS), listen=f"unix:{folder / name}", **more)
            )
            for name in "depq"
        ]


async def in_the_middle(source: Node, target: Node, number: int) -> Halfway:
    """A request of which the first half has landed, and nothing more is on its way just now."""
    one = await asked(source, target, number, NUM_TOKENS, pages=OTHERS)
    one.request.accept()
    forward(one, 0, one.num_positions // 2)
    all_rows = one.request.dispatch.expected_rows
    await until(lambda: one.fetch.rows_landed * 2 == all_rows, "the first half")
    return one


async def go_on(*requests: Halfway) -> None:
    """The second half of those that were in the middle."""
    for one in requests:
        forward(one, one.num_positions // 2)
        await one.check_arrives()
        poison(one)


def poison(one: Halfway) -> None:
    """The next owner writes all over the destination pages."""
    for [shard] in one.target.shards:
        shard.poison(one.pages[0])


async def spoil(p: Node, d: Node, number: int, break_it: Callable[[], None]) -> tuple[int, int] | None:
    """One request that meets a fault. Returns the rank and the interface that its decoder names; None: it arrived."""
    loop = asyncio.get_running_loop()
    one = await asked(p, d, number, NUM_TOKENS, pages=OURS)
    one.request.accept()
    break_it()
    began = loop.time()
    forward(one)
    where = None
    try:
        await within(one.fetch)
        one.check()
    except TransferError as error:
        where = read(str(error), p.lead.fabric.provider)
        outcome = await within(one.request.outcome())
        assert (outcome.ok, outcome.reason) == (False, Reason.fabric)
    await within(one.fetch.released())
    poison(one)
    await within(one.request.released())
    assert loop.time() - began < SOON_S, "not by a deadline"
    return where


def read(text: str, provider: str) -> tuple[int, int]:
    """The rank and the interface in what a decoder was told."""
    found = WHERE.search(text)
    assert found, text
    rank, interface = int(found[1]), int(found[2])
    assert rank == interface // INTERFACES
    assert found[3] == provider
    return rank, interface


ALL_NAMED = {(interface // INTERFACES, interface) for interface in range(RANKS * INTERFACES)}


def check_nothing_else_written(*sides: Node) -> None:
    for side in sides:
        for [shard] in side.shards:
            shard.check_others([])


async def spoil_each(
    fabric: str, kind: str, numbers: Iterable[int], fence: str = "endpoint"
) -> set[tuple[int, int] | None]:
    """Make those writes fail, one after the other. Returns what was named; None stands for an arrival."""
    found = set()
    async with world(fabric, fence) as (d, e, p, q):
        assert await spoil(p, d, 0, lambda: None) is None
        assert p.lead.stats()["posted_writes"] == NUM_WRITES
        for nth in numbers:
            await move(p, d, 7 * nth, NUM_TOKENS)  # in a new epoch
            others = await in_the_middle(q, d, 7 * nth + 1), await in_the_middle(p, e, 7 * nth + 2)
            found.add(await spoil(p, d, 7 * nth + 3, lambda nth=nth: p.lead._node.fabric.poller.inject(kind, nth)))
            await go_on(*others)
            check_nothing_else_written(d, e)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("fence", "every"), [("endpoint", 1), ("rotation", 5)])
def test_t02_a_post_fails(fence: str, every: int) -> None:
    async def scenario(air: Air) -> None:
        assert await spoil_each("inprocess", "fail", range(1, NUM_WRITES + 1, every), fence) == ALL_NAMED

    simulate(scenario, 1)


@pytest.mark.slow
def test_t02_a_completion_fails() -> None:
    """What fails so has landed all the same: the last ones may come when all has been counted."""

    async def scenario(air: Air) -> None:
        assert await spoil_each("inprocess", "error", range(1, NUM_WRITES + 1)) - {None} == ALL_NAMED

    simulate(scenario, 2)


@pytest.mark.slow
def test_t02_all_of_one_rail_fail() -> None:
    async def scenario(air: Air) -> None:
        async with world("inprocess") as (d, e, p, q):
            poller = p.lead._node.fabric.poller
            assert isinstance(poller, InProcessPoller)
            for interface in range(RANKS * INTERFACES):
                await move(p, d, 10 * interface, NUM_TOKENS)
                beside = await in_the_middle(q, d, 10 * interface + 1)
                where = await spoil(p, d, 10 * interface + 2, lambda it=interface: poller.break_nic(it))
                assert where == (interface // INTERFACES, interface)
                await go_on(beside)
                check_nothing_else_written(d, e)
                poller.break_nic(interface, broken=False)

    simulate(scenario, 3)


@pytest.mark.slow
async def test_t02_a_post_fails_on_libfabric() -> None:
    assert await spoil_each("net", "fail", [1, NUM_WRITES // 2, NUM_WRITES]) <= ALL_NAMED
