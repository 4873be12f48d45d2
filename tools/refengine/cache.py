"""A paged KV cache: one tensor for all layers, pages handed out in any order, everything unwritten is NaN."""

from __future__ import annotations

import random
from typing import Literal

import torch
from torch import Tensor

from .arithmetic import KEY_BLOCK
from .loader import ModelConfig

Layout = Literal["hnd", "nhd"]
DIMS: dict[Layout, str] = {
    "hnd": "layer page plane head token dim",
    "nhd": "layer page plane token head dim",
}


class PagedCache:
    """KV of all layers and both planes in one tensor, and the free list of its pages.

    A page that is not in use is filled with NaN, so that reading what nobody wrote, or what was overwritten or
    released too early, shows in the logits.

    Args:
        config: Shape of the model.
        num_pages: Pages a layer.
        page_tokens: Tokens a page; divides `KEY_BLOCK`.
        layout: "hnd" keeps the tokens of one head together in a page, "nhd" the heads of one token.
        seed: Shuffles the order in which pages are handed out.
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_tokens: int, layout: Layout, seed: int) -> None:
        if KEY_BLOCK % page_tokens:
            raise ValueError(f"page_tokens must divide {KEY_BLOCK} (a block of keys in attention), not {page_tokens}")
        self.num_pages, self.page_tokens, self.layout = num_pages, page_tokens, layout
        inner = (config.num_kv_heads, page_tokens) if layout == "hnd" else (page_tokens, config.num_kv_heads)
        shape = (config.num_layers, num_pages, 2, *inner, config.head_dim)
        self.tensor = torch.full(shape, torch.nan)
        order = (0, 2, 1, 4, 3, 5) if layout == "hnd" else (0, 2, 1, 3, 4, 5)
        self._rows = self.tensor.permute(order)  # [layer, plane, page, token, head, dim], whatever the layout
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages. Raises MemoryError when there are not enough."""
        if num_pages > len(self._free):
            raise MemoryError(f"{num_pages} pages wanted, {len(self._free)} of {self.num_pages} are free")
        return [self._free.pop() for _ in range(num_pages)]

    def release(self, pages: list[int]) -> None:
        """Give pages back and poison them; nobody may read or write them any more."""
        self.tensor[:, pages] = torch.nan
        self._free[:0] = pages

    def write(self, layer: int, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [rows, head, dim] at (pages[row], offsets[row])."""
        self._rows[layer][:, pages, offsets] = torch.stack((keys, values))

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each [sequences, head, position, dim], of the pages in table [sequences, pages]."""
        found = self._rows[layer][:, table]  # [plane, sequence, page, token, head, dim]
        keys, values = found.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).unbind(0)
        return keys, values

    def table(self, pages: list[list[int]], num_tokens: int) -> Tensor:
        """Page table [sequences, pages] for `num_tokens` positions, rounded up to whole blocks of keys.

        Where a sequence has fewer pages the table repeats page 0; attention masks those positions.
        """
        width = -(-num_tokens // KEY_BLOCK) * (KEY_BLOCK // self.page_tokens)
        return torch.tensor([(own + [0] * width)[:width] for own in pages])
