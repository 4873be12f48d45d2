"""The property everything rests on: the bits of a token depend neither on what it is computed with, nor on where."""

from __future__ import annotations

from contextlib import closing
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from tests.refengine import in_threads, tiny
from tools.refengine import arithmetic
from tools.refengine.engine import local_engine
from tools.refengine.generation import Generator
from tools.refengine.loader import Checkpoint, load
from tools.refengine.models import RANDOM8, byte_tokenizer, random_checkpoint
from tools.refengine.reference import Answer, run_alone
from tools.refengine.scheduler import Job, Piece
from tools.refengine.selftest import bitwise_difference, difference_of
from tools.refengine.spec import CacheSpec, Layout, check_ranks, make_groups

PROMPTS = [torch.randint(3, 80, (length,)).tolist() for length in (330, 9, 1, 33)]


@pytest.fixture(scope="module")
def real() -> Checkpoint:
    return load()


@cache
def answers_alone(num_groups: int) -> list[Answer]:
    spec = tiny.spec(num_groups=num_groups)
    return [run_alone(tiny.engine(own_spec=spec), [prompt], 5, step_tokens=1000)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(
    ("layout", "page_tokens", "latent", "step_tokens", "max_running"),
    [
        ("hnd", 8, False, 1, 1),
        ("nhd", 8, False, 17, 3),
        ("hnd", 32, True, 50, 2),
        ("nhd", 64, False, 64, 3),
        ("hnd", 16, True, 100, 1),
    ],
)
def test_batches_chunks_pages_layouts_and_latent_rows_change_no_bit(
    layout: Layout, page_tokens: int, latent: bool, step_tokens: int, max_running: int, num_groups: int
) -> None:
    engine = tiny.engine(own_spec=tiny.spec(page_tokens, layout, num_groups=num_groups, latent=latent), seed=9)
    together = run_alone(engine, PROMPTS, 5, step_tokens, max_running)
    differences = [difference_of(*pair) for pair in zip(answers_alone(num_groups), together, strict=True)]
    assert differences == [None] * 4
    assert tiny.all_free(engine)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_number_of_ranks_changes_no_bit(num_ranks: int, latent: bool, num_groups: int) -> None:
    engine, ranks = in_threads.engine(
        tiny.spec(layout="nhd", num_groups=num_groups, latent=latent, num_ranks=num_ranks)
    )
    with closing(ranks):
        together = run_alone(engine, PROMPTS[1:], 5, step_tokens=20, max_running=2)
    differences = [difference_of(*pair) for pair in zip(answers_alone(num_groups)[1:], together, strict=True)]
    assert differences == [None] * 3
    assert tiny.all_free(engine)


def test_every_rank_holds_its_heads_or_a_whole_latent_copy() -> None:
    caches = {}
    for latent in (False, True):
        engine, ranks = in_threads.engine(tiny.spec(num_ranks=2, latent=latent))
        with closing(ranks):
            held = engine.allocate(9)
            assert held is not None
            engine.prefill([Piece(Job("copies", PROMPTS[1], held), 0, 8)])
        caches[latent] = [own[0].tensor for own in ranks.caches]
        assert caches[latent][0].isfinite().any()
    assert torch.equal(caches[True][0].nan_to_num(9), caches[True][1].nan_to_num(9))
    assert not torch.equal(caches[False][0].nan_to_num(9), caches[False][1].nan_to_num(9))


def test_a_window_is_what_the_model_means_with_two_groups() -> None:
    one, two = (answers_alone(num_groups) for num_groups in (1, 2))
    differ = [difference_of(*pair) is not None for pair in zip(one, two, strict=True)]
    assert differ == [True, False, False, False]  # only one of the prompts is longer than the window


def test_a_window_holds_no_more_pages_than_it_needs() -> None:
    spec = tiny.spec(16, num_groups=2)
    engine = tiny.engine(own_spec=spec)
    held = engine.allocate(200)
    assert held is not None
    job = Job("window", [5] * 201, held)
    engine.prefill([Piece(job, 0, 150)])
    engine.prefill([Piece(job, 150, 200)])
    full, window = job.held
    assert (full.first_page, len(full.pages)) == (0, 13)
    assert (window.page_tokens, window.first_page, len(window.pages)) == (8, 17, 8)  # from position 136 = 200 - 64 on
    decoder_held = engine.allocate(205, num_computed=200)
    assert decoder_held is not None
    assert (decoder_held[1].first_page, len(decoder_held[1].pages)) == (17, 9)
    engine.release(job)


@pytest.mark.parametrize("window", [None, 3, 40])
def test_attention_is_attention(window: int | None) -> None:
    positions = torch.tensor([[67, 68, 69], [124, 125, 126]])
    query = torch.randn(2, 2, 3, 3, 16)  # KV heads, sequences, tokens, share, dim
    keys, values = torch.randn(2, 2, 2, 128, 16)
    where = torch.arange(128)
    seen = where <= positions[..., None]
    if window:
        seen &= where > positions[..., None] - window
    expected = F.scaled_dot_product_attention(
        query.transpose(2, 3), keys[:, :, None], values[:, :, None], seen[:, None]
    )
    keys[:, 0, 70:] = values[:, 0, 70:] = torch.nan
    start = 64 if window == 3 else 0
    if window:
        keys[:, 0, : 68 - window] = values[:, 0, : 68 - window] = torch.nan
    found = arithmetic.attend(
        query, positions, keys[:, :, start:], values[:, :, start:], key_start=start, window=window
    )
    torch.testing.assert_close(found, expected.transpose(2, 3).reshape(2, 6, 48))


def test_a_page_that_nobody_wrote_is_noticed() -> None:
    engine = tiny.engine()
    held = engine.allocate(24)
    assert held is not None
    job = Job("unwritten", [5] * 20, held)
    engine.prefill([Piece(job, 0, 16)])
    generator = Generator(engine, 4)
    with pytest.raises(FloatingPointError, match="'unwritten': logits at position 19 are not finite"):
        generator.step([generator.begin(job, torch.zeros(tiny.CONFIG.hidden))])


class Recorder:
    """A signal that looks at the cache whenever it is bumped."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache
        self.started = False
        self.seen: list[torch.Tensor] = []

    def start(self) -> None:
        self.started = not self.seen

    def bump(self) -> None:
        self.seen.append(self._cache.clone())


def test_layers_are_signalled_when_their_kv_is_final() -> None:
    engine = tiny.engine()
    held = engine.allocate(16)
    assert held is not None
    (cache,) = engine.ranks.caches  # type: ignore[attr-defined]  # it is an OnlyRank
    recorder, paused = Recorder(cache.tensor), []
    pieces = [Piece(Job("signals", [5] * 20, held), 0, 16)]
    engine.prefill(pieces, [recorder], {1: lambda: paused.append(len(recorder.seen))})
    for layer, seen in enumerate(recorder.seen):
        assert torch.equal(seen[: layer + 1].nan_to_num(9), cache.tensor[: layer + 1].nan_to_num(9))
        assert seen[layer + 1 :].isnan().all()
    assert (recorder.started, len(recorder.seen), paused) == (True, tiny.CONFIG.num_layers, [1])


def test_rank_0_signals_a_layer_when_it_is_final_on_every_rank() -> None:
    engine, ranks = in_threads.engine(tiny.spec(num_ranks=4))
    held = engine.allocate(16)
    assert held is not None
    recorders = [Recorder(caches[0].tensor) for caches in ranks.caches]
    with closing(ranks):
        engine.prefill([Piece(Job("signals", [5] * 20, held), 0, 16)], recorders)
    for recorder, caches in zip(recorders, ranks.caches, strict=True):
        assert len(recorder.seen) == tiny.CONFIG.num_layers
        for layer, seen in enumerate(recorder.seen):
            assert torch.equal(seen[: layer + 1].nan_to_num(9), caches[0].tensor[: layer + 1].nan_to_num(9))


def test_heads_that_cannot_be_divided_are_refused() -> None:
    check_ranks(RANDOM8, 8)
    with pytest.raises(ValueError, match="8 KV heads cannot be divided evenly over 3 ranks"):
        check_ranks(RANDOM8, 3)


def test_the_random_model_gives_various_answers() -> None:
    checkpoint = random_checkpoint("random8", RANDOM8, byte_tokenizer())
    spec = CacheSpec(make_groups(RANDOM8, 16))
    prompts = [checkpoint.encode_chat(text) for text in ("A first question?", "And a second one.")]
    first, second = run_alone(local_engine(checkpoint, spec, [40], 0), prompts, 8, step_tokens=64)
    assert len(set(first.tokens)) > 2
    assert first.tokens != second.tokens
    assert checkpoint.tokenizer.decode(prompts[0]).endswith("A first question?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [1, 2])
def test_self_test_passes_with_the_real_weights(real: Checkpoint, num_groups: int) -> None:
    assert bitwise_difference(real, num_groups) is None


@pytest.mark.slow
def test_self_test_notices_arithmetic_that_depends_on_the_batch(
    real: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "MIN_ROWS", 1)
    difference = bitwise_difference(real)
    assert difference is not None
    assert "prompt" in difference


@pytest.mark.slow
def test_the_real_model_answers(real: Checkpoint) -> None:
    spec = CacheSpec(make_groups(real.config, 16))
    prompt = real.encode_chat("What is the capital of France?")
    (answer,) = run_alone(local_engine(real, spec, [8], 0), [prompt], 12, 64)
    assert "Paris" in real.tokenizer.decode(answer.tokens)
