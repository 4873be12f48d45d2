"""Layer counters. The host one is native: publishing a bump takes no lock and a few nanoseconds."""

from __future__ import annotations

from kvmsgr._ext.native import LayerCounter
from kvmsgr.errors import LocalProtocolError

__all__ = ["LayerCounter", "Signal"]


class Signal:
    """What a forward pass does to its layer counter, in this process; one that runs in another process does the same
    with a `LayerCounter` attached there, and the ticket.

    Ticket 0 stands for a forward that moves nothing (decode only, warm-up): same calls, nothing is published.
    """

    __slots__ = ("_counter", "_due", "ticket")

    def __init__(self, counter: LayerCounter, ticket: int, due: int = 0) -> None:
        self._counter = counter
        self._due = due  # bumps that the step was announced with
        self.ticket = ticket

    def start(self) -> None:
        """Store the ticket. Call it on the engine's stream right before *every* forward that may bump.

        Raises:
            LocalProtocolError: This forward has started before: its bumps would be counted from 0 again.
        """
        if self.ticket and self.started:
            raise LocalProtocolError(
                f"step {self.ticket} was started before and has shown {self.num_bumps} of {self._due} layer signals; a "
                "forward starts once, and another one is a step of its own: begin_step"
            )
        self._counter.start(self.ticket)

    def bump(self) -> None:
        """Say that one more layer is final: once after each layer's attention output projection, and once more after
        the context buffers were written, where `Step.signals_context` says so.

        Raises:
            LocalProtocolError: The forward was not started, or another one has started since: the bump would count for
                that one. Or it is one more than was announced: an earlier one has released a layer that was not final.
        """
        if self._counter.ticket != self.ticket:
            raise LocalProtocolError(
                f"a bump of step {self.ticket} while the layer counter is at step {self._counter.ticket}: "
                "start() comes first, and all bumps before the next start()"
            )
        self._counter.bump()
        if self.ticket and self._counter.bumps > self._due:
            raise LocalProtocolError(
                f"step {self.ticket} has shown {self._counter.bumps} layer signals, {self._due} were announced: "
                "a layer was bumped twice, and pages may have gone before they were final, or a bump for context was "
                "given where Step.signals_context is False. Fail its requests"
            )

    @property
    def started(self) -> bool:
        """Whether the forward has started, wherever it runs."""
        return self._counter.bumps_of(self.ticket) is not None

    @property
    def num_bumps(self) -> int:
        """Bumps since it started; 0 before, and when its place in the ring has been given to another."""
        return self._counter.bumps_of(self.ticket) or 0

    @property
    def address(self) -> int:
        """Address of the native counter, for a forward pass that runs outside Python."""
        return self._counter.address
