"""Multi-token prediction: a draft layer that guesses, from the state at a position and the token after it, the state at
the next position, and so the token after that one.

It attends to what it saw before, over keys and values of its own, through fixed random projections. Only the last step,
from what it sees and attends to, to the state it guesses, is fitted, by ridge regression: one linear system, the same
result every time, and no training. It is fitted once on docstrings of the standard library and kept beside the weights.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .docstrings import FOR_FITTING, docstrings
from .engine import Engine, OnlyRank
from .loader import Checkpoint, ModelConfig, cache_folder, write_atomically
from .model import final_norm
from .scheduler import Job
from .spec import CacheSpec, make_groups

FIT_VERSION = 2  # raise it when what is fitted, or how, changes
SEQUENCE_TOKENS = 56
BATCH = 8  # sequences
NUM_SEQUENCES = 88
RIDGE = 3e-4  # relative to the mean square of a feature; with more, drafts need the state less
PAGE_TOKENS = 64


def with_draft_layer(checkpoint: Checkpoint, folder: Path | None = None) -> Checkpoint:
    """A checkpoint with a draft layer. The first call fits it and says how long that took; later ones map the file, so
    that all processes have the same.

    Args:
        checkpoint: The model.
        folder: Where the layer is kept; None is `loader.cache_folder`.
    """
    how = (FIT_VERSION, SEQUENCE_TOKENS, NUM_SEQUENCES, RIDGE)
    fitted = (how, checkpoint.fingerprint, checkpoint.config, sys.version_info[:3])  # whose docstrings they are
    key = hashlib.sha256(repr(fitted).encode()).hexdigest()[:16]
    path = (folder or cache_folder()) / f"{checkpoint.name}-draft-{key}.pt"
    if not path.exists():
        started = time.monotonic()
        sequences = fitting_sequences(checkpoint)
        with one_thread():
            weights = fit(checkpoint, sequences)
        num_tokens = sum(map(len, sequences))
        print(f"fitted a draft layer to {num_tokens} tokens in {time.monotonic() - started:.1f} s: {path}", flush=True)
        write_atomically(path, {"weights": weights, "digest": digest(weights)})
    stored = torch.load(path, mmap=True, weights_only=True)
    fingerprint = f"{checkpoint.fingerprint}+{stored['digest']}"
    return replace(checkpoint, weights=checkpoint.weights | stored["weights"], fingerprint=fingerprint)


def fitting_sequences(checkpoint: Checkpoint) -> list[list[int]]:
    """The beginnings of docstrings, all of the same number of tokens."""
    encoded = (list(checkpoint.tokenizer.encode(text).ids) for text in docstrings(FOR_FITTING))
    long = [tokens[:SEQUENCE_TOKENS] for tokens in encoded if len(tokens) >= SEQUENCE_TOKENS]
    return long[:: max(1, len(long) // NUM_SEQUENCES)][:NUM_SEQUENCES]


def fit(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The weights of a draft layer. Those that are cut by KV head have it as their leading axis, like the model's.

    Args:
        checkpoint: The model.
        sequences: Of the same number of tokens, at most `PAGE_TOKENS`.
    """
    fixed = fixed_weights(checkpoint.config)
    drafting = replace(checkpoint, weights=checkpoint.weights | fixed)
    spec = CacheSpec(make_groups(checkpoint.config, PAGE_TOKENS, draft=True))
    ranks = OnlyRank(drafting, spec, (BATCH,) * 2)
    engine = Engine(drafting, spec, (BATCH,) * 2, ranks, seed=0)
    features, targets = [], []
    for start in range(0, len(sequences), BATCH):
        some = sequences[start : start + BATCH]
        jobs = [Job("fit", list(tokens), engine.allocate(len(tokens)) or []) for tokens in some]
        hidden = torch.stack(engine.extend(jobs, some, [0] * len(some)))
        states = final_norm(checkpoint, hidden.flatten(0, 1)).view(hidden.shape)
        _, batches = engine.batches(jobs, [tokens[1:] for tokens in some], [0] * len(some))
        features.append(ranks.shard.draft_features(states[:, :-1].flatten(0, 1), batches))
        targets.append(states[:, 1:].flatten(0, 1))
        for job in jobs:
            engine.release(job)
    mean, out = ridge(torch.cat(features, 1).transpose(0, 1).flatten(1), torch.cat(targets))
    return fixed | {
        "draft.mean": mean,
        "draft.out": out.T.reshape(checkpoint.config.hidden, checkpoint.config.num_kv_heads, -1)
        .transpose(0, 1)
        .contiguous(),
    }


def ridge(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of outputs [rows, out], and what inputs [rows, in] times it comes nearest to the rest: [in, out]."""
    x, y = inputs.double(), outputs.double()
    mean = y.mean(0)
    products = x.T @ x
    damping = RIDGE * products.diagonal().mean()
    found = torch.linalg.solve(products + damping * torch.eye(len(products), dtype=x.dtype), x.T @ (y - mean))
    return mean.float(), found.float()


def fixed_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Projections that are not fitted. Of the query heads that share a KV head, the first looks everywhere alike, and
    each one more sharply than the last for states like its own."""
    generator = torch.Generator().manual_seed(seed)
    heads, width = config.num_kv_heads, 2 * config.hidden
    share = config.num_heads // heads

    def random(num_rows: int) -> Tensor:
        return torch.randn(heads, num_rows, width, generator=generator) / math.sqrt(width)

    keys = random(config.head_dim)
    return {
        "draft.query": torch.cat([keys * sharpness for sharpness in range(share)], 1),
        "draft.kv": torch.cat([keys, random(config.head_dim)], 1),
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """More threads would give other bits, and on busy cores wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def digest(weights: dict[str, Tensor]) -> str:
    """Names exact weights, 16 hex digits."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(weights[name].numpy().tobytes())
    return found.hexdigest()[:16]
