"""Reading the state file of a messenger, alive or stopped."""

from __future__ import annotations

from kvmsgr.fabric.libfabric import StateView


def landed_rows(path: str, request_id: str) -> int | None:
    """Rows of a fetch that have landed so far; None when no such request is alive there."""
    with StateView(path) as state:
        return state.landed_rows(request_id)
