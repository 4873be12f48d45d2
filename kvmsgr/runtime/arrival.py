"""What a fetch resolves to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .fetch import Fetch

Contexts: TypeAlias = "Mapping[int, Mapping[str, npt.NDArray[np.uint8]]]"
"""By rank and name, the bytes of a slot of a context buffer."""


def first_of_each(contexts: Contexts) -> Mapping[str, npt.NDArray[np.uint8]]:
    """Each buffer of the first rank that has it."""
    return {name: view for _, views in sorted(contexts.items(), reverse=True) for name, view in views.items()}


class Arrival:
    """A prompt's KV has arrived.

    Attributes:
        num_tokens: Positions that are in the cache now: all but the prompt's last, which the decoder runs itself. Those
            before the first span were there already.
        rows: Rows that landed.
        contexts: For each rank that was asked for, the name of each of its context buffers to its bytes, shape
            (slot bytes,), valid until `release`.
        context_slot: The slot these are, in every buffer; -1: nothing came.
    """

    def __init__(self, num_tokens: int, rows: int, contexts: Contexts, context_slot: int, fetch: Fetch) -> None:
        self.num_tokens = num_tokens
        self.rows = rows
        self.contexts = contexts
        self.context_slot = context_slot
        self._fetch = fetch

    @property
    def context(self) -> Mapping[str, npt.NDArray[np.uint8]]:
        """`contexts` of the first rank that has each buffer."""
        return first_of_each(self.contexts)

    def release(self) -> None:
        """Give the context slot back. Idempotent."""
        self.contexts, self.context_slot = {}, -1
        self._fetch.release_context()
