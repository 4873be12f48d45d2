"""The forward pass of a llama-like model over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import attend, linear, rms_norm, rotary_table, rotate
from .cache import PagedCache
from .loader import Checkpoint

MAX_POSITIONS = 8192


@dataclass(frozen=True)
class Batch:
    """Sequences that contribute the same number of tokens to a step: one chunk of a prompt, or all that decode.

    Attributes:
        tokens: [sequences, tokens] ids.
        positions: [sequences, tokens], ascending.
        table: [sequences, pages] page table, in whole blocks of keys.
    """

    tokens: Tensor
    positions: Tensor
    table: Tensor


class Model:
    """Weights and forward pass. Stateless: all state is in the cache that is passed in."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._weights = checkpoint.weights
        self._cosine, self._sine = rotary_table(MAX_POSITIONS, self.config.head_dim, self.config.rope_base)

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], cache: PagedCache, after_layer: Callable[[], None]) -> Tensor:
        """Compute all tokens of a step and store their keys and values.

        Args:
            batches: What the step computes.
            cache: Where keys and values go and come from.
            after_layer: Called once a layer, after the attention output projection: the layer's KV is final then.

        Returns:
            Hidden states [tokens of the step, hidden] before the final norm, in the order of `batches`.
        """
        config, weights = self.config, self._weights
        positions = torch.cat([batch.positions.flatten() for batch in batches])
        pages = torch.cat([batch.table.gather(1, batch.positions // cache.page_tokens).flatten() for batch in batches])
        offsets = positions % cache.page_tokens
        cosine, sine = self._cosine[positions], self._sine[positions]
        sizes = [batch.tokens.numel() for batch in batches]
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]

        x = weights["embedding"][torch.cat([batch.tokens.flatten() for batch in batches])]
        for layer in range(config.num_layers):
            normed = rms_norm(x, weights[f"{layer}.attention_norm"], config.norm_epsilon)
            qkv = linear(normed, weights[f"{layer}.qkv"]).view(len(x), -1, config.head_dim)
            query, keys, values = torch.split(qkv, heads, 1)
            cache.write(layer, pages, offsets, rotate(keys, cosine, sine), values)
            queries = torch.split(rotate(query, cosine, sine), sizes)
            attended = [
                attend(own.view(*batch.tokens.shape, *own.shape[1:]), batch.positions, *cache.read(layer, batch.table))
                for own, batch in zip(queries, batches, strict=True)
            ]
            x = x + linear(torch.cat(attended), weights[f"{layer}.attention_out"])
            after_layer()
            normed = rms_norm(x, weights[f"{layer}.mlp_norm"], config.norm_epsilon)
            gate, up = linear(normed, weights[f"{layer}.gate_up"]).chunk(2, -1)
            x = x + linear(F.silu(gate) * up, weights[f"{layer}.down"])
        return x

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] of hidden states [rows, hidden]."""
        normed = rms_norm(hidden, self._weights["norm"], self.config.norm_epsilon)
        return linear(normed, self._weights["embedding"])
