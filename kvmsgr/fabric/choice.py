"""Which libfabric provider to use, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FabricChoice:
    """Args:
    provider: Name as libfabric spells it.
    why: One sentence for logs and people.
    """

    provider: str
    why: str


def candidates(fabric: str, local: bool) -> tuple[str, ...]:
    """Providers to try, best first. `local`: every peer is on this host."""
    if fabric != "auto":
        return (fabric,)
    return ("shm", "tcp", "net") if local else ("tcp", "net")
