"""One port for all links, and how it is exchanged for another one under traffic."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from kvmsgr._ext import native
from tests.native.loopback import (
    IMMEDIATE,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_ROWS,
    Node,
    Offer,
    Pair,
    add_template,
    begin,
    connect,
    retarget_link,
)
from tests.native.target import Target

SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]
ALL_ROWS = NUM_PAGES * NUM_LAYERS * PAGE_ROWS
LEASE_NS = 1_000_000_000


@pytest.fixture
def pair(provider: str) -> Iterator[Pair]:
    with Pair(provider, shared_endpoint=True, heartbeat_ns=20_000_000, lease_ns=LEASE_NS) as pair:
        yield pair


def send(pair: Pair, num_transfers: int, tag: int = 0) -> None:
    order = pair.link, pair.template, IMMEDIATE
    begin(pair.source, [((*order, tag + i, True), SCATTERED) for i in range(num_transfers)], num_bumps=0)


def rotate(node: Node) -> int:
    node.poller.rotate([[secrets.randbits(63)]])
    return node.wait(native.PORT_OPENED)[1]


def place(node: Node, link: int) -> tuple[bytes, list[tuple[int, int, int]]]:
    return node.poller.link_address(link), node.poller.link_regions(link)


def follow(pair: Pair, offer: Offer) -> None:
    """The source has been told where the target's new port is, and goes on there."""
    retarget_link(pair.source, pair.link, offer)
    pair.source.wait(native.LINK_HELD, pair.link)
    pair.wait_landed("landed_writes", pair.source.poller.stats()["posted_writes"])
    pair.source.poller.resume_link(pair.link)


def test_all_links_share_an_endpoint_and_not_a_cell(pair: Pair) -> None:
    other, other_target = connect(pair.source, pair.target)
    assert place(pair.target, pair.target_link) == place(pair.target, other_target)
    assert pair.target.poller.link_cell(pair.target_link) != pair.target.poller.link_cell(other_target)
    assert native.debug_counters()["endpoints"] == 2
    template = add_template(pair.source, other)
    pair.expect(2 * NUM_PAGES)
    both = [((link, which, IMMEDIATE, link, True), SCATTERED) for link, which in
            ((pair.link, pair.template), (other, template))]  # fmt: skip
    begin(pair.source, both, num_bumps=0)
    pair.target.wait(native.REACHED)
    pair.assert_moved(SCATTERED)


def test_a_target_moves_its_peer_under_traffic(pair: Pair) -> None:
    before = place(pair.target, pair.target_link)
    cell = pair.target.poller.link_cell(pair.target_link)
    pair.expect(60 * NUM_PAGES)
    send(pair, 30)
    for number in (2, 3):
        assert rotate(pair.target) == number
        now = place(pair.target, pair.target_link)
        assert now[0] != before[0]
        assert [region[:2] for region in now[1]] == [region[:2] for region in before[1]]
        assert now[1][0][2] != before[1][0][2]
        assert pair.target.poller.link_cell(pair.target_link) == cell
        before = now
        follow(pair, pair.target.offer(pair.target_link))
        pair.target.poller.close_port(number - 1)
        pair.target.wait(native.PORT_CLOSED, number - 1)
        send(pair, 15)
    assert pair.target.wait(native.REACHED)[2] == 60 * ALL_ROWS
    pair.assert_moved(SCATTERED)
    assert not pair.source.drain(native.LINK_FAILED)
    assert not pair.target.drain(native.LINK_FAILED, native.STRAY)


def test_a_source_moves_by_itself_under_traffic(pair: Pair) -> None:
    pair.expect(60 * NUM_PAGES)
    send(pair, 30)
    port = rotate(pair.source)
    assert sorted(pair.source.wait(native.SENT)[1] for _ in range(30)) == [*range(30)]
    retarget_link(pair.target, pair.target_link, pair.source.offer(pair.link))
    pair.target.wait(native.LINK_HELD)
    pair.target.poller.resume_link(pair.target_link)
    pair.wait_landed("landed_writes", pair.source.poller.stats()["posted_writes"])
    send(pair, 30)
    pair.source.poller.close_port(port - 1)  # none of these writes goes through it
    pair.source.wait(native.PORT_CLOSED, port - 1)
    assert pair.target.wait(native.REACHED)[2] == 60 * ALL_ROWS
    pair.assert_moved(SCATTERED)


