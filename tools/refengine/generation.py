"""Generating: a step drafts some tokens of every sequence, computes them, and keeps those the model would have chosen.

Without drafts a step gives one token a sequence. With them it may give more, and never another one: what counts is the
choice of the model at each position, made from logits that have the same bits however many rows a step has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .engine import Engine, Signal
from .grammar import Mask
from .model import final_norm, logits
from .scheduler import Job


@dataclass(frozen=True)
class Draft:
    """What was drafted for one step.

    Attributes:
        tokens: The drafts, one after the other.
        states: [drafts, hidden], what each was chosen from.
        num_accepted: How many of them, from the first on, the model chose too.
    """

    tokens: list[int]
    states: Tensor
    num_accepted: int = 0


NO_DRAFT = Draft([], torch.empty(0))


@dataclass(eq=False)
class Generation:
    """What the decoder makes of a job.

    Attributes:
        job: The prompt, and the pages.
        states: [states, hidden], after the final norm: those of the last positions but one, which the draft layer
            has not stored yet. None are known after a prompt of one token.
        tokens: The chosen tokens.
        logits: [vocab], what each of them was chosen from, before the grammar's mask.
        drafts: Of each step that had some.
        place: In the grammar.
    """

    job: Job
    states: Tensor
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    place: int = 0

    @property
    def sequence(self) -> list[int]:
        """All tokens that are known; the last one is not computed yet."""
        return self.job.prompt + self.tokens


class Generator:
    """Runs decode steps, all sequences in one forward pass.

    Args:
        engine: Model and cache.
        new_tokens: Most tokens to generate for a prompt.
        num_drafts: Most tokens to draft a step; 0: the engine needs no draft layer.
        mask: Which tokens are allowed; None: all.
    """

    def __init__(self, engine: Engine, new_tokens: int, num_drafts: int = 0, mask: Mask | None = None) -> None:
        if num_drafts and not engine.spec.has_draft:
            raise ValueError(f"{num_drafts} drafts a step are wanted of an engine without a draft layer")
        self._engine, self._checkpoint = engine, engine.checkpoint
        self._new_tokens, self._num_drafts, self._mask = new_tokens, num_drafts, mask

    def begin(self, job: Job, hidden: Tensor) -> Generation:
        """Start from the hidden state [hidden] of the last prefilled token; one of no meaning when there is none."""
        states = final_norm(self._checkpoint, hidden[None])
        return Generation(job, states[: min(1, job.num_prefill)])

    def is_finished(self, generation: Generation, num_tokens: int | None = None) -> bool:
        """Whether it has as many tokens, by default all that are wanted, or has come to an end by itself."""
        wanted = self._new_tokens if num_tokens is None else num_tokens
        return len(generation.tokens) >= wanted or generation.tokens[-1:] == [self._engine.config.end_token]

    def step(self, generations: Sequence[Generation], signals: Sequence[Signal] = ()) -> None:
        """Generate at least one more token of each; the first is computed from the prompt's last token.

        Raises:
            FloatingPointError: The cache held something that was never written.
        """
        found = self._draft(generations)
        drafts = [found.get(own, NO_DRAFT) for own in generations]
        inputs = [[own.sequence[-1], *draft.tokens] for own, draft in zip(generations, drafts, strict=True)]
        starts = [len(own.sequence) - 1 for own in generations]
        hidden = self._engine.extend([own.job for own in generations], inputs, starts, signals)
        lengths = [len(own) for own in inputs]
        states = final_norm(self._checkpoint, torch.cat(hidden))
        rows = logits(self._checkpoint, states)
        for part in zip(generations, drafts, torch.split(states, lengths), torch.split(rows, lengths), strict=True):
            self._accept(*part)

    def _accept(self, own: Generation, draft: Draft, states: Tensor, rows: Tensor) -> None:
        """Choose tokens until one is not what was drafted: what follows a wrong draft means nothing. The next step
        overwrites its keys and values."""
        num_before = len(own.tokens)
        for drafted, row in zip([*draft.tokens, None], rows, strict=True):
            self._check(own, row, "logits", len(own.sequence) - 1)
            own.logits.append(row.clone())
            own.tokens.append(self._choose(own, row))
            if own.tokens[-1] != drafted or self.is_finished(own):
                break
        chosen = own.tokens[num_before:]
        own.states = states[: len(chosen)].clone()
        if draft.tokens:
            num_accepted = sum(one == other for one, other in zip(chosen, draft.tokens, strict=False))
            own.drafts.append(replace(draft, num_accepted=num_accepted))

    def _choose(self, own: Generation, row: Tensor) -> int:
        if self._mask is None:
            return int(row.argmax())
        token = int(row.masked_fill(~self._mask.allowed(own.place), -torch.inf).argmax())
        own.place = self._mask.after(own.place, token)
        return token

    def _draft(self, generations: Sequence[Generation]) -> dict[Generation, Draft]:
        """Draft tokens of each, one pass of the draft layer for the first ones, then one for the second ones, and so
        on. The first pass has the states of all tokens chosen in the step before, each later one what the one before
        it expects. No more are drafted than can be used."""
        num_wanted = {
            own: min(self._num_drafts, self._new_tokens - len(own.tokens) - 1) if len(own.states) else 0
            for own in generations
        }
        found: dict[Generation, list[Tensor]] = {own: [] for own in generations}
        tokens: dict[Generation, list[int]] = {own: [] for own in generations}
        for turn in range(self._num_drafts):
            some = [own for own in generations if num_wanted[own] > turn]
            if not some:
                break
            states = [found[own][-1][None] if turn else own.states for own in some]
            following = [tokens[own][-1:] if turn else own.sequence[-len(own.states) :] for own in some]
            starts = [len(own.sequence) - 1 - len(state) + turn for own, state in zip(some, states, strict=True)]
            expected = self._engine.draft([own.job for own in some], states, following, starts)
            last = torch.stack([own[-1] for own in expected])
            for own, state, row in zip(some, last, logits(self._checkpoint, last), strict=True):
                self._check(own, row, "logits of a draft", len(own.sequence) - 1 + turn)
                found[own].append(state)
                tokens[own].append(int(row.argmax()))
        return {own: Draft(tokens[own], torch.stack(states)) for own, states in found.items() if states}

    def _check(self, own: Generation, row: Tensor, what: str, position: int) -> None:
        if not row.isfinite().all():
            raise FloatingPointError(
                f"request {own.job.request_id!r}: {what} at position {position} are not finite; the cache held "
                "something that was never written"
            )
