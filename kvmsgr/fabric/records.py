"""What the poller tells: the kinds of its records, and their numbers in words."""

from __future__ import annotations

from dataclasses import dataclass

from kvmsgr._ext.native import (
    DEADLINE,
    FAILED_CLOSE,
    FAILED_COMPLETION,
    FAILED_CONNECT,
    FAILED_LEASE,
    FAILED_OPEN,
    FAILED_POST,
    FAILED_REGISTER,
    FAILED_STUCK,
    FAILED_TIMEOUT,
    FEWER,
    JOIN_LOST,
    LINK_CLOSED,
    LINK_FAILED,
    LINK_HELD,
    LINK_OPENED,
    OVERFLOW,
    PORT_CLOSED,
    PORT_FAILED,
    PORT_OPENED,
    REACHED,
    SENT,
    SLOT_REACHED,
    STEP_ENDED,
    STEP_FAULT,
    STOPPED,
    STRAY,
    error_text,
)

__all__ = [
    "JOIN_LOST",
    "LINK_CLOSED",
    "LINK_FAILED",
    "LINK_HELD",
    "LINK_OPENED",
    "OVERFLOW",
    "PORT_CLOSED",
    "PORT_FAILED",
    "PORT_OPENED",
    "REACHED",
    "SENT",
    "SLOT_REACHED",
    "STEP_ENDED",
    "STEP_FAULT",
    "STOPPED",
    "STRAY",
    "LinkFailure",
    "error_text",
    "join_lost",
    "link_failure",
    "step_fault",
]

_SILENCES = {
    FAILED_LEASE: "no heartbeat has landed for the time of a lease",
    FAILED_STUCK: "it stopped or died holding a lock in memory that both sides share",
}
_LINK_CALLS = {
    FAILED_OPEN: "opening an endpoint",
    FAILED_REGISTER: "registering memory",
    FAILED_CONNECT: "connecting",
    FAILED_POST: "posting a write",
    FAILED_COMPLETION: "a write",
    FAILED_TIMEOUT: "waiting for a write to go on",
    FAILED_CLOSE: "closing an endpoint",
}


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """What failed on a link.

    Args:
        errno: libfabric's code.
        silent: The peer does not run any more, or not as far as it could be heard.
        text: The same in words.
    """

    errno: int
    silent: bool
    text: str


def link_failure(errno: int, call: int) -> LinkFailure:
    """Read a LINK_FAILED record."""
    if call in _SILENCES:
        return LinkFailure(errno, True, _SILENCES[call])
    return LinkFailure(errno, False, f"{_LINK_CALLS[call]} failed: {error_text(errno)} (errno {errno})")


def step_fault(ticket: int, extra: int, num_bumps: int) -> str:
    """Say in words what went wrong with a step that should have shown `num_bumps` signals."""
    seen, kind = extra >> 32, extra & 0xFFFFFFFF
    if kind == FEWER:
        return f"step {ticket} was over after {seen} of {num_bumps} layer signals: signal {seen + 1} never came"
    if kind == DEADLINE:
        return f"step {ticket} showed {seen} of {num_bumps} layer signals when its time ran out"
    return (
        f"step {ticket} showed {seen} layer signals, {num_bumps} were announced: more layers ran than the cache has, "
        "or a bump for context was given where Step.signals_context is False"
    )


def join_lost(ticket: int) -> str:
    """Say in words what a JOIN_LOST record says of the step that was to be joined."""
    return (
        f"step {ticket}, whose layers its pages were to go with, is over and was not complete, or is so long ago that "
        "this is not known any more, or signals fewer layers than the pages have"
    )
