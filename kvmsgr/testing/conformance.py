"""What every fabric must do, as tests.

    class TestMine(Conformance):
        @pytest.fixture
        def fabric(self) -> FabricUnderTest:
            return MyFabric()

A case that a fabric cannot run is skipped by name: those that close under traffic where `fence_proven` is False. What
takes long is marked `slow`.
"""

from __future__ import annotations

from .counting import Counting
from .fences import Fences
from .flow import Flow
from .holding import Holding
from .interfaces import Interfaces
from .joining import Joining
from .rotations import Rotations
from .spoiling import Spoiling

__all__ = ["Conformance"]


class Conformance(Counting, Flow, Joining, Holding, Fences, Interfaces, Rotations, Spoiling):
    """All of it: what lands and is counted, how it flows, what joins a step and what a short one holds, several
    interfaces, how it ends, and what switches for faults do."""
