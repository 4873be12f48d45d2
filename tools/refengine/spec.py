"""How one side of a transfer keeps its cache: groups of layers, ranks, and the order inside a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .loader import ModelConfig

Layout = Literal["hnd", "nhd"]
WINDOW_TOKENS = 64  # shorter than most prompts
SMALLEST_PAGE_TOKENS = 8
DRAFT = "draft"  # the group of the draft layer, whose index is that after the model's last


@dataclass(frozen=True)
class Group:
    """Layers that share page geometry and page lists.

    Attributes:
        name: The same on both sides.
        layers: Indices in the model.
        page_tokens: Tokens a page.
        window: How many positions a token attends to in these layers, its own included; None: all.
        num_ahead: Tokens after its own position that a position's KV depends on.
    """

    name: str
    layers: tuple[int, ...]
    page_tokens: int
    window: int | None = None
    num_ahead: int = 0

    def first_needed(self, num_computed: int) -> int:
        """First position that must be held once `num_computed` are: what the last of them attended to."""
        return 0 if self.window is None else max(0, num_computed - self.window)

    def num_pages(self, num_computed: int, num_tokens: int) -> int:
        """Pages that hold all positions below `num_tokens` which are needed once `num_computed` are."""
        return -(-num_tokens // self.page_tokens) - self.first_needed(num_computed) // self.page_tokens


@dataclass(frozen=True)
class CacheSpec:
    """A node's cache.

    Attributes:
        groups: All layers of the model, each in one group; last that of the draft layer, if there is one.
        layout: "hnd" keeps the tokens of one head together in a page, "nhd" the heads of one token.
        latent: One row a token holds what all heads need, and every rank has all of it; else a rank has its own heads.
        num_ranks: Over how many ranks the heads are divided (tensor parallelism).
    """

    groups: tuple[Group, ...]
    layout: Layout = "hnd"
    latent: bool = False
    num_ranks: int = 1

    @property
    def has_draft(self) -> bool:
        return self.groups[-1].name == DRAFT

    @property
    def num_layers(self) -> int:
        """Layers that a prefill step signals, the draft layer too."""
        return sum(len(group.layers) for group in self.groups)

    def heads(self, config: ModelConfig, rank: int) -> slice:
        """The KV heads whose attention a rank computes."""
        share = config.num_kv_heads // self.num_ranks
        return slice(rank * share, (rank + 1) * share)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """One side of a transfer: an engine and its messenger.

    Attributes:
        name: In logs.
        model: One of `models.NAMES`.
        spec, num_pages: Its cache, and the pages of each group.
        num_requests: Most that are alive at once: each has a context slot.
        num_drafts: Most tokens that a decode step drafts for each; it computes one more.
        step_tokens: Tokens a prefill step computes at most.
        seed: Shuffles the order of pages.
        fabric: As in `kvmsgr.Config`.
        num_interfaces: Network interfaces of each rank.
        every_rank_bumps: Whether each rank has its layer counter; else rank 0 bumps for all. That is right here: every
            rank stores keys and values before the exchange that precedes the bump.
        hold_s: A step may stand still that long; no time runs out meanwhile.
        prefix_cache: Keep pages that nobody holds, for prompts that begin alike.
    """

    name: str
    model: str
    spec: CacheSpec
    num_pages: tuple[int, ...]
    num_requests: int
    step_tokens: int
    num_drafts: int = 0
    seed: int = 0
    fabric: str = "auto"
    num_interfaces: int = 1
    every_rank_bumps: bool = False
    hold_s: float = 0.0
    prefix_cache: bool = False

    @property
    def max_rows(self) -> int:
        """Most tokens that a step computes."""
        return max(self.step_tokens, self.num_requests * (1 + self.num_drafts))


def check_ranks(config: ModelConfig, num_ranks: int) -> None:
    """Raises ValueError where the heads cannot be divided evenly."""
    if config.num_kv_heads % num_ranks:
        raise ValueError(f"{config.num_kv_heads} KV heads cannot be divided evenly over {num_ranks} ranks")


def make_groups(
    config: ModelConfig, page_tokens: int, num_groups: int = 1, *, draft: bool = False
) -> tuple[Group, ...]:
    """All layers in one group; or every other layer in a second one, with a sliding window and pages half as long. With
    `draft` the draft layer in a group of its own."""
    layers = tuple(range(config.num_layers))
    extra = (Group(DRAFT, (config.num_layers,), page_tokens, num_ahead=1),) if draft else ()
    if num_groups == 1:
        return (Group("kv", layers, page_tokens), *extra)
    return (
        Group("full", layers[0::2], page_tokens),
        Group("window", layers[1::2], max(SMALLEST_PAGE_TOKENS, page_tokens // 2), WINDOW_TOKENS),
        *extra,
    )
