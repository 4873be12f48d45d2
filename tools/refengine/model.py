"""The forward pass of a llama-like model over paged caches, as one rank computes its share of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import attend, by_head, linear, rms_norm, rotary_table, rotate
from .cache import PagedCache
from .loader import Checkpoint
from .spec import DRAFT, CacheSpec

MAX_POSITIONS = 8192
NORM_EPSILON = 1e-6

Exchange = Callable[[Tensor], Tensor]
"""From a rank's own terms of a sum [own heads, rows, hidden] to those of all ranks [heads, rows, hidden]."""


@dataclass(frozen=True)
class Batch:
    """Sequences that contribute the same number of tokens to a step: one chunk of a prompt, or all that decode.

    Attributes:
        tokens: [sequences, tokens] ids.
        positions: [sequences, tokens], ascending.
        tables: A group each: [sequences, pages] page table, in whole blocks of keys.
        key_starts: A group each: the position at which its table begins.
        following: [sequences, tokens] the id after each token, for the draft layer; None: it stores nothing.
    """

    tokens: Tensor
    positions: Tensor
    tables: tuple[Tensor, ...]
    key_starts: tuple[int, ...]
    following: Tensor | None = None


def only_rank(terms: Tensor) -> Tensor:
    """The exchange of a rank that is alone."""
    return terms


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a step stand.

    Attributes:
        cosine, sine: [rows, 1, head_dim / 2].
        pages, offsets: A group each: [rows], where keys and values are stored.
        sizes: How many rows each batch has.
    """

    cosine: Tensor
    sine: Tensor
    pages: list[Tensor]
    offsets: list[Tensor]
    sizes: list[int]


class Shard:
    """The heads of one rank, and its caches.

    Attention and MLP are cut by KV head. Each head adds one term to the residual stream, and every rank adds the
    terms of all heads in the same order: the number of ranks changes no bit. The draft layer (`mtp`) is cut alike.
    """

    def __init__(self, checkpoint: Checkpoint, spec: CacheSpec, rank: int, caches: Sequence[PagedCache]) -> None:
        self._checkpoint, self.caches = checkpoint, caches
        self._config, self._weights = checkpoint.config, checkpoint.weights
        self._heads = spec.heads(self._config, rank)
        self._names = [*map(str, range(self._config.num_layers)), DRAFT]
        self._cosine, self._sine = rotary_table(MAX_POSITIONS, self._config.head_dim, self._config.rope_base)
        self._places = {
            layer: (group, index)
            for group, cache in enumerate(caches)
            for index, layer in enumerate(cache.group.layers)
        }

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], exchange: Exchange, after_layer: Callable[[int], None]) -> Tensor:
        """Compute all tokens of a step and store their keys and values.

        Args:
            batches: What the step computes.
            exchange: Meets the other ranks.
            after_layer: Called with a layer's index after the exchange that follows its attention output projection:
                what all ranks stored of it is final then. The draft layer comes last, where batches say what follows.

        Returns:
            Hidden states [rows of all batches, hidden], before the final norm.
        """
        weights, heads, rows = self._weights, self._heads, self._rows(batches)
        x = weights["embedding"][torch.cat([batch.tokens.flatten() for batch in batches])]
        for layer in range(self._config.num_layers):
            attended = self._attention(layer, self._normed(x, layer, "attention_norm"), batches, rows)
            for term in exchange(by_head(attended, weights[f"{layer}.attention_out"][heads])):
                x = x + term
            after_layer(layer)
            gate, up = by_head(self._normed(x, layer, "mlp_norm"), weights[f"{layer}.gate_up"][heads]).chunk(2, -1)
            for term in exchange(by_head(F.silu(gate) * up, weights[f"{layer}.down"][heads])):
                x = x + term
        following = [replace(batch, tokens=batch.following) for batch in batches if batch.following is not None]
        if following:
            self.draft(final_norm(self._checkpoint, x), following, exchange)
            after_layer(self._config.num_layers)
        return x

    @torch.no_grad()
    def draft(self, states: Tensor, batches: Sequence[Batch], exchange: Exchange) -> Tensor:
        """Run the draft layer alone, and store its keys and values.

        Args:
            states: [rows of all batches, hidden], after the final norm: the model's, or what this returned for the
                positions before.
            batches: The positions of these states; their tokens are those that follow them.
            exchange: Meets the other ranks.

        Returns:
            The states [rows, hidden], after the final norm, that it expects at the positions of the following tokens.
        """
        features = self.draft_features(states, batches)
        x = self._weights["draft.mean"].expand(len(states), -1)
        for term in exchange(by_head(features, self._weights["draft.out"][self._heads])):
            x = x + term
        return x

    @torch.no_grad()
    def draft_features(self, states: Tensor, batches: Sequence[Batch]) -> Tensor:
        """What the output of the draft layer is a linear function of: [own heads, rows, features]. See `draft`."""
        following = self._weights["embedding"][torch.cat([batch.tokens.flatten() for batch in batches])]
        seen = torch.cat([unit(states), unit(following)], -1)
        cut = seen.view(len(seen), self._config.num_kv_heads, -1).transpose(0, 1)[self._heads]
        attended = self._attention(self._config.num_layers, seen, batches, self._rows(batches))
        return torch.cat((cut, attended), -1)

    def _rows(self, batches: Sequence[Batch]) -> Rows:
        positions = torch.cat([batch.positions.flatten() for batch in batches])
        pages, offsets = [], []
        for group, cache in enumerate(self.caches):
            page_tokens = cache.group.page_tokens
            held = [(b.tables[group], (b.positions - b.key_starts[group]) // page_tokens) for b in batches]
            pages.append(torch.cat([table.gather(1, index).flatten() for table, index in held]))
            offsets.append(positions % page_tokens)
        sizes = [batch.tokens.numel() for batch in batches]
        return Rows(self._cosine[positions], self._sine[positions], pages, offsets, sizes)

    def _normed(self, x: Tensor, layer: int, name: str) -> Tensor:
        return rms_norm(x, self._weights[f"{layer}.{name}"], self._config.norm_epsilon)

    def _attention(self, layer: int, normed: Tensor, batches: Sequence[Batch], rows: Rows) -> Tensor:
        """Store the layer's keys and values, then attend to them: [own heads, rows, share * head_dim]."""
        (group, index), name = self._places[layer], self._names[layer]
        cache, dim = self.caches[group], self._config.head_dim
        keys, values = by_head(normed, self._weights[f"{name}.kv"][cache.heads]).chunk(2, -1)
        cache.write(index, rows.pages[group], rows.offsets[group], self._rotate(keys, rows), values)
        query = by_head(normed, self._weights[f"{name}.query"][self._heads])
        query = self._rotate(query, rows).view(*query.shape[:2], -1, dim)  # [head, row, share, dim]
        attended = [
            attend(
                own.view(len(own), *batch.tokens.shape, *own.shape[2:]),
                batch.positions,
                *cache.read(index, batch.tables[group]),
                key_start=batch.key_starts[group],
                window=cache.group.window,
            )
            for own, batch in zip(torch.split(query, rows.sizes, 1), batches, strict=True)
        ]
        return torch.cat(attended, 1)

    def _rotate(self, x: Tensor, rows: Rows) -> Tensor:
        """Rotary embedding of x [heads, rows, several * head_dim]."""
        return rotate(x.view(*x.shape[:2], -1, self._config.head_dim), rows.cosine, rows.sine).flatten(-2)


@torch.no_grad()
def final_norm(checkpoint: Checkpoint, hidden: Tensor) -> Tensor:
    """Hidden states [rows, hidden] as logits and drafts are made of them."""
    return rms_norm(hidden, checkpoint.weights["norm"], checkpoint.config.norm_epsilon)


@torch.no_grad()
def logits(checkpoint: Checkpoint, states: Tensor) -> Tensor:
    """Logits [rows, vocab] of states [rows, hidden] after the final norm."""
    return linear(states, checkpoint.weights["embedding"])


def unit(x: Tensor) -> Tensor:
    """Rows of mean square 1; zeros stay zeros."""
    return rms_norm(x, torch.ones(x.shape[-1]), NORM_EPSILON)
