"""Prefix caches: what a prompt shares with another, who may evict it, and that no bit changes by it."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refengine import tiny
from tests.refengine.pair import NEW_TOKENS, all_equal, running_pair
from tools.refengine.engine import Engine
from tools.refengine.prefix import PrefixCache
from tools.refengine.reference import run_alone
from tools.refengine.scheduler import Hit, Job, Piece, PrefillScheduler
from tools.refengine.spec import Group

PAGE = 8
SYSTEM = tiny.prompt(20)


def job_of(engine: Engine, prompt: list[int], name: str = "job") -> Job:
    return Job(name, prompt, keys=engine.keys(prompt))


def admitted(engine: Engine, prompt: list[int]) -> Job:
    job = job_of(engine, prompt)
    held = engine.allocate(job.num_prefill, keys=job.keys)
    assert held is not None
    job.held = held
    return job


def prefilled(engine: Engine, prompt: list[int]) -> Job:
    """A job whose pages are computed and cached."""
    job = admitted(engine, prompt)
    engine.prefill([Piece(job, 0, job.num_prefill)])
    engine.keep(job, 0, job.num_prefill)
    return job


def contents(engine: Engine) -> torch.Tensor:
    (cache,) = engine.ranks.caches  # type: ignore[attr-defined]  # it is an OnlyRank
    tensor: torch.Tensor = cache.tensor
    return tensor


def test_keys_stand_for_all_tokens_up_to_the_end_of_their_page() -> None:
    cache, prompt = PrefixCache(PAGE), tiny.prompt(33)
    keys = cache.keys(prompt)
    assert len(keys) == len(set(keys)) == 4
    assert len(cache.keys(prompt[:32])) == 3  # the last token of a prompt is not prefilled
    assert cache.keys([*prompt[:24], *tiny.prompt(9)])[:3] == keys[:3]
    other = cache.keys([*prompt[:3], prompt[3] + 1, *prompt[4:]])
    assert not set(other) & set(keys)


def test_keys_of_a_layer_that_sees_the_next_token_stand_for_that_too() -> None:
    ahead, prompt = PrefixCache(PAGE, num_ahead=1), tiny.prompt(17)
    changed = [*prompt[:16], prompt[16] + 1]
    assert [one == other for one, other in zip(ahead.keys(prompt), ahead.keys(changed), strict=True)] == [True, False]
    assert PrefixCache(PAGE).keys(prompt) == PrefixCache(PAGE).keys(changed)


def test_what_is_cached_is_shared_and_the_rest_is_new() -> None:
    engine = tiny.engine(20, prefix_cache=True)
    first = prefilled(engine, [*SYSTEM, *tiny.prompt(13)])
    second = admitted(engine, [*SYSTEM, *tiny.prompt(14)])
    assert second.held[0].pages[:2] == first.held[0].pages[:2]
    assert not set(second.held[0].pages[2:]) & set(first.held[0].pages)
    assert engine.share(second) == [Hit(0, 2 * PAGE, 0)]
    engine.release(first)
    assert engine.num_free == [20 - len(second.held[0].pages)]
    assert contents(engine)[:, second.held[0].pages[:2]].isfinite().all()
    engine.release(second)
    assert tiny.all_free(engine)


def test_a_page_keeps_what_it_holds_until_it_is_needed_and_the_end_of_the_oldest_prompt_goes_first() -> None:
    engine = tiny.engine(10, prefix_cache=True)
    old, new = prefilled(engine, tiny.prompt(4 * PAGE + 1)), prefilled(engine, tiny.prompt(4 * PAGE + 2))
    pages = list(old.held[0].pages)
    engine.release(old)
    engine.release(new)
    assert contents(engine)[:, pages].isfinite().all()
    wanted = engine.allocate(3 * PAGE)  # two are free: one was never used, one not full and so not cached
    assert wanted is not None
    assert set(wanted[0].pages) > {pages[3]}
    assert contents(engine)[:, wanted[0].pages].isnan().all()
    assert contents(engine)[:, pages[:3]].isfinite().all()
    again = admitted(engine, tiny.prompt(4 * PAGE + 1))
    assert again.held[0].pages[:3] == pages[:3]
    assert engine.share(again) == [Hit(0, 3 * PAGE, 0)]


def test_pages_that_a_job_holds_are_never_evicted() -> None:
    engine = tiny.engine(6, prefix_cache=True)
    held = prefilled(engine, tiny.prompt(4 * PAGE + 1))
    engine.release(prefilled(engine, tiny.prompt(PAGE + 1)))
    assert engine.num_free == [2]
    assert engine.allocate(3 * PAGE) is None
    assert engine.allocate(2 * PAGE) is not None
    assert contents(engine)[:, held.held[0].pages].isfinite().all()
    assert engine.allocate(4 * PAGE, keys=held.keys) is not None  # what it shares takes no page


def test_a_job_that_gets_no_pages_holds_none() -> None:
    engine = tiny.engine(6, prefix_cache=True)
    cached = prefilled(engine, tiny.prompt(3 * PAGE + 1))
    engine.release(cached)
    assert engine.allocate(7 * PAGE, keys=cached.keys) is None
    assert tiny.all_free(engine)


def test_pages_of_another_job_take_the_place_of_empty_ones() -> None:
    engine = tiny.engine(20, prefix_cache=True)
    prompt = tiny.prompt(4 * PAGE + 1)
    late = admitted(engine, prompt)
    early = prefilled(engine, prompt)
    late.num_computed = PAGE + 3
    assert engine.share(late) == []  # in the middle of a page, it goes on with its own
    late.num_computed = PAGE
    assert engine.share(late) == [Hit(PAGE, 4 * PAGE, 0)]
    assert late.held[0].pages[1:] == early.held[0].pages[1:]
    assert late.held[0].pages[0] != early.held[0].pages[0]
    engine.release(early)
    engine.release(late)
    assert tiny.all_free(engine)


def test_groups_that_cannot_be_cached_alike_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="group 'window' has a window of 64 tokens"):
        tiny.engine(own_spec=tiny.spec(num_groups=2), prefix_cache=True)
    spec = tiny.spec()
    two = type(spec)((Group("even", (0, 2), 8), Group("odd", (1,), 16)))
    with pytest.raises(ValueError, match="8 in group 'even', 16 in group 'odd'"):
        tiny.engine(own_spec=two, prefix_cache=True)


def prefill_all(engine: Engine, prompts: list[list[int]], step_tokens: int, max_running: int) -> tuple[list[Job], int]:
    """Prefill prompts, check that every position of each is spoken of once; returns the positions computed, too."""
    jobs = [job_of(engine, prompt, f"job-{index}") for index, prompt in enumerate(prompts)]
    scheduler = PrefillScheduler(
        step_tokens, max_running, lambda job: engine.allocate(job.num_prefill, keys=job.keys), engine.share, engine.keep
    )
    for job in jobs:
        scheduler.add(job)
    reached, num_computed, step = dict.fromkeys(jobs, 0), 0, 0
    while pieces := scheduler.next_step():
        step += 1
        for piece in pieces:
            for hit in piece.hits:
                assert hit.start == reached[piece.job] < hit.stop
                assert hit.step < step
                reached[piece.job] = hit.stop
            assert piece.begin == reached[piece.job]
            assert piece.begin <= piece.start < piece.stop
            reached[piece.job] = piece.stop
            num_computed += piece.stop - piece.start
        engine.prefill(pieces)
    assert all(stop == job.num_prefill for job, stop in reached.items())
    return jobs, num_computed


@settings(max_examples=25, deadline=None)
@given(
    tails=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1)), min_size=2, max_size=5),
    num_shared=st.integers(1, 30),
    step_tokens=st.integers(3, 40),
    max_running=st.integers(1, 3),
)
def test_whatever_prompts_share_their_pages_hold_what_each_would_compute_alone(
    tails: list[tuple[int, int]], num_shared: int, step_tokens: int, max_running: int
) -> None:
    prompts = [[*tiny.prompt(num_shared), *tiny.prompt(length + 1, seed)] for length, seed in tails]
    engine, alone = tiny.engine(200, prefix_cache=True), tiny.engine(200, seed=1)
    jobs, _ = prefill_all(engine, prompts, step_tokens, max_running)
    for job in jobs:
        reference = Job("alone", job.prompt, alone.allocate(job.num_prefill) or [])
        alone.prefill([Piece(reference, 0, job.num_prefill)])
        whole = job.num_prefill // PAGE
        mine, theirs = contents(engine)[:, job.held[0].pages], contents(alone)[:, reference.held[0].pages]
        assert torch.equal(mine[:, :whole], theirs[:, :whole])
        inside = job.num_prefill % PAGE
        if inside:
            assert torch.equal(mine[:, whole, :, :, :inside], theirs[:, whole, :, :, :inside])
        engine.release(job)
    assert tiny.all_free(engine)


def test_two_equal_prompts_that_run_together_share_the_work() -> None:
    engine = tiny.engine(prefix_cache=True)
    prompt = tiny.prompt(12 * PAGE + 1)
    _, num_computed = prefill_all(engine, [prompt, prompt], 4 * PAGE, 2)
    assert num_computed == 12 * PAGE + 1  # the hidden state of the last token is wanted for both


def test_a_hit_whose_hidden_state_is_not_wanted_computes_nothing() -> None:
    engine = tiny.engine(prefix_cache=True)
    engine.release(prefilled(engine, tiny.prompt(2 * PAGE + 1)))
    scheduler = PrefillScheduler(8, 2, lambda job: engine.allocate(job.num_prefill, keys=job.keys), engine.share)
    job = job_of(engine, tiny.prompt(2 * PAGE + 1))
    job.wants_hidden = False
    scheduler.add(job)
    (piece,) = scheduler.next_step()
    assert (piece.start, piece.stop, piece.hits, piece.is_last) == (16, 16, (Hit(0, 16, 0),), True)
    assert scheduler.next_step() == []


PROMPTS = [[*SYSTEM, *tiny.prompt(length)] for length in (13, 29, 13, 50)]  # 33 tokens: all full pages, on both sides
ROWS = 3 * 2 * 4  # of a position: layers, planes, heads


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
@pytest.mark.parametrize(("prefill_caches", "decode_caches"), [(True, True), (True, False), (False, True)])
async def test_answers_are_bitwise_equal_whatever_each_side_has_cached(
    fabric: str, prefill_caches: bool, decode_caches: bool
) -> None:
    expected = run_alone(tiny.engine(), PROMPTS, NEW_TOKENS, step_tokens=1000)
    prefill = tiny.engine(60, tiny.spec(8), seed=1, prefix_cache=prefill_caches)
    decode = tiny.engine(64, tiny.spec(16, "nhd"), seed=2, prefix_cache=decode_caches)
    async with asyncio.timeout(20), running_pair(prefill, decode, fabric, extra_page=True) as pair:
        rounds = [
            await asyncio.gather(*(pair.answer(f"{turn}.{index}", own) for index, own in enumerate(PROMPTS)))
            for turn in range(2)
        ]
        await pair.quiet()
    for deliveries in rounds:
        assert all_equal(expected, deliveries)
    for delivery, prompt in zip(rounds[1], PROMPTS, strict=True):
        num_prefill = len(prompt) - 1
        assert delivery.cached_tokens == (num_prefill // 16 * 16 if decode_caches else 0)
        assert delivery.rows == (num_prefill - delivery.cached_tokens) * ROWS + 1  # and the hidden state
    assert not decode_caches or rounds[1][0].rows == 1
    found = [pair.prefiller.cached_tokens[f"1.{index}"] for index in range(len(PROMPTS))]
    whole = [min(len(prompt) - 2, (len(prompt) - 1) // PAGE * PAGE) for prompt in PROMPTS]  # the last is computed again
    assert found == (whole if prefill_caches else [0, 0, 0, 0])
    assert tiny.all_free(prefill)
    assert tiny.all_free(decode)


@pytest.mark.slow
async def test_without_context_a_full_hit_is_sent_and_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tiny.prompt(4 * PAGE + 1)
    (expected,) = run_alone(tiny.engine(), [prompt], NEW_TOKENS, step_tokens=1000)
    prefill, decode = tiny.engine(60, seed=1, prefix_cache=True), tiny.engine(64, tiny.spec(16), seed=2)
    async with asyncio.timeout(20), running_pair(prefill, decode) as pair:
        await pair.answer("first", prompt)
        await pair.prefiller.drained()
        monkeypatch.setattr(pair.target, "fetch", partial(pair.target.fetch, context=False))
        monkeypatch.setattr(prefill, "prefill", None)  # whoever computes fails
        found = await pair.answer("second", prompt)
        await pair.quiet()
    assert (found.rows, found.answer.tokens) == (4 * PAGE * ROWS, expected.tokens)
    assert torch.equal(found.answer.logits, expected.logits)


@pytest.mark.slow
async def test_a_prompt_goes_on_where_the_one_whose_pages_it_shares_is_given_up() -> None:
    prompt = tiny.prompt(12 * PAGE + 3)
    expected = run_alone(tiny.engine(), [prompt] * 2, NEW_TOKENS, step_tokens=1000)
    prefill = tiny.engine(30, tiny.spec(8), seed=1, prefix_cache=True)
    decode = tiny.engine(64, tiny.spec(16), seed=2, prefix_cache=True)
    shared, go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def half_way() -> None:
        if pair.prefiller.cached_tokens["other-0"]:
            loop.call_soon_threadsafe(shared.set)
            go_on.wait(10)

    async with (
        asyncio.timeout(20),
        running_pair(prefill, decode, step_tokens=4 * PAGE, half_way=half_way) as pair,
        asyncio.TaskGroup() as group,
    ):
        given_up = group.create_task(pair.answer("given up", prompt))
        others = [group.create_task(pair.answer(f"other-{index}", prompt)) for index in range(2)]
        await shared.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        await pair.decoder.quiet()  # by then the prefiller knows
        go_on.set()
        deliveries = [await other for other in others]
        await pair.quiet()
    assert all_equal(expected, deliveries)
    assert not pair.prefiller.outcomes["given up"].ok
    assert tiny.all_free(prefill)
    assert tiny.all_free(decode)
