"""Links: how they open, fail and close, and what they leave behind."""

from __future__ import annotations

import secrets

import pytest

from kvmsgr._ext import native
from tests.native.loopback import NUM_PAGES, Node, Pair, connect

SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]


def test_every_listed_provider_that_is_used_passes_the_self_test(provider: str) -> None:
    node = Node(provider)
    node.poller.self_test()
    assert node.poller.provider == provider
    assert node.poller.fence_proven == (provider != "tcp;ofi_rxm")
    node.close()


def test_the_self_test_comes_before_the_thread(provider: str) -> None:
    node = Node(provider)
    link = node.open_link()
    with pytest.raises(RuntimeError, match="before the first link"):
        node.poller.self_test()
    with pytest.raises(RuntimeError, match="before the first link"):
        node.poller.register(node.memory.ctypes.data, 8)
    node.poller.close_link(link)
    node.wait(native.LINK_CLOSED, link)
    node.close()


@pytest.mark.parametrize("refused", ["sockets", "udp;ofi_rxd", "no-such-provider"])
def test_a_provider_that_will_not_do_is_refused_by_name(refused: str) -> None:
    assert refused not in native.providers()
    state = native.StateFile(None, incarnation=1)
    with pytest.raises(native.NativeError, match=refused) as raised:
        native.Poller(refused, state)
    assert (raised.value.call, raised.value.provider) == ("fi_getinfo", refused)
    state.close()


def test_closing_stops_what_waits_and_reports_it_first(pair: Pair) -> None:
    pair.begin([(0, 0)], tag=1)
    pair.begin([(1, 1)], tag=2)
    pair.source.poller.close_link(pair.link)
    pair.source.wait(native.LINK_CLOSED, pair.link)
    assert [record[:3] for record in pair.source.seen] == [(native.STOPPED, 1, 0), (native.STOPPED, 2, 0)]
    with pytest.raises(ValueError, match="has no template"):
        pair.begin([(2, 2)])
    with pytest.raises(KeyError, match=f"link {pair.link} is not open"):
        pair.source.poller.close_link(pair.link)


def test_a_closed_link_makes_room_for_another(pair: Pair) -> None:
    for round_index in range(3):
        pair.source.poller.close_link(pair.link)
        pair.target.poller.close_link(pair.target_link)
        pair.source.wait(native.LINK_CLOSED, pair.link)
        pair.target.wait(native.LINK_CLOSED, pair.target_link)
        before = pair.link
        pair.reconnect()
        assert pair.link != before
        pair.expect(1)
        pair.run_step(pair.begin([(round_index, round_index)]))
        pair.target.wait(native.REACHED)
        pair.assert_moved([(round_index, round_index)])


def test_other_links_live_on_when_one_closes(pair: Pair) -> None:
    doomed, doomed_target = connect(pair.source, pair.target)
    pair.expect(2 * NUM_PAGES)
    pair.begin(SCATTERED, tag=1, ready=True, num_bumps=0)
    pair.source.poller.close_link(doomed)
    pair.target.poller.close_link(doomed_target)
    pair.begin(SCATTERED, tag=2, ready=True, num_bumps=0)
    pair.target.wait(native.REACHED)
    pair.assert_moved(SCATTERED)


def test_keys_that_are_taken_fail_the_link(provider: str) -> None:
    node = Node(provider)
    key = secrets.randbits(63)
    link = node.poller.open_link([key, key])
    assert node.wait(native.LINK_FAILED, link)[4] == native.FAILED_REGISTER
    node.poller.close_link(link)
    node.wait(native.LINK_CLOSED, link)
    node.close()


def test_calls_that_come_too_early_or_too_often_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="1 keys for 1 regions and a cell"):
        pair.source.poller.open_link([1])
    with pytest.raises(RuntimeError, match="connected already"):
        pair.source.poller.connect_link(pair.link, [b""], [], 1, [])
    link = pair.source.open_link()
    with pytest.raises(ValueError, match="window of 0"):
        pair.source.poller.connect_link(link, [b"x"], [], 0, [])
    with pytest.raises(ValueError, match="heartbeats already carries rows"):
        pair.source.poller.connect_link(link, [b"x"], [], 1, [(0, 0, 0, 1)])
    with pytest.raises(ValueError, match="no targets"):
        pair.source.poller.connect_link(link, [], [], 1, [])
    with pytest.raises(ValueError, match="region 0 of the peer is reached through target 1 of 1"):
        pair.source.poller.connect_link(link, [b"x"], [(0, 8, 1, 1)], 1, [])
    with pytest.raises(ValueError, match="heartbeats 0 go to target 1 of 1"):
        pair.source.poller.connect_link(link, [b"x"], [], 1, [(1, 0, 0, 0)])
    with pytest.raises(KeyError, match="link 7 is not open"):
        pair.source.poller.link_address(7)


def test_closing_twice_and_calling_afterwards(pair: Pair) -> None:
    ticket = pair.begin([(0, 0)], tag=6)
    with pytest.raises(RuntimeError, match="close them first"):
        pair.source.state.close()
    pair.source.poller.close()
    pair.source.poller.close()
    assert pair.source.wait(native.STOPPED, 6)[2] == 0
    assert pair.source.wait(native.LINK_CLOSED, pair.link)
    for call in (
        lambda: pair.source.poller.abandon(0, ticket),
        lambda: pair.begin([(0, 0)]),
        lambda: pair.source.poller.open_link([1, 2]),
    ):
        with pytest.raises(RuntimeError, match="the poller is closed"):
            call()


def test_a_poller_nobody_closed_closes_itself(provider: str) -> None:
    node = Node(provider)
    node.open_link()
    assert native.debug_counters()["endpoints"] == 1
    del node
    assert native.debug_counters()["endpoints"] == 0
