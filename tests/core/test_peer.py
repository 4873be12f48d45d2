"""An epoch comes up in either order of the two sides, and ends once, endpoint last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmsgr.core.peer import (
    AnnounceLive,
    AnnounceLost,
    Attached,
    CloseLinks,
    ConnectLinks,
    Disconnect,
    Forget,
    Greeted,
    LinksClosed,
    LinksOpened,
    Lost,
    OpenLinks,
    Peer,
    PeerState,
    SendAttach,
)

from .machines import EXAMPLES, FAILURE, events_of


def test_ours_first() -> None:
    peer = Peer("p")
    assert peer.feed(Greeted()) == [OpenLinks()]
    assert peer.feed(LinksOpened()) == [SendAttach()]
    assert peer.feed(Attached()) == [ConnectLinks(), AnnounceLive()]


def test_theirs_first() -> None:
    peer = Peer("p")
    peer.feed(Greeted())
    assert peer.feed(Attached()) == []
    assert peer.feed(LinksOpened()) == [SendAttach(), ConnectLinks(), AnnounceLive()]


def test_requests_fail_before_the_endpoint_is_closed() -> None:
    peer = Peer("p")
    for event in (Greeted(), LinksOpened(), Attached()):
        peer.feed(event)
    assert peer.feed(Lost(FAILURE)) == [AnnounceLost(FAILURE), Disconnect(FAILURE), CloseLinks()]
    assert peer.feed(Lost(FAILURE)) == []
    assert peer.feed(LinksClosed()) == [Forget()]


def test_an_endpoint_that_opens_after_the_end_is_closed_all_the_same() -> None:
    peer = Peer("p")
    peer.feed(Greeted())
    assert CloseLinks() in peer.feed(Lost(FAILURE))
    assert peer.feed(LinksOpened()) == []
    assert peer.feed(LinksClosed()) == [Forget()]


def test_a_peer_that_never_greeted_has_nothing_to_close() -> None:
    peer = Peer("p")
    assert peer.feed(Lost(FAILURE)) == [AnnounceLost(FAILURE), Disconnect(FAILURE), Forget()]


@given(st.lists(st.sampled_from([kind for kind in EXAMPLES if kind.__module__ == Peer.__module__]), max_size=12))
def test_in_any_order_it_is_lost_once_and_forgotten_last(events: list[type]) -> None:
    peer = Peer("p")
    seen: list[object] = []
    for event in events:
        if event in events_of(Peer, peer.state):
            seen += peer.feed(EXAMPLES[event])
    assert seen.count(AnnounceLive()) <= 1
    assert seen.count(AnnounceLost(FAILURE)) <= 1
    assert seen.count(CloseLinks()) <= seen.count(OpenLinks()) <= 1
    if peer.state is PeerState.gone:
        assert seen[-1] == Forget()
        assert seen.count(CloseLinks()) == seen.count(OpenLinks())
