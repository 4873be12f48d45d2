"""Ranks in worker processes: the same bits, and a worker that dies fails the requests of its node, and nobody hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from kvmsgr.errors import RankLostError
from kvmsgr_protocol import Reason
from tests.refengine.child_roles import ends_within
from tools.refengine import roles
from tools.refengine.collective import RankLost
from tools.refengine.decode import DecodeNode
from tools.refengine.engine import local_engine
from tools.refengine.models import RANDOM8, load
from tools.refengine.opening import Node, open_node
from tools.refengine.prefill import PrefillNode
from tools.refengine.processes import Children, leaves
from tools.refengine.reference import run_alone
from tools.refengine.selftest import difference_of
from tools.refengine.spec import CacheSpec, NodeOptions, make_groups

pytestmark = pytest.mark.slow
NEW_TOKENS = 4
PROMPTS = [[3 + (7 * place + length) % 250 for place in range(length)] for length in (90, 40)]
OPTIONS = NodeOptions(
    name="prefill",
    model="random8",
    spec=CacheSpec(make_groups(RANDOM8, 16), num_ranks=2),
    num_pages=(40,),
    num_requests=4,
    step_tokens=32,
    fabric="net",
)
DECODE = replace(OPTIONS, name="decode", spec=CacheSpec(make_groups(RANDOM8, 16)))


@dataclass
class Pair:
    prefill: Node
    decode: Node
    decoder: DecodeNode


@asynccontextmanager
async def open_pair(options: NodeOptions, decode_options: NodeOptions = DECODE) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(open_node(options))
        decode = await stack.enter_async_context(open_node(decode_options))
        yield Pair(prefill, decode, DecodeNode(decode.engine, decode.messenger, NEW_TOKENS, decode.workers))


@pytest.mark.parametrize("every_rank_bumps", [False, True])
async def test_two_workers_give_the_bits_of_one_process(every_rank_bumps: bool) -> None:
    expected = run_alone(local_engine(load("random8"), DECODE.spec, (40,), 0), PROMPTS, NEW_TOKENS, 1000)
    async with asyncio.timeout(60), open_pair(replace(OPTIONS, every_rank_bumps=every_rank_bumps)) as pair:
        prefiller = PrefillNode(pair.prefill.engine, pair.prefill.messenger, pair.prefill.workers, step_tokens=32)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(prefiller.run()), group.create_task(pair.decoder.run())]
            source = pair.prefill.messenger.descriptor
            deliveries = [await pair.decoder.answer(source, f"r{index}", own) for index, own in enumerate(PROMPTS)]
            await prefiller.drained()
            for task in running:
                task.cancel()
    assert [difference_of(one, own.answer) for one, own in zip(expected, deliveries, strict=True)] == [None, None]
    assert all(outcome.ok for outcome in prefiller.outcomes.values())


@pytest.mark.parametrize(("model", "num_ranks", "victim"), [("random8", 2, 0), ("random8", 2, 1), ("smollm2", 3, 2)])
async def test_a_killed_worker_fails_its_requests_on_both_sides_within_a_second(
    model: str, num_ranks: int, victim: int
) -> None:
    """It dies in the middle of a step, while rank 0 stands still."""
    groups = make_groups(load(model).config, 16)
    options = replace(OPTIONS, model=model, spec=CacheSpec(groups, num_ranks=num_ranks))
    in_step, killed = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def stand_still() -> None:
        loop.call_soon_threadsafe(in_step.set)
        killed.wait(30)

    async with asyncio.timeout(60), open_pair(options, replace(DECODE, model=model, spec=CacheSpec(groups))) as pair:
        assert pair.prefill.workers is not None
        prefiller = PrefillNode(
            pair.prefill.engine,
            pair.prefill.messenger,
            pair.prefill.workers,
            step_tokens=32,
            half_way=stand_still,
        )
        serving = asyncio.ensure_future(prefiller.run())
        answering = asyncio.ensure_future(pair.decoder.answer(pair.prefill.messenger.descriptor, "doomed", PROMPTS[0]))
        await in_step.wait()
        os.kill(pair.prefill.workers.pids[victim], signal.SIGKILL)
        killed.set()
        killed_at = time.monotonic()
        with pytest.raises(RankLostError, match=f"rank {victim}"):
            await answering
        with pytest.raises(BaseExceptionGroup) as raised:
            await serving
        assert time.monotonic() - killed_at < 1.0
        lost = [leaf for leaf in leaves(raised.value) if isinstance(leaf, RankLost)]
        assert [own.rank for own in lost] == [victim]
        assert prefiller.outcomes["doomed"].reason is Reason.rank_lost
        await pair.decoder.quiet()
    pools = pair.decode.engine.pools
    assert [pool.num_free for pool in pools] == [pool.num_pages for pool in pools]


def test_workers_do_not_outlive_their_lead() -> None:
    with Children(60.0, None) as children:
        children.start("prefill", roles.prefill, roles.RoleOptions(OPTIONS, NEW_TOKENS))
        ready: roles.Ready = children.receive("prefill")
        assert len(ready.workers) == 2
        os.kill(ready.pid, signal.SIGKILL)
        assert all(ends_within(pid, 10) for pid in ready.workers)


async def test_a_worker_that_fails_at_its_start_says_why() -> None:
    with pytest.raises(RankLost, match=r"rank \d is lost: .*0 bytes were asked for"):
        async with asyncio.timeout(60), open_node(replace(OPTIONS, num_pages=(0,))):
            pass
