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


def attend(query: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of several sequences, each with the same number of queries.

    Args:
        query: [sequences, tokens, heads, head_dim].
        positions: [sequences, tokens], ascending: where each query stands.
        keys, values: [sequences, kv_heads, positions, head_dim]; the number of positions is a multiple of
            `KEY_BLOCK`. What lies after a sequence's last query may hold anything, NaN too.

    Returns:
        [sequences * tokens, heads * head_dim].
    """
    num_sequences, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    share = num_heads // num_kv_heads  # query heads to one KV head
    batch, num_rows = num_sequences * num_kv_heads, num_tokens * share

    rows = query.view(num_sequences, num_tokens, num_kv_heads, share, head_dim).transpose(1, 2)
    rows = pad_rows(rows.reshape(batch, num_rows, head_dim) * head_dim**-0.5)
    stand = positions.repeat_interleave(share, 1).repeat_interleave(num_kv_heads, 0)
    stand = F.pad(stand, (0, rows.shape[1] - num_rows))
    key_positions = torch.arange(num_keys)
    unseen = key_positions > positions[:, -1:]
    values = values.masked_fill(unseen[:, None, :, None], 0.0).view(batch, num_keys, head_dim)

    scores = torch.bmm(rows, keys.reshape(batch, num_keys, head_dim).transpose(1, 2))
    scores = scores.masked_fill_(key_positions > stand[:, :, None], -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out, total = torch.zeros_like(rows), torch.zeros(batch, rows.shape[1], 1)
    for start in range(0, num_keys, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out += torch.bmm(weights[:, :, block], values[:, block])
        total += weights[:, :, block].sum(-1, keepdim=True)
    out = (out / total)[:, :num_rows].view(num_sequences, num_kv_heads, num_tokens, share, head_dim)
    return out.transpose(1, 2).reshape(num_sequences * num_tokens, num_heads * head_dim)
