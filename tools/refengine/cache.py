"""A paged KV cache: the memory of one group on one rank, and the free list of the group's pages."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from .arithmetic import KEY_BLOCK
from .loader import ModelConfig
from .spec import CacheSpec, Group

LATENT_DIMS = "layer page token dim"
DIMS = {"hnd": "layer page plane head token dim", "nhd": "layer page plane token head dim"}


class PagedCache:
    """Keys and values of one group of layers on one rank, in one tensor. What is not in use is NaN, so that reading
    what nobody wrote, or what was overwritten or released too early, shows in the logits.

    Args:
        config: Shape of the model.
        spec: The node's cache.
        group: The group.
        num_pages: Pages a layer.
        rank: Whose memory it is.
        memory: float32 of `num_elements`; None allocates it.

    Attributes:
        tensor: As messengers see it; `dims` names its axes.
        heads: KV heads stored in it.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: CacheSpec,
        group: Group,
        num_pages: int,
        rank: int = 0,
        memory: Tensor | None = None,
    ) -> None:
        if KEY_BLOCK % group.page_tokens:
            raise ValueError(
                f"page_tokens must divide {KEY_BLOCK} (a block of keys in attention), not {group.page_tokens}"
            )
        self.group, self.num_pages = group, num_pages
        self.heads = slice(0, config.num_kv_heads) if spec.latent else spec.heads(config, rank)
        num_layers, num_heads = len(group.layers), self.heads.stop - self.heads.start
        shape = tensor_shape(config, spec, group, num_pages)
        self.tensor = torch.empty(shape) if memory is None else memory.view(shape)
        self.tensor.fill_(torch.nan)
        if spec.latent:
            self.dims = LATENT_DIMS
            rows = self.tensor.view(*shape[:3], num_heads, 2, config.head_dim).transpose(3, 4)
        else:
            self.dims = DIMS[spec.layout]
            rows = self.tensor.permute((0, 1, 4, 2, 3, 5) if spec.layout == "hnd" else (0, 1, 3, 2, 4, 5))
        self._rows = rows  # [layer, page, token, plane, head, dim], whatever the layout
        own = spec.heads(config, rank)
        self._own = rows[:, :, :, :, own.start - self.heads.start : own.stop - self.heads.start]
        assert self._rows.shape == (num_layers, num_pages, group.page_tokens, 2, num_heads, config.head_dim)

    def poison(self, pages: Sequence[int]) -> None:
        """Nobody may read these pages any more, nor write to them until they are handed out again."""
        self.tensor[:, list(pages)] = torch.nan

    def is_poisoned(self, pages: Sequence[int]) -> bool:
        """Whether nobody wrote to these pages since."""
        return bool(self.tensor[:, list(pages)].isnan().all())

    def write(self, layer: int, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [stored heads, rows, dim] of a layer (counted within the group) at
        (pages[row], offsets[row])."""
        self._rows[layer][pages, offsets] = torch.stack((keys, values)).permute(2, 0, 1, 3)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the rank's own heads, each [head, sequence, position, dim], of the pages in table
        [sequences, pages]."""
        found = self._own[layer][table]  # [sequence, page, token, plane, head, dim]
        keys, values = found.permute(3, 4, 0, 1, 2, 5).flatten(3, 4).unbind(0)
        return keys, values


def tensor_shape(config: ModelConfig, spec: CacheSpec, group: Group, num_pages: int) -> tuple[int, ...]:
    """Shape of a rank's tensor of a group."""
    if spec.latent:
        inner: tuple[int, ...] = (group.page_tokens, 2 * config.num_kv_heads * config.head_dim)
    else:
        num_heads = config.num_kv_heads // spec.num_ranks
        ordered = (num_heads, group.page_tokens) if spec.layout == "hnd" else (group.page_tokens, num_heads)
        inner = (2, *ordered, config.head_dim)
    return (len(group.layers), num_pages, *inner)


def num_elements(config: ModelConfig, spec: CacheSpec, group: Group, num_pages: int) -> int:
    return math.prod(tensor_shape(config, spec, group, num_pages))


class PagePool:
    """Which pages of a group are free; one index names the same page on all ranks.

    Args:
        num_pages: How many there are.
        seed: Shuffles the order in which they are handed out.
    """

    def __init__(self, num_pages: int, seed: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages. Raises MemoryError when there are not enough."""
        if num_pages > len(self._free):
            raise MemoryError(f"{num_pages} pages wanted, {len(self._free)} of {self.num_pages} are free")
        return [self._free.pop() for _ in range(num_pages)]

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        self._free[:0] = pages
