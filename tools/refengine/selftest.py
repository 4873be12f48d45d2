"""Shows that on this machine a token's numbers do not depend on what they are computed together with."""

from __future__ import annotations

from dataclasses import replace

import torch

from .cache import Layout, PagedCache
from .engine import Engine
from .loader import Checkpoint
from .reference import Answer, run_alone

PROMPT_TOKENS = (330, 33, 1, 97)  # up to several blocks of keys: products split their sums from about 256 terms on
NEW_TOKENS = 4
NUM_LAYERS = 4  # all have the same shapes; a difference in the first shows in the logits


def bitwise_difference(checkpoint: Checkpoint, seed: int = 0) -> str | None:
    """Run the same prompts in several ways and compare every logit and hidden state bit by bit.

    The first way computes each prompt by itself in one chunk; the others use odd chunks, shared steps, other page
    sizes, the other layout and other batch sizes in decode.

    Returns:
        None when all agree, otherwise the first difference in words.
    """
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, num_layers=NUM_LAYERS))
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(3, checkpoint.config.vocab, (length,), generator=generator).tolist() for length in PROMPT_TOKENS
    ]
    alone: list[Answer] = []
    for prompt in prompts:
        cache = PagedCache(checkpoint.config, 32, 16, "hnd", seed)
        alone += run_alone(Engine(checkpoint, cache), [prompt], NEW_TOKENS, step_tokens=1024)

    ways: list[tuple[Layout, int, int, int]] = [("nhd", 8, 61, 3), ("hnd", 32, 7, 2)]
    for layout, page_tokens, step_tokens, max_running in ways:
        cache = PagedCache(checkpoint.config, 96, page_tokens, layout, seed + 1)
        together = run_alone(Engine(checkpoint, cache), prompts, NEW_TOKENS, step_tokens, max_running)
        for index, (expected, found) in enumerate(zip(alone, together, strict=True)):
            if difference := difference_of(expected, found):
                way = f"layout {layout}, pages of {page_tokens}, {max_running} prompts in {step_tokens} tokens a step"
                return f"{way}: prompt {index}: {difference}"
    return None


def difference_of(expected: Answer, found: Answer) -> str | None:
    """How two answers to one prompt differ; None when every bit is equal."""
    if not torch.equal(expected.hidden, found.hidden):
        gap = (expected.hidden - found.hidden).abs().max().item()
        return f"the hidden state of the last prefilled token differs, by up to {gap:.3g}"
    for row, (one, other) in enumerate(zip(expected.logits, found.logits, strict=False)):
        if not torch.equal(one, other):
            gap = (one - other).abs().max().item()
            return f"logits of new token {row} differ, by up to {gap:.3g}"
    if expected.tokens != found.tokens:
        return f"tokens differ: expected {expected.tokens}, found {found.tokens}"
    return None
