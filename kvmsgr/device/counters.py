"""Layer counters. The host one is native: publishing a bump takes no lock and a few nanoseconds."""

from __future__ import annotations

from kvmsgr._ext.native import LayerCounter
from kvmsgr.errors import LocalProtocolError

__all__ = ["LayerCounter", "Signal"]


class Signal:
    """What a forward pass does to its layer counter.

    Ticket 0 stands for a forward that moves nothing (decode only, warm-up): same calls, nothing is published.
    """

    __slots__ = ("_counter", "started", "ticket")

    def __init__(self, counter: LayerCounter, ticket: int) -> None:
        self._counter = counter
        self.ticket = ticket
        self.started = False

    def start(self) -> None:
        """Store the ticket. Call it on the engine's stream right before *every* forward that may bump."""
        self.started = True
        self._counter.start(self.ticket)

    def bump(self) -> None:
        """Say that one more layer is final: once after each layer's attention output projection, and once more after
        the context buffers were written, where `Step.signals_context` says so.

        Raises:
            LocalProtocolError: The forward was not started, or another one has started since: the bump would count for
                that one.
        """
        if self._counter.ticket != self.ticket:
            raise LocalProtocolError(
                f"a bump of step {self.ticket} while the layer counter is at step {self._counter.ticket}: "
                "start() comes first, and all bumps before the next start()"
            )
        self._counter.bump()

    @property
    def num_bumps(self) -> int:
        """Bumps since `start`; 0 before it, and when another forward has started on the counter since."""
        return self._counter.bumps if self.started and self._counter.ticket == self.ticket else 0

    @property
    def address(self) -> int:
        """Address of the native counter, for a forward pass that runs outside Python."""
        return self._counter.address
