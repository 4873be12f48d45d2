"""Prefill and decode nodes over real messengers, both in this process, with a tiny model."""

from __future__ import annotations

import asyncio

import pytest

import kvmsgr
from kvmsgr.errors import IncompatiblePeerError, ShortCountError
from tests.refengine import tiny
from tests.refengine.pair import NEW_TOKENS, NUM_DRAFTS, all_equal, running_pair
from tools.refengine.decode import WrongDelivery
from tools.refengine.engine import Engine
from tools.refengine.reference import run_alone
from tools.refengine.scheduler import Job
from tools.refengine.selftest import difference_of, draft_difference
from tools.refengine.spec import WINDOW_TOKENS

PROMPTS = [tiny.prompt(length) for length in (70, 9, 1, 33, 130, 2)]
PAGE_EDGES = [tiny.prompt(length) for length in (1, 7, 8, 9, 16, 17, 24)]


def engines(num_groups: int = 1, *, draft: bool = False, decoder_drafts: bool | None = None) -> tuple[Engine, Engine]:
    """A prefill engine with few pages, of 8 tokens, and a decode engine with many, of 16."""
    drafts = draft if decoder_drafts is None else decoder_drafts
    return (
        tiny.engine(18, tiny.spec(num_groups=num_groups, draft=draft), seed=1),
        tiny.engine(64, tiny.spec(16, "nhd", num_groups=num_groups, draft=drafts), seed=2),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "num_groups"), [("net", 1), ("shm", 1), ("net", 2)])
async def test_answers_are_bitwise_those_of_one_process_and_all_pages_come_back(fabric: str, num_groups: int) -> None:
    spec = tiny.spec(num_groups=num_groups)
    expected = run_alone(tiny.engine(own_spec=spec), PROMPTS, NEW_TOKENS, step_tokens=1000)
    prefill, decode = engines(num_groups)
    async with asyncio.timeout(20), running_pair(prefill, decode, fabric) as pair:
        deliveries = await asyncio.gather(*(pair.answer(f"prompt-{index}", own) for index, own in enumerate(PROMPTS)))
        await pair.quiet()
    assert all_equal(expected, deliveries)
    for delivery, prompt in zip(deliveries, PROMPTS, strict=True):
        num_positions = len(prompt) - 1
        in_window = min(num_positions, WINDOW_TOKENS) if num_groups == 2 else num_positions
        assert delivery.rows == (2 * num_positions + in_window) * 2 * 4 + (
            num_positions > 0
        )  # planes, heads; hidden state
    assert all(outcome.ok for outcome in pair.prefiller.outcomes.values())
    assert tiny.all_free(decode)
    assert tiny.all_free(prefill)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_drafts_made_from_what_travelled_are_those_of_one_process(fabric: str) -> None:
    plain = run_alone(tiny.engine(), PROMPTS, NEW_TOKENS, step_tokens=1000)
    drafted = run_alone(
        tiny.engine(own_spec=tiny.spec(draft=True)), PROMPTS, NEW_TOKENS, step_tokens=1000, num_drafts=NUM_DRAFTS
    )
    prefill, decode = engines(draft=True)
    async with asyncio.timeout(20), running_pair(prefill, decode, fabric) as pair:
        deliveries = await asyncio.gather(*(pair.answer(f"prompt-{index}", own) for index, own in enumerate(PROMPTS)))
        await pair.quiet()
    for prompt, delivery, expected, drafts in zip(PROMPTS, deliveries, plain, drafted, strict=True):
        assert difference_of(expected, delivery.answer) is None
        assert draft_difference(drafts, delivery.answer) is None
        num_positions = len(prompt) - 1
        assert delivery.rows == num_positions * 4 * 2 * 4 + (num_positions > 0)  # layers, planes, heads; hidden state
    assert tiny.all_free(decode)
    assert tiny.all_free(prefill)


@pytest.mark.slow
@pytest.mark.parametrize("decoder_drafts", [False, True])
async def test_sides_of_which_one_has_a_draft_layer_refuse_each_other(decoder_drafts: bool) -> None:
    prefill, decode = engines(draft=not decoder_drafts, decoder_drafts=decoder_drafts)
    async with asyncio.timeout(20), running_pair(prefill, decode) as pair:
        with pytest.raises(IncompatiblePeerError, match="draft"):
            await pair.answer("prompt-1", PROMPTS[1])
        await pair.decoder.quiet()
    assert tiny.all_free(decode)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_a_lost_write_fails_one_request_and_loses_no_page(fabric: str) -> None:
    prefill, decode = engines()
    async with asyncio.timeout(20), running_pair(prefill, decode, fabric) as pair:
        await pair.answer("prompt-1", PROMPTS[1])
        pair.source.inject("drop", 3)
        with pytest.raises(ShortCountError, match="prompt-0") as raised:
            async with asyncio.timeout(5):
                await pair.answer("prompt-0", PROMPTS[0])
        await pair.prefiller.drained()
    await pair.decoder.quiet()  # closing fences what a count could not prove
    assert 0 < raised.value.rows_landed < raised.value.rows_expected
    assert not pair.prefiller.outcomes["prompt-0"].ok
    assert tiny.all_free(decode)
    assert tiny.all_free(prefill)


