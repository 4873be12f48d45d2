"""An engine: one model, one paged cache, two kinds of step. It knows nothing of kvmsgr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cache import PagedCache
from .loader import Checkpoint
from .model import Batch, Model
from .scheduler import Job, Piece


def nothing() -> None:
    """A layer callback for those who need none."""


@dataclass(eq=False)
class Generation:
    """What the decoder made of a job: the tokens it chose and the logits [vocab] it chose each of them from."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class Engine:
    """Runs prefill steps and decode steps over one cache."""

    def __init__(self, checkpoint: Checkpoint, cache: PagedCache) -> None:
        self.checkpoint, self.cache = checkpoint, cache
        self.config = checkpoint.config
        self._model = Model(checkpoint)

    def allocate(self, num_tokens: int) -> list[int] | None:
        """Pages for that many tokens, or None when there are not enough free ones."""
        num_pages = self.cache.pages_for(num_tokens)
        return self.cache.allocate(num_pages) if num_pages <= self.cache.num_free else None

    def prefill(self, pieces: Sequence[Piece], after_layer: Callable[[], None] = nothing) -> Tensor:
        """Compute pieces of several prompts. Returns the hidden state [pieces, hidden] of each one's last token."""
        batches = [
            Batch(
                tokens=torch.tensor([piece.job.prompt[piece.start : piece.stop]]),
                positions=torch.arange(piece.start, piece.stop)[None],
                table=self.cache.table([piece.job.pages], piece.stop),
            )
            for piece in pieces
        ]
        hidden = self._model.forward(batches, self.cache, after_layer)
        last = torch.tensor([batch.tokens.numel() for batch in batches]).cumsum(0) - 1
        return hidden[last]

    def decode(self, generations: Sequence[Generation], after_layer: Callable[[], None] = nothing) -> None:
        """Generate one more token of each, in one batch; the first is computed from the prompt's last token."""
        inputs = [(own.tokens or own.job.prompt)[-1] for own in generations]
        positions = [own.job.num_prefill + len(own.tokens) for own in generations]
        batch = Batch(
            tokens=torch.tensor(inputs)[:, None],
            positions=torch.tensor(positions)[:, None],
            table=self.cache.table([own.job.pages for own in generations], max(positions) + 1),
        )
        logits = self._model.logits(self._model.forward([batch], self.cache, after_layer))
        for own, row in zip(generations, logits, strict=True):
            if not row.isfinite().all():
                raise FloatingPointError(
                    f"request {own.job.request_id!r}: logits at position {own.job.num_prefill + len(own.tokens)} are "
                    "not finite; the cache held something that was never written"
                )
            own.logits.append(row.clone())
            own.tokens.append(int(row.argmax()))

    def is_finished(self, generation: Generation, max_new_tokens: int) -> bool:
        return len(generation.tokens) >= max_new_tokens or generation.tokens[-1:] == [self.config.end_token]

    def warm_up(self, after_layer: Callable[[], None] = nothing) -> None:
        """One forward pass on a page of its own, so that the first request does not pay for touching the weights."""
        job = Job("warm-up", [0, 0], self.cache.allocate(1))
        try:
            self.prefill([Piece(job, 0, 1)], after_layer)
        finally:
            self.cache.release(job.pages)