def test_heartbeats_follow_at_once(pair: Pair) -> None:
    """Both leases last through a rotation, though the link is held for longer than one."""
    old = rotate(pair.target) - 1
    retarget_link(pair.source, pair.link, pair.target.offer(pair.target_link))
    pair.source.wait(native.LINK_HELD)
    pair.target.poller.close_port(old)
    pair.target.wait(native.PORT_CLOSED)
    closed_ns, heard = native.monotonic_ns(), pair.target.poller.stats()["beats_heard"]
    while native.monotonic_ns() < closed_ns + 2 * LEASE_NS:
        pair.target.poller.take(1)
    assert pair.target.poller.stats()["beats_heard"] > heard
    assert not pair.source.drain(native.LINK_FAILED)
    assert not pair.target.drain(native.LINK_FAILED)


def test_a_link_that_is_held_posts_nothing_until_it_is_resumed(pair: Pair) -> None:
    old = rotate(pair.target) - 1
    retarget_link(pair.source, pair.link, pair.target.offer(pair.target_link))
    pair.source.wait(native.LINK_HELD)
    pair.expect(NUM_PAGES)
    send(pair, 1)
    rounds = pair.source.poller.stats()["rounds"]
    while pair.source.poller.stats()["rounds"] < rounds + 50:
        pass
    assert pair.source.poller.stats()["posted_writes"] == 0
    pair.source.poller.resume_link(pair.link)
    pair.target.wait(native.REACHED)
    pair.target.poller.close_port(old)


@pytest.mark.slow
def test_who_is_left_behind_is_fenced_and_the_others_go_on(provider: str) -> None:
    """The lost peer is another process that keeps writing where it always did."""
    target = Node(provider, shared_endpoint=True)
    if not target.poller.fence_proven:
        target.close()
        pytest.skip("closing this provider's endpoints under traffic can crash the process")
    with Target(provider) as lost, Target(provider) as live:
        gone, _ = lost.pair_with(target)
        kept, _ = live.pair_with(target)
        lost.ask("stream", num_transfers=400, byte=1)
        target.state.open_attempt(1, 1 << 40, "")
        target.state.link_slot(5, 3, 1)
        while not target.state.attempt_rows(1):
            pass
        target.poller.close_link(gone)
        old = rotate(target) - 1
        live.ask("follow", **live.offer_by(target, kept))
        assert not target.drain(native.LINK_CLOSED), "its port is still open"
        target.poller.close_port(old)
        target.wait(native.PORT_CLOSED, old)
        target.wait(native.LINK_CLOSED, gone)
        target.memory[:] = 0
        rows = target.state.attempt_rows(1)

        target.state.open_attempt(2, 5 * ALL_ROWS, "")
        target.state.link_slot(5, 3, 2)
        assert live.ask("send", num_transfers=5, byte=2) == 5 * ALL_ROWS
        assert target.wait(native.REACHED, 2)[2] == 5 * ALL_ROWS
        assert target.state.attempt_rows(1) == rows
        assert (target.memory == 2).all(), "nothing of the lost peer is among it"
        assert not target.drain(native.LINK_FAILED)
    target.close()


def test_a_quiet_link_closes_at_once_without_a_fence(pair: Pair) -> None:
    other, _ = connect(pair.source, pair.target)
    pair.source.poller.close_link(other, fence=False)
    pair.source.wait(native.LINK_CLOSED, other)
    pair.source.poller.close_link(pair.link)
    rounds = pair.source.poller.stats()["rounds"]
    while pair.source.poller.stats()["rounds"] < rounds + 50:
        pass
    assert not pair.source.drain(native.LINK_CLOSED), "it waits for its port"
    pair.source.poller.close_port(rotate(pair.source) - 1)
    pair.source.wait(native.LINK_CLOSED, pair.link)


def test_a_link_that_has_moved_leaves_nothing_in_the_old_port(pair: Pair) -> None:
    """Where each port has a domain, its cell is registered in both; the census of every test says what is left."""
    other, _ = connect(pair.source, pair.target)
    old = rotate(pair.source) - 1
    pair.source.poller.close_link(other, fence=False)
    pair.source.wait(native.LINK_CLOSED, other)
    pair.source.poller.close_port(old)
    pair.source.wait(native.PORT_CLOSED, old)


def test_a_link_ends_with_the_port_that_its_peer_knows(pair: Pair) -> None:
    """It was moved before it was closed, but nobody was told."""
    old = rotate(pair.target) - 1
    pair.target.poller.close_link(pair.target_link)
    pair.target.poller.close_port(old)
    pair.target.wait(native.PORT_CLOSED, old)
    pair.target.wait(native.LINK_CLOSED, pair.target_link)


