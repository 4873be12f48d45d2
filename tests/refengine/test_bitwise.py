"""The property everything rests on: the bits of a token do not depend on what it is computed together with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.refengine import tiny
from tools.refengine import arithmetic
from tools.refengine.cache import Layout, PagedCache
from tools.refengine.engine import Engine, Generation
from tools.refengine.loader import Checkpoint, load
from tools.refengine.reference import run_alone
from tools.refengine.scheduler import Job, Piece
from tools.refengine.selftest import bitwise_difference, difference_of

PROMPTS = [torch.randint(3, 80, (length,)).tolist() for length in (330, 9, 1, 33)]


@pytest.fixture(scope="module")
def real() -> Checkpoint:
    return load()


@pytest.mark.parametrize(
    ("layout", "page_tokens", "step_tokens", "max_running"),
    [("hnd", 8, 1, 1), ("nhd", 8, 17, 3), ("hnd", 32, 50, 2), ("nhd", 64, 64, 3)],
)
def test_batches_chunks_pages_and_layouts_change_no_bit(
    layout: Layout, page_tokens: int, step_tokens: int, max_running: int
) -> None:
    alone = [run_alone(tiny.engine(), [prompt], 5, step_tokens=1000)[0] for prompt in PROMPTS]
    engine = tiny.engine(page_tokens=page_tokens, layout=layout, seed=9)
    together = run_alone(engine, PROMPTS, 5, step_tokens, max_running)
    assert [difference_of(*pair) for pair in zip(alone, together, strict=True)] == [None] * 4
    assert engine.cache.num_free == engine.cache.num_pages


def test_attention_is_attention() -> None:
    positions = torch.tensor([[3, 4, 5], [60, 61, 62]])
    query = torch.randn(2, 3, 6, 16)
    keys, values = torch.randn(2, 2, 2, 64, 16)
    seen = torch.arange(64) <= positions[:, None, :, None]
    expected = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    keys[0, :, 6:] = values[0, :, 6:] = torch.nan
    found = arithmetic.attend(query, positions, keys, values)
    torch.testing.assert_close(found, expected.reshape(6, -1))


def test_a_page_that_nobody_wrote_is_noticed() -> None:
    engine = tiny.engine()
    job = Job("unwritten", [5] * 20, engine.cache.allocate(3))
    engine.prefill([Piece(job, 0, 16)])
    with pytest.raises(FloatingPointError, match="'unwritten': logits at position 19 are not finite"):
        engine.decode([Generation(job)])


def test_layers_are_signalled_when_their_kv_is_final() -> None:
    engine = tiny.engine()
    job = Job("signals", [5] * 20, engine.cache.allocate(3))
    seen: list[torch.Tensor] = []
    engine.prefill([Piece(job, 0, 16)], lambda: seen.append(engine.cache.tensor.clone()))
    for layer, cache in enumerate(seen):
        assert torch.equal(cache[: layer + 1].nan_to_num(9), engine.cache.tensor[: layer + 1].nan_to_num(9))
        assert cache[layer + 1 :].isnan().all()
    assert len(seen) == tiny.CONFIG.num_layers


@pytest.mark.slow
def test_self_test_passes_with_the_real_weights(real: Checkpoint) -> None:
    assert bitwise_difference(real) is None


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
    cache = PagedCache(real.config, 8, 16, "hnd", seed=0)
    (answer,) = run_alone(Engine(real, cache), [real.encode_chat("What is the capital of France?")], 12, 64)
    assert "Paris" in real.tokenizer.decode(answer.tokens)