@pytest.mark.slow
@pytest.mark.parametrize("step_tokens", [1, 4, 8, 12])
async def test_prompts_and_chunks_that_end_about_a_pages_end_leave_the_next_page_alone(step_tokens: int) -> None:
    expected = run_alone(tiny.engine(), PAGE_EDGES, NEW_TOKENS, step_tokens=1000)
    prefill, decode = engines()
    async with asyncio.timeout(20), running_pair(prefill, decode, step_tokens=step_tokens, extra_page=True) as pair:
        answers = (pair.answer(f"prompt-{index}", own) for index, own in enumerate(PAGE_EDGES))
        deliveries = await asyncio.gather(*answers)
        await pair.quiet()
    assert all_equal(expected, deliveries)
    assert [delivery.num_pages for delivery in deliveries] == [0, 1, 1, 1, 1, 1, 2]  # without the extra ones
    assert tiny.all_free(decode)
    assert tiny.all_free(prefill)


@pytest.mark.slow
async def test_a_page_written_without_need_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = engines()
    (cache,) = decode.ranks.caches  # type: ignore[attr-defined]  # it is an OnlyRank
    async with asyncio.timeout(20), running_pair(prefill, decode, extra_page=True) as pair:
        spans = pair.decoder._spans

        def write_too_much(job: Job) -> list[kvmsgr.Span]:
            (span,) = spans(job)
            cache.tensor[1, span.pages[-1], -1] = 0.0
            return [span]

        monkeypatch.setattr(pair.decoder, "_spans", write_too_much)
        with pytest.raises(WrongDelivery, match=r"'prompt-0': page \[\d+\], after its last, was written to"):
            await pair.answer("prompt-0", PAGE_EDGES[-1])
        await pair.quiet()
    assert tiny.all_free(decode)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [1, 2])
async def test_what_a_decoder_preempts_it_computes_again_and_never_fetches_twice(num_groups: int) -> None:
    spec = tiny.spec(num_groups=num_groups)
    expected = run_alone(tiny.engine(own_spec=spec), PROMPTS, NEW_TOKENS, step_tokens=1000)
    prefill, decode = engines(num_groups)
    async with asyncio.timeout(20), running_pair(prefill, decode, preempt_every=2) as pair:
        deliveries = await asyncio.gather(*(pair.answer(f"prompt-{index}", own) for index, own in enumerate(PROMPTS)))
        await pair.quiet()
    assert all_equal(expected, deliveries)
    assert sum(delivery.preempted for delivery in deliveries) == 3
    assert len(pair.prefiller.outcomes) == len(PROMPTS)
    assert tiny.all_free(decode)


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "prefix_cache"), [("net", False), ("shm", False), ("net", True)])
async def test_a_prompt_whose_pages_the_prefiller_takes_back_begins_again(fabric: str, prefix_cache: bool) -> None:
    expected = run_alone(tiny.engine(), PROMPTS, NEW_TOKENS, step_tokens=1000)
    prefill, decode = tiny.engine(18, seed=1, prefix_cache=prefix_cache), tiny.engine(64, tiny.spec(16), seed=2)
    async with asyncio.timeout(20), running_pair(prefill, decode, fabric, prefill_preempts_every=2) as pair:
        deliveries = await asyncio.gather(*(pair.answer(f"prompt-{index}", own) for index, own in enumerate(PROMPTS)))
        await pair.quiet()
    assert all_equal(expected, deliveries)
    restarted = {f"prompt-{index}" for index, own in enumerate(deliveries) if own.num_restarts}
    assert {"prompt-0", "prompt-4"} <= restarted  # the two that take many steps
    assert max(own.num_restarts for own in deliveries) == 1
    assert all(pair.prefiller.outcomes[request].ok for request in restarted)
    assert any(map(pair.prefiller.cached_tokens.get, restarted)) == prefix_cache
    assert tiny.all_free(decode)
    assert tiny.all_free(prefill)