def test_a_link_that_was_told_of_two_ports_waits_for_the_second(pair: Pair) -> None:
    old = rotate(pair.target) - 1
    place(pair.target, pair.target_link)
    pair.target.poller.close_link(pair.target_link)
    pair.target.poller.close_port(old)
    pair.target.wait(native.PORT_CLOSED, old)
    assert not pair.target.drain(native.LINK_CLOSED)
    new = rotate(pair.target) - 1
    pair.target.poller.close_port(new)
    pair.target.wait(native.LINK_CLOSED, pair.target_link)


def test_the_only_port_can_be_closed_and_the_next_link_opens_another(pair: Pair) -> None:
    pair.target.poller.close_port(1)
    pair.target.wait(native.PORT_CLOSED, 1)
    assert pair.target.wait(native.LINK_FAILED, pair.target_link)[4] == native.FAILED_COMPLETION
    pair.target.poller.close_link(pair.target_link)
    pair.target.wait(native.LINK_CLOSED, pair.target_link)
    pair.source.poller.close_link(pair.link, fence=False)
    pair.source.wait(native.LINK_CLOSED, pair.link)
    pair.reconnect()
    pair.expect(NUM_PAGES)
    send(pair, 1)
    pair.target.wait(native.REACHED)


def test_a_port_that_cannot_be_opened_changes_nothing(pair: Pair, provider: str) -> None:
    key = pair.target.poller.link_regions(pair.target_link)[0][2]
    if provider == "shm":
        pytest.skip("each port has a domain of its own there: no key is taken")
    pair.target.poller.rotate([[key]])
    assert pair.target.wait(native.PORT_FAILED)[4] == native.FAILED_REGISTER
    pair.expect(NUM_PAGES)
    send(pair, 1)
    pair.target.wait(native.REACHED)
    rotate(pair.target)


def test_ports_are_opened_on_every_interface_or_on_none(provider: str) -> None:
    """The interfaces have a number together, though the second gets its first port later."""
    node = Node(provider, shared_endpoint=True, nics=["127.0.0.1", "127.0.0.1"])
    node.open_link()
    with pytest.raises(ValueError, match="1 lists of keys for 2 interfaces"):
        node.poller.rotate([[1]])
    with pytest.raises(ValueError, match="2 keys for 1 regions of interface 1"):
        node.poller.rotate([[1], [2, 3]])
    node.poller.rotate([[1], [2]])
    assert node.wait(native.PORT_OPENED)[1] == 2
    node.poller.close_port()
    node.wait(native.PORT_CLOSED, 1)
    second = node.open_link(nic=1)
    assert native.debug_counters()["endpoints"] == 2, "the link on the second interface has found its port"
    if provider != "shm":  # where each port has a domain of its own no key is taken
        key = node.poller.link_regions(second)[0][2]
        node.poller.rotate([[3], [key]])
        assert node.wait(native.PORT_FAILED)[4] == native.FAILED_REGISTER
        assert native.debug_counters()["endpoints"] == 2
    node.poller.rotate([[4], [5]])
    node.wait(native.PORT_OPENED)
    node.poller.close_port()
    node.wait(native.PORT_CLOSED)
    node.poller.close_port()
    node.wait(native.PORT_CLOSED)
    assert not node.drain(native.PORT_CLOSED), "once for all interfaces"
    assert native.debug_counters()["endpoints"] == 0
    node.close()


def test_calls_that_make_no_sense_are_refused(pair: Pair) -> None:
    node = Node(pair.source.poller.provider)
    with pytest.raises(RuntimeError, match="a port of its own"):
        node.poller.rotate([[1]])
    node.close()
    poller = pair.target.poller
    with pytest.raises(ValueError, match="2 keys for 1 regions"):
        poller.rotate([[1, 2]])
    with pytest.raises(KeyError, match="port 2 is not open"):
        poller.close_port(2)
    rotate(pair.target)
    with pytest.raises(RuntimeError, match="port 1 is still open"):
        poller.rotate([[3]])
    with pytest.raises(KeyError, match="the one to close is port 1"):
        poller.close_port(2)
    address, [(base, num_bytes, key)], beat = pair.target.offer(pair.target_link)
    for regions in ([(base, num_bytes - 1, key)], [(base + 1, num_bytes, key)], []):
        with pytest.raises(ValueError, match="of the peer"):
            retarget_link(pair.source, pair.link, (address, regions, beat))
    link = pair.source.open_link()
    with pytest.raises(RuntimeError, match="not connected"):
        retarget_link(pair.source, link, (address, [(base, num_bytes, key)], beat))
    with pytest.raises(KeyError, match="link 7 is not open"):
        pair.source.poller.resume_link(7)
