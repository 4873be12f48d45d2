"""The prefiller announces a step while another one computes, with a tiny model."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvmsgr.errors import RequestCancelledError
from tests.refengine import tiny
from tests.refengine.pair import NEW_TOKENS, all_equal, running_pair
from tools.refengine.engine import Engine
from tools.refengine.reference import run_alone

PROMPTS = [tiny.prompt(length) for length in (70, 9, 1, 33, 130, 2)]


def engines(num_groups: int = 1) -> tuple[Engine, Engine]:
    """A prefill engine with few pages, and a decode engine with many."""
    return (
        tiny.engine(18, tiny.spec(num_groups=num_groups), seed=1),
        tiny.engine(64, tiny.spec(16, "nhd", num_groups=num_groups), seed=2),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "num_groups", "preempt"), [("net", 1, 0), ("shm", 2, 0), ("net", 1, 2)])
async def test_answers_are_bitwise_those_of_one_process(fabric: str, num_groups: int, preempt: int) -> None:
    expected = run_alone(tiny.engine(own_spec=tiny.spec(num_groups=num_groups)), PROMPTS, NEW_TOKENS, step_tokens=1000)
    prefill, decode = engines(num_groups)
    async with (
        asyncio.timeout(20),
        running_pair(prefill, decode, fabric, announce_ahead=True, prefill_preempts_every=preempt) as pair,
    ):
        deliveries = await asyncio.gather(*(pair.answer(f"prompt-{index}", own) for index, own in enumerate(PROMPTS)))
        await pair.quiet()
    assert all_equal(expected, deliveries)
    assert any(own.num_restarts for own in deliveries) == bool(preempt)
    assert tiny.all_free(decode)
    assert tiny.all_free(prefill)


@pytest.mark.slow
@pytest.mark.parametrize("with_another", [False, True], ids=["alone", "beside another"])
async def test_a_step_ahead_is_abandoned_when_nobody_wants_it_any_more(with_another: bool) -> None:
    expected = run_alone(tiny.engine(), PROMPTS[:2], NEW_TOKENS, step_tokens=1000)
    prefill, decode = tiny.engine(30, seed=1), tiny.engine(64, tiny.spec(16), seed=2)
    announced, go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def half_way() -> None:
        ahead = pair.prefiller._ahead
        if ahead is not None and len(ahead.pieces) == 1 + with_another:
            loop.call_soon_threadsafe(announced.set)
            go_on.wait(10)

    async with (
        asyncio.timeout(20),
        running_pair(prefill, decode, half_way=half_way, announce_ahead=True) as pair,
        asyncio.TaskGroup() as group,
    ):
        given_up = group.create_task(pair.answer("given up", PROMPTS[4][:100]))
        other = group.create_task(pair.answer("other", PROMPTS[0])) if with_another else None
        await announced.wait()
        given_up.cancel()
        with pytest.raises((asyncio.CancelledError, RequestCancelledError)):
            await given_up
        await pair.decoder.quiet() if other is None else await asyncio.sleep(0)
        go_on.set()
        if other is not None:
            assert all_equal(expected[:1], [await other])
        assert all_equal(expected[1:], [await pair.answer("after", PROMPTS[1])])
        await pair.quiet()
    assert pair.prefiller.num_abandoned == (0 if with_another else 1)
    assert not pair.prefiller.outcomes["given up"].ok
    assert tiny.all_free(prefill)
    assert tiny.all_free(decode)
