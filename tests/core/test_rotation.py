"""A rotation fences every loss: by itself, or by the next one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmsgr.core.rotation import (
    AllMoved,
    ClosePort,
    FenceWanted,
    LosePeers,
    MovePeers,
    OpenPort,
    PortClosed,
    PortFailed,
    PortOpened,
    Rotation,
    RotationState,
)

from .machines import EXAMPLES, events_of


def test_a_whole_life() -> None:
    rotation = Rotation("n")
    assert rotation.feed(FenceWanted()) == [OpenPort()]
    assert rotation.feed(PortOpened()) == [MovePeers()]
    assert rotation.feed(AllMoved()) == [ClosePort()]
    assert rotation.feed(PortClosed()) == []
    assert rotation.state is RotationState.idle


def test_without_a_second_endpoint_the_only_one_is_closed() -> None:
    rotation = Rotation("n")
    rotation.feed(FenceWanted())
    assert rotation.feed(PortFailed(12)) == [LosePeers(12), ClosePort()]


@given(st.lists(st.sampled_from([FenceWanted, PortOpened, AllMoved, PortClosed]), max_size=20))
def test_a_port_is_closed_that_was_opened_before_or_with_every_loss(events: list[type]) -> None:
    rotation = Rotation("n")
    unfenced = 0  # losses since the port that will be closed next was the newest
    for event in events:
        if event not in events_of(Rotation, rotation.state):
            continue
        unfenced = {FenceWanted: 1, PortClosed: 0}.get(event, unfenced)
        again = rotation.state is RotationState.closing_again
        effects = rotation.feed(EXAMPLES[event])
        if event is PortClosed and again:
            assert effects == [OpenPort()]
            unfenced = 1
    assert bool(unfenced) is (rotation.state is not RotationState.idle)
