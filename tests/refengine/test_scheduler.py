from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.refengine.scheduler import Holding, Job, PrefillScheduler


def make_jobs(lengths: list[int]) -> list[Job]:
    return [Job(f"job-{index}", [0] * length) for index, length in enumerate(lengths)]


@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=8),
    step_tokens=st.integers(1, 70),
    max_running=st.integers(1, 3),
)
def test_every_position_but_the_last_is_computed_once_and_in_order(
    lengths: list[int], step_tokens: int, max_running: int
) -> None:
    jobs = make_jobs(lengths)
    scheduler = PrefillScheduler(step_tokens, max_running, lambda job: [])
    for job in jobs:
        scheduler.add(job)
    computed = {job.request_id: 0 for job in jobs}
    ended: list[str] = []
    while pieces := scheduler.next_step():
        assert len(pieces) <= max_running
        assert sum(piece.stop - piece.start for piece in pieces) <= step_tokens
        for piece in pieces:
            assert computed[piece.job.request_id] == piece.start < piece.stop
            computed[piece.job.request_id] = piece.stop
            if piece.is_last:
                ended.append(piece.job.request_id)
    assert computed == {job.request_id: len(job.prompt) - 1 for job in jobs}
    assert sorted(ended) == sorted(computed)


def test_prompts_share_a_step_and_pass_on_what_they_cannot_use() -> None:
    scheduler = PrefillScheduler(64, 3, lambda job: [])
    for job in make_jobs([6, 101, 101]):
        scheduler.add(job)
    first, second = scheduler.next_step(), scheduler.next_step()
    assert [(piece.start, piece.stop) for piece in first] == [(0, 5), (0, 30), (0, 29)]
    assert [(piece.start, piece.stop) for piece in second] == [(30, 62), (29, 61)]


def test_a_prompt_waits_for_its_pages_and_for_those_before_it() -> None:
    held: dict[str, list[Holding] | None] = {"job-0": [], "job-1": None, "job-2": []}
    scheduler = PrefillScheduler(10, 3, lambda job: held[job.request_id])
    jobs = make_jobs([5, 5, 5])
    for job in jobs:
        scheduler.add(job)
    assert [piece.job for piece in scheduler.next_step()] == [jobs[0]]
    assert scheduler.next_step() == []
    held["job-1"] = [Holding(8, 0, [3, 4])]
    assert [piece.job for piece in scheduler.next_step()] == jobs[1:]
    assert jobs[1].held == [Holding(8, 0, [3, 4])]


def test_a_dropped_prompt_is_not_computed_further() -> None:
    scheduler = PrefillScheduler(4, 1, lambda job: [])
    running, waiting, last = make_jobs([20, 20, 3])
    for job in (running, waiting, last):
        scheduler.add(job)
    assert [piece.job for piece in scheduler.next_step()] == [running]
    scheduler.drop(running)
    scheduler.drop(waiting)
    assert [piece.job for piece in scheduler.next_step()] == [last]


def test_a_prompt_of_one_token_has_nothing_to_prefill() -> None:
    with pytest.raises(ValueError, match="nothing to prefill"):
        PrefillScheduler(8, 1, lambda job: []).add(Job("short", [0]))


def test_a_budget_smaller_than_the_number_of_prompts_goes_to_the_first() -> None:
    scheduler = PrefillScheduler(1, 3, lambda job: [])
    jobs = make_jobs([3, 2, 2])
    for job in jobs:
        scheduler.add(job)
    assert [[piece.job for piece in scheduler.next_step()] for _ in range(5)] == [[own] for own in jobs[:1] + jobs] + [
        []
    ]


def test_a_step_that_computes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a step of 0 tokens"):
        PrefillScheduler(0, 3, lambda job: [])
