"""A model small enough for unit tests: two layers, random weights, no tokenizer worth the name."""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer, models

from tools.refengine.cache import Layout, PagedCache
from tools.refengine.engine import Engine
from tools.refengine.loader import Checkpoint, ModelConfig

CONFIG = ModelConfig(
    num_layers=2,
    hidden=48,
    intermediate=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab=80,
    rope_base=10000.0,
    norm_epsilon=1e-5,
    end_token=2,
)


def checkpoint(seed: int = 0) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    attention = CONFIG.num_heads * CONFIG.head_dim
    kv = 2 * CONFIG.num_kv_heads * CONFIG.head_dim
    weights = {"embedding": random(CONFIG.vocab, CONFIG.hidden) * 4, "norm": torch.ones(CONFIG.hidden)}
    for layer in range(CONFIG.num_layers):
        weights[f"{layer}.attention_norm"] = weights[f"{layer}.mlp_norm"] = torch.ones(CONFIG.hidden)
        weights[f"{layer}.qkv"] = random(attention + kv, CONFIG.hidden)
        weights[f"{layer}.attention_out"] = random(CONFIG.hidden, attention)
        weights[f"{layer}.gate_up"] = random(2 * CONFIG.intermediate, CONFIG.hidden)
        weights[f"{layer}.down"] = random(CONFIG.hidden, CONFIG.intermediate)
    return Checkpoint(CONFIG, weights, Tokenizer(models.BPE()), "tiny")


def engine(num_pages: int = 64, page_tokens: int = 8, layout: Layout = "hnd", seed: int = 0) -> Engine:
    return Engine(checkpoint(), PagedCache(CONFIG, num_pages, page_tokens, layout, seed))
