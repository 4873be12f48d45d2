"""What this messenger calls itself."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def software() -> str:
    """Name and version, for logs and for people who look at it."""
    try:
        return f"kvmsgr {version('kvmsgr')}"
    except PackageNotFoundError:  # it runs from a folder that was never installed
        return "kvmsgr"
