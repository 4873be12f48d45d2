"""Arithmetic whose every row has the same bits whatever it is computed together with.

A token must give the same numbers alone or in a batch, in a long chunk or a short one. Two things would break that: a
matrix product picks another kernel when it has very few rows, and a sum over the keys is split differently when there
are more of them. So products are padded to `MIN_ROWS` rows, and attention adds up blocks of `KEY_BLOCK` keys in order;
a block with no visible key adds exact zeros. `selftest` checks that this holds on the machine at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 8
KEY_BLOCK = 64


def pad_rows(x: Tensor) -> Tensor:
    """Add zero rows (second-last axis) until there are `MIN_ROWS`."""
    return F.pad(x, (0, 0, 0, MIN_ROWS - x.shape[-2])) if x.shape[-2] < MIN_ROWS else x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] times weight [out, in], transposed."""
    return F.linear(pad_rows(x), weight)[: x.shape[0]]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rotary_table(num_positions: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [num_positions, 1, head_dim / 2]."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of x [rows, heads, head_dim]; pairs are neighbours, as GGUF stores them."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


def by_head(x: Tensor, weights: Tensor) -> Tensor:
    """x [rows, in], or one a head [heads, rows, in], times each of weights [heads, out, in]: [heads, rows, out].

    One product a head, whatever the number of heads: a rank that holds some of them gets the same bits.
    """
    inputs = x if x.dim() == 3 else [x] * len(weights)
    return torch.stack([linear(own, weight) for own, weight in zip(inputs, weights, strict=True)])


def attend(
    query: Tensor, positions: Tensor, keys: Tensor, values: Tensor, *, key_start: int = 0, window: int | None = None
) -> Tensor:
    """Causal attention of several sequences, each with the same number of queries.

    Args:
        query: [kv_heads, sequences, tokens, share, head_dim]; `share` query heads use one KV head.
        positions: [sequences, tokens], ascending: where each query stands.
        keys, values: [kv_heads, sequences, positions, head_dim]; the number of positions is a multiple of
            `KEY_BLOCK`. What no query of a sequence sees may hold anything, NaN too.
        key_start: Position of the first key; a multiple of `KEY_BLOCK`.
        window: How many positions a query sees, its own included; None: all up to its own.

    Returns:
        [kv_heads, sequences * tokens, share * head_dim].
    """
    num_heads, num_sequences, num_tokens, share, head_dim = query.shape
    num_keys = keys.shape[2]
    batch, num_rows = num_heads * num_sequences, num_tokens * share

    rows = pad_rows(query.reshape(batch, num_rows, head_dim) * head_dim**-0.5)
    key_positions = torch.arange(key_start, key_start + num_keys)
    stand = positions.repeat_interleave(share, 1).repeat(num_heads, 1)
    stand = F.pad(stand, (0, rows.shape[1] - num_rows), value=key_start + num_keys - 1)[:, :, None]
    hidden, unseen = key_positions > stand, key_positions > positions[:, -1:]
    if window is not None:
        hidden |= key_positions <= stand - window
        unseen |= key_positions <= positions[:, :1] - window
    values = values.masked_fill(unseen[:, :, None], 0.0).reshape(batch, num_keys, head_dim)

    scores = torch.bmm(rows, keys.reshape(batch, num_keys, head_dim).transpose(1, 2))
    scores = scores.masked_fill_(hidden, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out, total = torch.zeros_like(rows), torch.zeros(batch, rows.shape[1], 1)
    for start in range(0, num_keys, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out += torch.bmm(weights[:, :, block], values[:, block])
        total += weights[:, :, block].sum(-1, keepdim=True)
    return (out / total)[:, :num_rows].reshape(num_heads, num_sequences * num_tokens, share * head_dim)
