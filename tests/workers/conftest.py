"""Every test here leaves no shared memory mapped, and no descriptor of one or of a process open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .leftovers import nothing_left


@pytest.fixture(autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    """Sockets that are left open are found by their ResourceWarning."""
    with nothing_left():
        yield
