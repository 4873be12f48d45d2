"""Reason codes: why a request or a connection ended. Each means the same on both sides."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why something ended. The value is what travels."""

    cancelled = "cancelled"
    """The engine that asked no longer wants the answer."""
    refused = "refused"
    """The prefiller will not serve the request."""
    busy = "busy"
    """The prefiller cannot serve it now; another time or another peer may do."""
    peer_lost = "peer_lost"
    """The connection ended while the request was alive."""
    timeout = "timeout"
    """The time allowed ran out."""
    short_count = "short_count"
    """All writes were posted, and fewer rows landed than expected."""
    overflow = "overflow"
    """More rows landed than expected."""
    fabric = "fabric"
    """A write or its completion failed."""
    layout_mismatch = "layout_mismatch"
    """The two caches do not fit together."""
    identity_mismatch = "identity_mismatch"
    """The two sides serve different models, or play roles that do not meet."""
    step_fault = "step_fault"
    """A forward pass ran fewer or more layers than announced, or did not end in time."""
    engine = "engine"
    """The engine on one side gave up."""
    rank_lost = "rank_lost"
    """A process of the engine on one side, which holds a rank's memory, has died."""
    protocol = "protocol"
    """A control message broke the rules."""
    closed = "closed"
    """The messenger is closing."""
    duplicate = "duplicate"
    """A request of this name is alive already."""
    unknown_request = "unknown_request"
    """There is no request of this name. It says nothing about writes still under way."""
