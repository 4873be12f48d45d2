"""What a fetch resolves to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from kvmsgr.errors import ContextReleasedError

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
        context_slot: The slot of its context, in every context buffer; -1: none came, or it was released.
    """

    def __init__(self, num_tokens: int, rows: int, contexts: Contexts, context_slot: int, fetch: Fetch) -> None:
        self.num_tokens = num_tokens
        self.rows = rows
        self.context_slot = context_slot
        self._contexts: Contexts | None = contexts  # None: released
        self._fetch = fetch

    @property
    def contexts(self) -> Contexts:
        """For each rank that was asked for, the name of each of its context buffers to its bytes, shape (slot bytes,).
        Empty when none was wanted. They are views of the slot: another request's bytes stand there after `release`, so
        keep none of them beyond it.

        Raises:
            ContextReleasedError: After `release`.
        """
        if self._contexts is None:
            raise ContextReleasedError(self._fetch.request_id, "release() was called; copy what you need before that")
        return self._contexts

    @property
    def context(self) -> Mapping[str, npt.NDArray[np.uint8]]:
        """`contexts` of the first rank that has each buffer."""
        return first_of_each(self.contexts)

    def release(self) -> None:
        """Give the context slot back. Idempotent."""
        self._contexts, self.context_slot = None, -1
        self._fetch.release_context()
