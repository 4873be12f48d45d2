"""Drafts: they change no bit of what is generated, and are the same bits themselves wherever they are made."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.refengine import in_threads, tiny
from tools.refengine import mtp
from tools.refengine.cache import PagedCache
from tools.refengine.docstrings import FOR_FITTING, FOR_PROMPTS, docstrings
from tools.refengine.engine import Engine
from tools.refengine.generation import Draft, Generation, Generator
from tools.refengine.mtp import ridge
from tools.refengine.node import describe
from tools.refengine.reference import Answer, run_alone
from tools.refengine.scheduler import Job, Piece
from tools.refengine.selftest import difference_of, draft_difference
from tools.refengine.spec import CacheSpec, Layout
from tools.refengine.speculation import Speculation, acceptance, speculation

NEW_TOKENS = 12
PROMPTS = [
    torch.randint(3, 80, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 9, 1, 33)
]


def run(spec: CacheSpec, num_drafts: int, step_tokens: int = 1000, max_running: int = 1, seed: int = 0) -> list[Answer]:
    """All prompts together."""
    engine = tiny.engine(own_spec=spec, seed=seed)
    answers = run_alone(engine, PROMPTS, NEW_TOKENS, step_tokens, max_running, num_drafts=num_drafts)
    assert tiny.all_free(engine)
    return answers


def run_each(num_drafts: int) -> list[Answer]:
    """Every prompt by itself."""
    engine = tiny.engine(own_spec=tiny.spec(draft=num_drafts > 0))
    return [run_alone(engine, [prompt], NEW_TOKENS, 1000, num_drafts=num_drafts)[0] for prompt in PROMPTS]


def check(answers: list[Answer], expected: list[Answer], drafted: list[Answer] | None = None) -> None:
    assert [difference_of(*pair) for pair in zip(expected, answers, strict=True)] == [None] * len(PROMPTS)
    if drafted is not None:
        assert [draft_difference(*pair) for pair in zip(drafted, answers, strict=True)] == [None] * len(PROMPTS)


@pytest.fixture(scope="module")
def plain() -> list[Answer]:
    return run_each(0)


@pytest.fixture(scope="module")
def drafted() -> list[Answer]:
    return run_each(3)


def test_drafts_change_no_bit_and_save_steps(plain: list[Answer], drafted: list[Answer]) -> None:
    check(drafted, plain)
    all_drafts = [draft for answer in drafted for draft in answer.drafts]
    assert {draft.num_accepted for draft in all_drafts} >= {0, 1, 3}  # else this shows little
    for answer in drafted:
        assert len(answer.drafts) + sum(draft.num_accepted for draft in answer.drafts) <= NEW_TOKENS
        assert max(len(draft.tokens) for draft in answer.drafts) == 3


@pytest.mark.parametrize(
    ("layout", "page_tokens", "latent", "step_tokens", "max_running"),
    [("nhd", 8, False, 7, 3), ("hnd", 32, True, 50, 2)],
)
def test_drafts_are_the_same_bits_in_other_chunks_pages_and_batches(
    plain: list[Answer],
    drafted: list[Answer],
    layout: Layout,
    page_tokens: int,
    latent: bool,
    step_tokens: int,
    max_running: int,
) -> None:
    spec = tiny.spec(page_tokens, layout, latent=latent, draft=True)
    check(run(spec, 3, step_tokens, max_running, seed=9), plain, drafted)


@pytest.mark.parametrize(("num_ranks", "latent"), [(2, False), (4, True)])
def test_drafts_are_the_same_bits_on_several_ranks(
    num_ranks: int, latent: bool, plain: list[Answer], drafted: list[Answer]
) -> None:
    engine, ranks = in_threads.engine(tiny.spec(layout="nhd", latent=latent, num_ranks=num_ranks, draft=True))
    with closing(ranks):
        check(run_alone(engine, PROMPTS, NEW_TOKENS, 40, 2, num_drafts=3), plain, drafted)
    assert tiny.all_free(engine)


def test_one_draft_a_step_and_a_window_beside_the_draft_group() -> None:
    expected = run(tiny.spec(num_groups=2), 0)
    check(run(tiny.spec(16, num_groups=2, draft=True), 1, 30, 2), expected)


def prefilled(spec: CacheSpec | None = None) -> tuple[Engine, Job, torch.Tensor]:
    engine = tiny.engine(own_spec=spec or tiny.spec(draft=True))
    prompt = PROMPTS[3]
    held = engine.allocate(len(prompt) + NEW_TOKENS)
    assert held is not None
    job = Job("one", prompt, held)
    return engine, job, engine.prefill([Piece(job, 0, job.num_prefill)])[0]


def generate(generator: Generator, generation: Generation) -> Answer:
    while not generator.is_finished(generation):
        generator.step([generation])
    return Answer(generation.tokens, torch.stack(generation.logits), torch.zeros(1), generation.drafts)


def test_a_wrong_state_gives_other_drafts_and_the_same_tokens() -> None:
    engine, job, hidden = prefilled()
    generator = Generator(engine, NEW_TOKENS, 3)
    right = generate(generator, generator.begin(job, hidden))
    wrong = generate(generator, generator.begin(job, torch.zeros_like(hidden)))
    assert difference_of(right, wrong) is None
    assert draft_difference(right, wrong) is not None
    assert not torch.equal(right.drafts[0].states, wrong.drafts[0].states)


def test_keys_and_values_of_the_draft_layer_matter_and_only_to_drafts() -> None:
    engine, job, hidden = prefilled()
    generator = Generator(engine, NEW_TOKENS, 3)
    right = generate(generator, generator.begin(job, hidden))
    cache = engine.ranks.caches[1]  # type: ignore[attr-defined]  # it is an OnlyRank
    assert (cache.group.name, cache.group.layers) == ("draft", (tiny.CONFIG.num_layers,))
    cache.tensor[:, job.held[1].pages[1], 0] *= 2  # keys of positions 8 to 15
    wrong = generate(generator, generator.begin(job, hidden))
    assert difference_of(right, wrong) is None
    assert not torch.equal(right.drafts[0].states, wrong.drafts[0].states)


def draft_rows(engine: Engine, job: Job, num_positions: int) -> torch.Tensor:
    """What the draft layer stored of the first positions: [planes, heads, positions, dim]."""
    cache: PagedCache = engine.ranks.caches[1]  # type: ignore[attr-defined]  # it is an OnlyRank
    pages = cache.tensor[0, job.held[1].pages]  # [page, plane, head, token, dim]
    return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_positions]


def test_what_generating_stores_in_the_draft_layer_is_what_prefilling_the_same_tokens_stores() -> None:
    engine, job, hidden = prefilled()
    generator = Generator(engine, NEW_TOKENS, 3)
    generation = generator.begin(job, hidden)
    num_final = 0
    while not generator.is_finished(generation):
        before = len(generation.sequence), len(generation.drafts)
        generator.step([generation])
        if len(generation.drafts) > before[1]:
            num_final = before[0] - 1  # later ones are of drafts
    assert num_final > job.num_prefill + 3
    assert len({draft.num_accepted for draft in generation.drafts}) > 1
    other = tiny.engine(own_spec=tiny.spec(draft=True), seed=5)
    again = Job("again", generation.sequence, other.allocate(len(generation.sequence)) or [])
    other.prefill([Piece(again, 0, again.num_prefill)])
    assert torch.equal(draft_rows(engine, job, num_final), draft_rows(other, again, num_final))


def test_a_page_of_the_draft_layer_that_nobody_wrote_is_noticed() -> None:
    engine, job, hidden = prefilled()
    engine.ranks.poison(1, job.held[1].pages[:1])
    generator = Generator(engine, NEW_TOKENS, 3)
    with pytest.raises(FloatingPointError, match="'one': logits of a draft at position 32 are not finite"):
        generator.step([generator.begin(job, hidden)])


def test_prefill_stores_draft_keys_of_every_prefilled_position_and_signals_them_last() -> None:
    engine = tiny.engine(own_spec=tiny.spec(draft=True))
    held = engine.allocate(20) or []
    kv, draft = (cache.tensor for cache in engine.ranks.caches)  # type: ignore[attr-defined]  # it is an OnlyRank
    seen: list[tuple[bool, int]] = []

    class Look:
        def start(self) -> None: ...

        def bump(self) -> None:
            kv_done = bool(kv[-1, held[0].pages].isfinite().flatten(1).any(1).all())
            seen.append((kv_done, int(draft[0, held[1].pages].isfinite().all(4).all(2).all(1).sum())))

    engine.prefill([Piece(Job("layers", [5] * 21, held), 0, 20)], [Look()])
    num_layers = tiny.CONFIG.num_layers
    assert engine.spec.num_layers == num_layers + 1
    assert seen == [(False, 0)] * (num_layers - 1) + [(True, 0), (True, 20)]


def test_the_draft_group_is_named_to_messengers_with_layers_and_pages_of_its_own() -> None:
    engine = tiny.engine(own_spec=tiny.spec(draft=True))
    described = describe(engine.config, engine.spec, engine.ranks.caches)  # type: ignore[attr-defined]  # OnlyRank
    assert [group.name for group in described] == ["kv", "draft"]
    assert described[1].layers == (tiny.CONFIG.num_layers,)


def test_drafts_need_a_draft_layer() -> None:
    with pytest.raises(ValueError, match="3 drafts a step are wanted of an engine without a draft layer"):
        Generator(tiny.engine(), 4, 3)


def test_nothing_is_drafted_that_cannot_be_used() -> None:
    for new_tokens in (1, 2, 5):
        engine = tiny.engine(own_spec=tiny.spec(draft=True))
        (answer,) = run_alone(engine, PROMPTS[1:2], new_tokens, 1000, num_drafts=3)
        assert len(answer.tokens) == new_tokens
        lengths = [len(draft.tokens) for draft in answer.drafts]
        assert lengths[:1] == [min(3, new_tokens - 1)][: new_tokens - 1]


def test_a_difference_between_drafts_is_told() -> None:
    def answer(*drafts: Draft) -> Answer:
        return Answer([1], torch.zeros(1, 1), torch.zeros(1), list(drafts))

    one = Draft([4, 5], torch.zeros(2, 3), 1)
    assert draft_difference(answer(one), answer(one)) is None
    assert "in 0 steps; expected 1" in str(draft_difference(answer(one), answer()))
    assert r"found [4, 5] (2)" in str(draft_difference(answer(one), answer(replace(one, num_accepted=2))))
    states = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    assert "differ, by up to 0.5" in str(draft_difference(answer(one), answer(replace(one, states=states))))


def made(num_accepted: int, first: int, *, zero_hidden: bool) -> Speculation:
    """Ten drafts over two processes, five of them in a first step; in one process five are accepted, two of those."""

    def answers(total: int, begin: int) -> list[Answer]:
        drafts = [Draft([1] * 5, torch.zeros(5, 1), begin), Draft([1] * 5, torch.zeros(5, 1), total - begin)]
        return [Answer([1], torch.zeros(1, 1), torch.zeros(1), drafts)]

    return speculation(5, zero_hidden, answers(num_accepted, first), answers(5, 2))


def test_acceptance_must_be_equal_or_with_zeros_clearly_worse() -> None:
    assert made(5, 2, zero_hidden=False).ok
    assert not made(4, 2, zero_hidden=False).ok
    assert made(3, 0, zero_hidden=True).ok
    worse = made(4, 0, zero_hidden=True)
    assert not worse.ok
    assert (str(worse.moved), str(worse.alone_first)) == ("4/10 (40.0%)", "2/5 (40.0%)")
    text = "\n".join(worse.lines())
    assert "ratio 0.80, which IS NOT at most 0.7" in text
    assert acceptance([]).rate == 0
    nothing = speculation(5, False, [], [])
    assert not nothing.ok
    assert nothing.lines()[-1] == "NOTHING WAS DRAFTED"


def test_a_draft_layer_is_fitted_once_and_named_by_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mtp, "fitting_sequences", lambda checkpoint: [prompt[:30] for prompt in PROMPTS[::3]])
    first = mtp.with_draft_layer(tiny.checkpoint(), tmp_path)
    assert "fitted a draft layer to 60 tokens in " in capsys.readouterr().out
    again = mtp.with_draft_layer(tiny.checkpoint(), tmp_path)
    assert capsys.readouterr().out == ""
    assert torch.equal(first.weights["draft.out"], again.weights["draft.out"])
    monkeypatch.setattr(mtp, "RIDGE", 1.0)
    other = mtp.with_draft_layer(tiny.checkpoint(), tmp_path)
    names = {own.fingerprint for own in (tiny.checkpoint(), first, again, other)}
    assert len(names) == 3


def test_ridge_regression_finds_a_linear_map() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(500, 6, generator=generator)
    wanted = torch.randn(6, 3, generator=generator)
    mean, found = ridge(inputs - inputs.mean(0), (inputs - inputs.mean(0)) @ wanted + 7)
    torch.testing.assert_close(mean, torch.full((3,), 7.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)


def test_prompts_are_not_among_the_texts_that_drafts_are_fitted_to() -> None:
    prompts, fitted = docstrings(FOR_PROMPTS), docstrings(FOR_FITTING)
    long = {text for text in prompts if len(text) >= 100}
    assert len(long) >= 50
    assert not long & set(fitted)
