"""What the poller tells: the kinds of its records, and their numbers in words."""

from __future__ import annotations

import os

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
    "link_failure",
    "step_fault",
]

_LINK_CALLS = {
    FAILED_OPEN: "opening an endpoint",
    FAILED_REGISTER: "registering memory",
    FAILED_CONNECT: "connecting",
    FAILED_POST: "posting a write",
    FAILED_COMPLETION: "a write",
    FAILED_TIMEOUT: "waiting for a write to go on",
    FAILED_CLOSE: "closing an endpoint",
    FAILED_LEASE: "waiting for a heartbeat of the peer",
    FAILED_STUCK: "a call that the peer blocks for good, by a lock that shm shares with it,",
}


def link_failure(errno: int, call: int) -> str:
    """Say in words what failed on a link."""
    return f"{_LINK_CALLS[call]} failed: {os.strerror(errno)} (errno {errno})"


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
