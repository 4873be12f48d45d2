"""What the poller tells: the kinds of its records, and their numbers in words."""

from __future__ import annotations

from kvmsgr._ext.native import (
    DEADLINE,
    FEWER,
    LINK_CLOSED,
    LINK_FAILED,
    LINK_OPENED,
    OVERFLOW,
    REACHED,
    SENT,
    STEP_ENDED,
    STEP_FAULT,
    STOPPED,
    STRAY,
)

__all__ = [
    "LINK_CLOSED",
    "LINK_FAILED",
    "LINK_OPENED",
    "OVERFLOW",
    "REACHED",
    "SENT",
    "STEP_ENDED",
    "STEP_FAULT",
    "STOPPED",
    "STRAY",
    "step_fault",
]


def step_fault(ticket: int, extra: int, num_bumps: int) -> str:
    """Say in words what went wrong with a step that should have shown `num_bumps` signals."""
    seen, kind = extra >> 32, extra & 0xFFFFFFFF
    if kind == FEWER:
        return f"step {ticket} was over after {seen} of {num_bumps} layer signals: signal {seen + 1} never came"
    if kind == DEADLINE:
        return f"step {ticket} showed {seen} of {num_bumps} layer signals when its time ran out"
    return f"step {ticket} showed {seen} layer signals, {num_bumps} were announced: more layers ran than the cache has"
