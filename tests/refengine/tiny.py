"""A model small enough for unit tests: three layers, four KV heads, random weights, no tokenizer worth the name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from tokenizers import Tokenizer, models

from tools.refengine import mtp
from tools.refengine.engine import Engine, local_engine
from tools.refengine.loader import Checkpoint, ModelConfig
from tools.refengine.models import random_checkpoint
from tools.refengine.spec import CacheSpec, Layout, make_groups

CONFIG = ModelConfig(
    num_layers=3,  # what goes wrong in the second, which may have a window, shows in the third
    hidden=48,
    intermediate=64,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab=80,
    rope_base=10000.0,
    norm_epsilon=1e-5,
    end_token=2,
)


def checkpoint(*, draft: bool = False) -> Checkpoint:
    return drafting() if draft else random_checkpoint("tiny", CONFIG, Tokenizer(models.BPE()))


@cache
def drafting() -> Checkpoint:
    """With a draft layer, fitted to random tokens."""
    sequences = torch.randint(3, CONFIG.vocab, (32, 64), generator=torch.Generator().manual_seed(0)).tolist()
    plain = checkpoint()
    return replace(plain, weights=plain.weights | mtp.fit(plain, sequences))


def spec(
    page_tokens: int = 8,
    layout: Layout = "hnd",
    *,
    num_groups: int = 1,
    latent: bool = False,
    num_ranks: int = 1,
    draft: bool = False,
) -> CacheSpec:
    return CacheSpec(make_groups(CONFIG, page_tokens, num_groups, draft=draft), layout, latent, num_ranks)


def engine(
    num_pages: int = 128, own_spec: CacheSpec | None = None, seed: int = 0, *, prefix_cache: bool = False
) -> Engine:
    own_spec = own_spec or spec()
    num_pages_each = [num_pages] * len(own_spec.groups)
    own_checkpoint = checkpoint(draft=own_spec.has_draft)
    return local_engine(own_checkpoint, own_spec, num_pages_each, seed, prefix_cache=prefix_cache)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random tokens; a longer prompt does not begin like a shorter one."""
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    tokens: list[int] = torch.randint(3, CONFIG.vocab, (num_tokens,), generator=generator).tolist()
    return tokens


def all_free(engine: Engine) -> bool:
    """Whether nobody holds a page."""
    return engine.num_free == [pool.num_pages for pool in engine.pools]
