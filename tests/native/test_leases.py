"""Heartbeats and leases over real providers, and pollers that stand still."""

from __future__ import annotations

import errno
import signal

import pytest

from kvmsgr._ext import native
from tests.native.loopback import (
    GENERATION,
    IMMEDIATE,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_ROWS,
    SLOT,
    Node,
    Pair,
    add_template,
    begin,
    connect,
    connect_link,
)
from tests.native.target import Target

HEARTBEAT_NS, LEASE_NS = 50_000_000, 500_000_000
SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]
ALL_ROWS = NUM_PAGES * NUM_LAYERS * PAGE_ROWS


def short_lived(provider: str) -> Node:
    return Node(provider, heartbeat_ns=HEARTBEAT_NS, lease_ns=LEASE_NS)


def wait_for(node: Node, stat: str, num: int) -> None:
    limit_ns = native.monotonic_ns() + 10**10
    while (stats := node.poller.stats())[stat] < num:
        assert native.monotonic_ns() < limit_ns, stats


def test_an_idle_pair_lives_on(provider: str) -> None:
    with Pair(provider, heartbeat_ns=HEARTBEAT_NS, lease_ns=LEASE_NS) as pair:
        for node in (pair.source, pair.target):
            wait_for(node, "beats_heard", 2 * LEASE_NS // HEARTBEAT_NS)
            assert not node.drain(native.LINK_FAILED, native.STRAY)
            assert node.poller.stats()["landed_writes"] == 0, "heartbeats are counted by themselves"
        pair.expect(1)
        pair.begin([(0, 0)], ready=True, num_bumps=0)
        assert pair.target.wait(native.REACHED)[2] == PAGE_ROWS * NUM_LAYERS


def test_a_peer_that_says_nothing_is_lost(provider: str) -> None:
    source, target = short_lived(provider), Node(provider)
    link, silent = source.open_link(), target.open_link()
    connected_ns = native.monotonic_ns()
    connect_link(source, link, target.offer(silent))
    _, _, code, failed_ns, what = source.wait(native.LINK_FAILED, link)
    assert (code, what) == (errno.ETIMEDOUT, native.FAILED_LEASE)
    assert LEASE_NS <= failed_ns - connected_ns < 10 * LEASE_NS
    source.close()
    target.close()


def test_a_held_poller_neither_sees_nor_judges(provider: str) -> None:
    source, target = Node(provider), short_lived(provider)
    link, target_link = connect(source, target)
    template = add_template(source, link)
    order = (link, template, IMMEDIATE, 1, True), [(0, 0)]
    begin(source, [order], num_bumps=0)
    wait_for(target, "landed_writes", NUM_LAYERS)  # the connection is up
    target.state.open_attempt(1, PAGE_ROWS * NUM_LAYERS, "")
    target.state.link_slot(SLOT, GENERATION, 1)

    target.poller.hold(True)
    held_ns, heard = native.monotonic_ns(), target.poller.stats()["beats_heard"]
    begin(source, [order], num_bumps=0)
    wait_for(source, "posted_writes", 2 * NUM_LAYERS)
    while native.monotonic_ns() < held_ns + 2 * LEASE_NS:
        stats = target.poller.stats()
        assert (stats["landed_writes"], stats["beats_heard"]) == (NUM_LAYERS, heard)
    assert not target.drain(native.LINK_FAILED), "its lease would be over"
    target.poller.hold(False)
    target.wait(native.REACHED)
    target.poller.close_link(target_link)
    target.wait(native.LINK_CLOSED)
    assert not target.drain(native.LINK_FAILED)
    source.close()
    target.close()


def test_a_held_poller_closes_its_links(provider: str) -> None:
    node, peer = Node(provider), Node(provider)
    link = node.open_link()
    connect_link(node, link, peer.offer(peer.open_link()))
    node.poller.hold(True)
    node.poller.close_link(link)
    node.wait(native.LINK_CLOSED, link)
    node.close()
    peer.close()


@pytest.mark.slow
def test_a_process_that_stood_still_gives_up_its_peers(provider: str) -> None:
    source = short_lived(provider)
    with Target(provider, heartbeat_ns=HEARTBEAT_NS, lease_ns=LEASE_NS) as target:
        target.pair_with(source)
        wait_for(source, "beats_heard", 2)
        target.process.send_signal(signal.SIGSTOP)
        assert source.wait(native.LINK_FAILED)[4] == native.FAILED_LEASE
        sent = source.poller.stats()["beats_sent"]
        target.process.send_signal(signal.SIGCONT)
        assert target.ask("failed") == native.FAILED_LEASE, "though our heartbeats were waiting for it"
        assert source.poller.stats()["beats_sent"] == sent, "nothing is sent on a failed link"
    source.close()


@pytest.mark.slow
def test_a_killed_peer_is_lost_within_the_lease(provider: str) -> None:
    """shm reports nothing of a dead peer."""
    source = short_lived(provider)
    with Target(provider, heartbeat_ns=HEARTBEAT_NS, lease_ns=LEASE_NS) as target:
        link, template = target.pair_with(source)
        target.ask("expect", num_rows=1 << 40)
        begin(source, [((link, template, IMMEDIATE, tag, True), SCATTERED) for tag in range(100)], num_bumps=0)
        wait_for(source, "beats_heard", 2)
        target.process.kill()
        killed_ns = native.monotonic_ns()
        assert source.wait(native.LINK_FAILED)[3] - killed_ns < 10 * LEASE_NS
        source.poller.close_link(link)
        source.wait(native.LINK_CLOSED, link)
    source.close()


def test_times_that_make_no_sense_are_refused() -> None:
    state = native.StateFile(None)
    for heartbeat_ns, lease_ns in ((0, 10**9), (5 * 10**8, 9 * 10**8), (10**6, 3 * 10**6)):
        with pytest.raises(ValueError, match="a lease of"):
            native.Poller("net", state, heartbeat_ns=heartbeat_ns, lease_ns=lease_ns)
    state.close()
