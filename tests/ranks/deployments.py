"""Published deployments at their real geometry: layers, heads, head size and page size; only the caches are short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .sharded import CONTEXT_BYTES, Group, Sharding


@dataclass(frozen=True)
class Prompt:
    """One request: positions to move, the chunk it is computed in, and the decoder's ranks that want it (None: all)."""

    num_positions: int
    chunk: int
    ranks: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_positions + 1


@dataclass(frozen=True)
class Deployment:
    """A prefill node and a decode node.

    Args:
        writes_a_page: Writes that move a page of a layer to one rank of the decoder: one from each of its sources, or
            one a plane where that rank has heads of several.
        context: Whether hidden states travel.
    """

    name: str
    groups: tuple[Group, ...]
    source: Sharding
    target: Sharding
    prompts: tuple[Prompt, ...]
    writes_a_page: int = 1
    context: bool = False

    def least_bytes(self, prompt: Prompt) -> int:
        """KV that the decoder's ranks want; what several of them want counts for each."""
        return sum(
            len(group.positions(prompt.num_positions)) * row_bytes for group, row_bytes in self._targets_of(prompt)
        )

    def unique_bytes(self, prompt: Prompt) -> int:
        """KV of the model, each byte once."""
        return sum(
            len(group.positions(prompt.num_positions)) * len(group.layers) * group.heads * group.row_bytes
            for group in self.groups
        )

    def most_bytes(self, prompt: Prompt) -> int:
        """Whole pages, and hidden states."""
        return sum(
            group.num_needed(prompt.num_positions) * group.page_tokens * row_bytes + self.context * CONTEXT_BYTES
            for group, row_bytes in self._targets_of(prompt)
        )

    def most_writes(self, prompt: Prompt) -> int:
        """If no pages are merged. A page that is not wanted as a whole may take a write a plane."""
        num_writes = 0
        for group in self.groups:
            num_pages = group.num_needed(prompt.num_positions)
            ends = group.first(prompt.num_positions), prompt.num_positions
            num_partly = sum(position % group.page_tokens > 0 for position in ends)
            num_layer_writes = self.writes_a_page * num_pages + num_partly * (group.planes - 1)
            num_writes += num_layer_writes * len(group.layers) + self.context
        return num_writes * len(self.ranks(prompt))

    def ranks(self, prompt: Prompt) -> Sequence[int]:
        """The decoder's ranks that take it."""
        return range(self.target.num_ranks) if prompt.ranks is None else prompt.ranks

    def _targets_of(self, prompt: Prompt) -> Iterator[tuple[Group, int]]:
        """For each group on each rank, the bytes of a position."""
        for group in self.groups:
            for rank in self.ranks(prompt):
                num_rows = len(self.target.layers(group, rank)) * len(self.target.heads(group, rank))
                yield group, num_rows * group.row_bytes


def prompts(page_tokens: int) -> tuple[Prompt, ...]:
    """Chunks smaller and larger than a page, and a prompt in one; the last page is partly filled."""
    return (
        Prompt(2 * page_tokens + page_tokens // 3, page_tokens // 2 - 3),
        Prompt(3 * page_tokens + 7, page_tokens + 5),
        Prompt(page_tokens - 1, page_tokens),
    )


def one_rank_each(num_ranks: int, page_tokens: int) -> tuple[Prompt, ...]:
    """Data-parallel attention: each request lives on one rank."""
    every = prompts(page_tokens)
    return tuple(
        Prompt(one.num_positions - rank, one.chunk, (rank,))
        for rank, one in ((rank, every[rank % len(every)]) for rank in range(num_ranks))
    )


def layers(num: int) -> tuple[int, ...]:
    return tuple(range(num))


R1: Final = Group("latent", layers(61), heads=1, planes=1, dim=512 + 64, page_tokens=64, num_pages=6)
QWEN3_CODER: Final = Group("kv", layers(62), heads=8, dim=128, page_tokens=64, num_pages=6)
QWEN3_235B: Final = Group("kv", layers(94), heads=4, dim=128, page_tokens=128, num_pages=6)
WINDOW: Final = Group("window", layers(36)[::2], heads=8, dim=64, page_tokens=16, num_pages=12, window=128)
FULL: Final = Group("full", layers(36)[1::2], heads=8, dim=64, page_tokens=16, num_pages=24)

DEPLOYMENTS: Final[Sequence[Deployment]] = (
    Deployment("R1 TP8 -> TP8", (R1,), Sharding(8), Sharding(8), prompts(64), context=True),
    Deployment("R1 TP8 -> DP8", (R1,), Sharding(8), Sharding(8), one_rank_each(8, 64), context=True),
    Deployment("Qwen3-Coder TP8 -> TP8", (QWEN3_CODER,), Sharding(8), Sharding(8), prompts(64)),
    Deployment("Qwen3-Coder TP8 -> TP1", (QWEN3_CODER,), Sharding(8), Sharding(1), prompts(64), writes_a_page=16),
    Deployment("Qwen3-235B TP8 -> TP4", (QWEN3_235B,), Sharding(8), Sharding(4), prompts(128)),
    Deployment("Qwen3-235B TP4 -> TP8", (QWEN3_235B,), Sharding(4), Sharding(8), prompts(128)),
    Deployment(
        "gpt-oss-120b TP8 -> TP8",
        (WINDOW, FULL),
        Sharding(8),
        Sharding(8),
        (Prompt(75, 9), Prompt(300, 40), Prompt(171, 1000)),
    ),
)  # fmt: skip
