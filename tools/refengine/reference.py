"""The oracle: the same engine, prefill and decode in one process, no messenger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .engine import Engine
from .generation import Draft, Generator
from .grammar import Mask
from .scheduler import Holding, Job, PrefillScheduler


@dataclass(frozen=True)
class Answer:
    """Everything a run computed for one prompt.

    Attributes:
        tokens: The generated ids.
        logits: [generated tokens, vocab].
        hidden: [hidden], the last prefilled token's state; zeros for a prompt of one token.
        drafts: Of each step that had some.
    """

    tokens: list[int]
    logits: Tensor
    hidden: Tensor
    drafts: list[Draft]


def run_alone(
    engine: Engine,
    prompts: Sequence[list[int]],
    new_tokens: int,
    step_tokens: int,
    max_running: int = 1,
    *,
    num_drafts: int = 0,
    mask: Mask | None = None,
) -> list[Answer]:
    """Prefill and decode all prompts in this process. The cache must have pages for all of them at once.

    Args:
        engine: What computes.
        prompts: Token ids.
        new_tokens, num_drafts, mask: As in `Generator`.
        step_tokens, max_running: As in `PrefillScheduler`.
    """

    def allocate(job: Job) -> list[Holding]:
        held = engine.allocate(len(job.prompt) + new_tokens)
        if held is None:
            raise MemoryError(f"not enough pages for all {len(prompts)} prompts at once")
        return held

    jobs = [Job(f"prompt-{index}", prompt) for index, prompt in enumerate(prompts)]
    hidden = {job.request_id: torch.zeros(engine.config.hidden) for job in jobs}
    scheduler = PrefillScheduler(step_tokens, max_running, allocate)
    for job in jobs:
        if job.num_prefill:
            scheduler.add(job)
        else:
            job.held = allocate(job)
    while pieces := scheduler.next_step():
        for piece, state in zip(pieces, engine.prefill(pieces), strict=True):
            hidden[piece.job.request_id] = state

    generator = Generator(engine, new_tokens, num_drafts, mask)
    generations = [generator.begin(job, hidden[job.request_id]) for job in jobs]
    while running := [own for own in generations if not generator.is_finished(own)]:
        generator.step(running)
    for job in jobs:
        engine.release(job)
    return [Answer(own.tokens, torch.stack(own.logits), hidden[own.job.request_id], own.drafts) for own in generations]
