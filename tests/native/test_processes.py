"""Two processes: what only shows when the peer is another one."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from kvmsgr._ext import native
from tests.native.loopback import IMMEDIATE, NUM_LAYERS, NUM_PAGES, PAGE_ROWS, Node, begin
from tests.native.target import Target

SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]
ALL_ROWS = NUM_PAGES * NUM_LAYERS * PAGE_ROWS
NUM_TRANSFERS = 200

pytestmark = pytest.mark.slow


@pytest.fixture
def target(provider: str) -> Iterator[Target]:
    with Target(provider) as target:
        yield target


@pytest.fixture
def source(provider: str) -> Iterator[Node]:
    node = Node(provider, op_timeout_ns=500_000_000)
    node.memory[:] = 1
    yield node
    node.close()


def send(source: Node, link: int, template: int) -> None:
    """NUM_TRANSFERS times everything, at once."""
    transfers = [((link, template, IMMEDIATE, tag, True), SCATTERED) for tag in range(NUM_TRANSFERS)]
    begin(source, transfers, num_bumps=0)


def test_nothing_lands_after_the_fence(source: Node, target: Target) -> None:
    if not source.poller.fence_proven:
        pytest.skip("closing this provider's endpoints under traffic can crash the process")
    link, template = target.pair_with(source)
    target.ask("expect", num_rows=NUM_TRANSFERS * ALL_ROWS)
    send(source, link, template)
    rows = target.ask("close_link")
    assert 0 < rows < NUM_TRANSFERS * ALL_ROWS
    source.wait(native.LINK_FAILED, link)
    assert target.ask("look") == [rows, False]
    source.poller.close_link(link)
    source.wait(native.LINK_CLOSED, link)
    ended = [record[1] for record in source.seen if record[0] in (native.SENT, native.STOPPED)]
    assert sorted(ended) == list(range(NUM_TRANSFERS)), "every transfer ends once"
    assert target.ask("look") == [rows, False]


def test_a_peer_that_was_killed_fails_the_link_in_time(source: Node, target: Target) -> None:
    link, template = target.pair_with(source)
    target.ask("expect", num_rows=ALL_ROWS)
    begin(source, [((link, template, IMMEDIATE, 500, True), SCATTERED)], num_bumps=0)
    assert target.ask("reached") == ALL_ROWS
    target.process.kill()
    target.process.wait(timeout=10)

    send(source, link, template)
    _, _, code, _, what = source.wait(native.LINK_FAILED, link)
    assert what in (native.FAILED_TIMEOUT, native.FAILED_COMPLETION, native.FAILED_POST)
    assert what != native.FAILED_TIMEOUT or code == errno.ETIMEDOUT
    begin(source, [((link, template, IMMEDIATE, 501, True), [(0, 0)])], num_bumps=0)
    assert source.wait(native.STOPPED, 501)[2] == 0
    source.poller.close_link(link)
    source.wait(native.LINK_CLOSED, link)
    assert source.wait(native.SENT)[1] == 500
    stopped = [record[1] for record in source.seen if record[0] == native.STOPPED]
    assert sorted(stopped) == list(range(NUM_TRANSFERS))
    assert not [record for record in source.seen if record[0] == native.LINK_FAILED], "a link fails once"
