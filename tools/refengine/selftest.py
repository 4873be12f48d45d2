"""Shows that on this machine a token's numbers do not depend on what they are computed together with."""

from __future__ import annotations

from dataclasses import replace

import torch

from .engine import local_engine
from .loader import Checkpoint
from .reference import Answer, run_alone
from .spec import CacheSpec, Group, make_groups

PROMPT_TOKENS = (330, 33, 1, 97)  # up to several blocks of keys: products split their sums from about 256 terms on
NEW_TOKENS = 4
NUM_LAYERS = 4  # all have the same shapes; a difference in the first shows in the logits


def bitwise_difference(checkpoint: Checkpoint, num_groups: int = 1, seed: int = 0, num_drafts: int = 0) -> str | None:
    """Run the same prompts in several ways and compare every logit, hidden state and draft bit by bit.

    The first way computes each prompt by itself in one chunk; the others use odd chunks, shared steps, other page
    sizes, another layout, latent rows and other batch sizes in decode.

    Args:
        checkpoint: The model; its first `NUM_LAYERS` layers are run.
        num_groups: As in `make_groups`.
        seed: Of the prompts and the order of pages.
        num_drafts: Most tokens drafted a step, where the checkpoint has a draft layer. The logits are compared with
            those of a run without drafts.

    Returns:
        None when all agree, otherwise the first difference in words.
    """
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, num_layers=NUM_LAYERS))
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(3, checkpoint.config.vocab, (length,), generator=generator).tolist() for length in PROMPT_TOKENS
    ]

    def run(
        spec: CacheSpec, some: list[list[int]], step_tokens: int, max_running: int, num_drafts: int = num_drafts
    ) -> list[Answer]:
        num_pages = [sum(group.num_pages(0, len(prompt) + NEW_TOKENS) for prompt in some) for group in spec.groups]
        engine = local_engine(checkpoint, spec, num_pages, seed)
        return run_alone(engine, some, NEW_TOKENS, step_tokens, max_running, num_drafts=num_drafts)

    def groups(page_tokens: int) -> tuple[Group, ...]:
        return make_groups(checkpoint.config, page_tokens, num_groups, draft=num_drafts > 0)

    alone = [run(CacheSpec(groups(16)), [prompt], 1024, 1)[0] for prompt in prompts]
    if num_drafts:
        plain = run(CacheSpec(groups(16)), prompts[1:2], 1024, 1, num_drafts=0)[0]
        if difference := difference_of(plain, alone[1]):
            return f"with {num_drafts} drafts a step: {difference}"
    ways = [(CacheSpec(groups(8), "nhd"), 61, 3), (CacheSpec(groups(32), latent=True), 7, 2)]
    for spec, step_tokens, max_running in ways:
        together = run(spec, prompts, step_tokens, max_running)
        for index, (expected, found) in enumerate(zip(alone, together, strict=True)):
            if difference := difference_of(expected, found) or draft_difference(expected, found):
                way = f"{spec}, {max_running} prompts in {step_tokens} tokens a step"
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


def draft_difference(expected: Answer, found: Answer) -> str | None:
    """How the drafts of two answers differ; None when every bit of what they were chosen from is equal."""
    if len(expected.drafts) != len(found.drafts):
        return f"there were drafts in {len(found.drafts)} steps; expected {len(expected.drafts)}"
    for step, (one, other) in enumerate(zip(expected.drafts, found.drafts, strict=True)):
        if (one.tokens, one.num_accepted) != (other.tokens, other.num_accepted):
            return (
                f"drafts of step {step} differ: expected {one.tokens} ({one.num_accepted} accepted), found "
                f"{other.tokens} ({other.num_accepted})"
            )
        if not torch.equal(one.states, other.states):
            gap = (one.states - other.states).abs().max().item()
            return f"the states that the drafts of step {step} were chosen from differ, by up to {gap:.3g}"
    return None
