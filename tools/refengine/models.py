"""The models of the demo by name: a real one, and a small random one with eight KV heads."""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from . import loader
from .loader import Checkpoint, ModelConfig
from .mtp import with_draft_layer

NAMES = ("smollm2", "random8")

RANDOM8 = ModelConfig(
    num_layers=6,
    hidden=128,
    intermediate=256,
    num_heads=16,
    num_kv_heads=8,
    head_dim=32,
    vocab=257,
    rope_base=10000.0,
    norm_epsilon=1e-5,
    end_token=256,
)


def load(name: str, *, draft: bool = False) -> Checkpoint:
    """A checkpoint by its name, one of `NAMES`; with `draft` it has a draft layer."""
    checkpoint = random_checkpoint(name, RANDOM8, byte_tokenizer()) if name == "random8" else loader.load()
    return with_draft_layer(checkpoint) if draft else checkpoint


def random_checkpoint(name: str, config: ModelConfig, tokenizer: Tokenizer, seed: int = 0) -> Checkpoint:
    """Seeded weights, the same in every process. Embeddings are small beside what layers add, so that answers vary."""
    generator = torch.Generator().manual_seed(seed)
    heads, share = config.num_kv_heads, config.num_heads // config.num_kv_heads
    piece = config.intermediate // heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    weights = {"embedding": random(config.vocab, config.hidden), "norm": torch.ones(config.hidden)}
    for layer in range(config.num_layers):
        weights[f"{layer}.attention_norm"] = weights[f"{layer}.mlp_norm"] = torch.ones(config.hidden)
        weights[f"{layer}.query"] = random(heads, share * config.head_dim, config.hidden)
        weights[f"{layer}.kv"] = random(heads, 2 * config.head_dim, config.hidden)
        weights[f"{layer}.attention_out"] = random(heads, config.hidden, share * config.head_dim)
        weights[f"{layer}.gate_up"] = random(heads, 2 * piece, config.hidden)
        weights[f"{layer}.down"] = random(heads, config.hidden, piece)
    return Checkpoint(name, config, weights, tokenizer, f"{seed:016x}")


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
