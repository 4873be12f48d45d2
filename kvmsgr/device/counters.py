"""Layer counters. The host one is native: publishing a bump takes no lock and a few nanoseconds."""

from __future__ import annotations

from kvmsgr._ext.native import LayerCounter

__all__ = ["LayerCounter", "Signal"]


class Signal:
    """What a forward pass does to its layer counter.

    Ticket 0 stands for a forward that moves nothing (decode only, warm-up): same calls, nothing is published.
    """

    __slots__ = ("_counter", "ticket")

    def __init__(self, counter: LayerCounter, ticket: int) -> None:
        self._counter = counter
        self.ticket = ticket

    def start(self) -> None:
        """Store the ticket. Call it on the engine's stream right before *every* forward that may bump."""
        self._counter.start(self.ticket)

    def bump(self) -> None:
        """Say that one more layer is final: once after each layer's attention output projection, and once more after
        the context buffers were written, when a chunk of the step is a request's last and has context."""
        self._counter.bump()

    @property
    def address(self) -> int:
        """Address of the native counter, for a forward pass that runs outside Python."""
        return self._counter.address
