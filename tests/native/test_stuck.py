"""A shm peer that is stopped or killed while it holds a lock in memory that it shares with us."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmsgr._ext import native
from tests.native.loopback import IMMEDIATE, NUM_LAYERS, NUM_PAGES, PAGE_ROWS, Node, begin
from tests.native.target import Target

SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]
ALL_ROWS = NUM_PAGES * NUM_LAYERS * PAGE_ROWS
LOCK_OFFSET = 24  # of the spin lock in libfabric 1.17's `struct smr_region`, at the start of an endpoint's segment
LOCKED = 0  # glibc's pthread_spinlock_t on x86-64; 1 is free

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("shm" not in native.providers(), reason="libfabric offers no shm here"),
]
needs_known_lock = pytest.mark.skipif(
    native.libfabric_version() != (1, 17) or os.uname().machine != "x86_64",
    reason="where the lock lies is known of libfabric 1.17 on x86-64",
)


@pytest.fixture
def source() -> Iterator[Node]:
    node = Node("shm")
    node.memory[:] = 1
    yield node
    node.close()


def segment_of(address: bytes) -> Path:
    """The file of a shm endpoint's memory."""
    return Path("/dev/shm") / address.decode().rstrip("\0").removeprefix("fi_shm://")


def take_lock_for_good(segment: Path) -> None:
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        lock = np.frombuffer(memory, dtype=np.int32)[LOCK_OFFSET // 4 :]
        assert lock[0] in (0, 1), "this is no lock"
        lock[0] = LOCKED
        del lock


def send(source: Node, link: int, template: int, num_transfers: int, tag: int = 0) -> None:
    transfers = [((link, template, IMMEDIATE, tag + index, True), SCATTERED) for index in range(num_transfers)]
    begin(source, transfers, num_bumps=0)


@needs_known_lock
@pytest.mark.parametrize(
    ("whose", "failures"),
    [
        ("theirs", {(errno.EDEADLK, native.FAILED_STUCK)}),
        # Reading our queue only tries the lock; but the peer cannot write to us any more, and so falls silent.
        ("ours", {(errno.EDEADLK, native.FAILED_STUCK), (errno.ETIMEDOUT, native.FAILED_LEASE)}),
    ],
)
def test_a_lock_that_never_comes_back_costs_its_link_alone(
    source: Node, whose: str, failures: set[tuple[int, int]]
) -> None:
    with Target("shm") as lost, Target("shm") as live:
        doomed, doomed_template = lost.pair_with(source)
        link, template = live.pair_with(source)
        live.ask("expect", num_rows=40 * ALL_ROWS)
        send(source, link, template, 10)
        ours = segment_of(source.poller.link_address(doomed))
        started_s = time.monotonic()
        take_lock_for_good(ours if whose == "ours" else segment_of(lost.address))
        send(source, doomed, doomed_template, 5, tag=100)

        record = source.wait(native.LINK_FAILED, doomed)
        assert (record[2], record[4]) in failures
        assert time.monotonic() - started_s < 4, "it takes a quarter of a second of the thread's time, or a lease"
        assert source.poller.stats()["abandoned"] == (record[4] == native.FAILED_STUCK)
        send(source, link, template, 30)
        assert live.ask("reached") == 40 * ALL_ROWS

        source.poller.close_link(doomed)
        source.wait(native.LINK_CLOSED, doomed)
        assert not ours.exists(), "what is abandoned leaves no file"
        ended = sorted(record[1] for record in source.drain(native.SENT, native.STOPPED) if record[1] >= 100)
        assert ended == [100, 101, 102, 103, 104]
        assert live.ask("look")[0] == 40 * ALL_ROWS
        started_s = time.monotonic()
        source.poller.close()
        assert time.monotonic() - started_s < 2, "the thread was not stuck"


@needs_known_lock
def test_a_shared_port_that_is_stuck_is_exchanged_like_any_other() -> None:
    """All its links are lost with it; the next port has a domain of its own, and the others come back there."""
    source = Node("shm", shared_endpoint=True)
    with Target("shm") as lost, Target("shm") as live:
        doomed, template = lost.pair_with(source)
        other, _ = live.pair_with(source)
        take_lock_for_good(segment_of(lost.address))
        send(source, doomed, template, 5)
        for link in (doomed, other):
            assert source.wait(native.LINK_FAILED, link)[4] == native.FAILED_STUCK
            source.poller.close_link(link)
            source.wait(native.LINK_CLOSED, link)
        source.poller.rotate([[7]])
        old = source.wait(native.PORT_OPENED)[1] - 1
        source.poller.close_port(old)
        source.wait(native.PORT_CLOSED, old)
    with Target("shm") as live:
        link, template = live.pair_with(source)
        live.ask("expect", num_rows=ALL_ROWS)
        send(source, link, template, 1)
        assert live.ask("reached") == ALL_ROWS
    source.close()


@needs_known_lock
def test_closing_does_not_wait_for_a_lost_lock(source: Node) -> None:
    with Target("shm") as lost:
        link, template = lost.pair_with(source)
        take_lock_for_good(segment_of(lost.address))
        send(source, link, template, 5)
        started_s = time.monotonic()
        source.poller.close()
        assert time.monotonic() - started_s < 3
        assert source.wait(native.LINK_CLOSED, link)


def test_a_peer_that_is_stopped_in_the_middle_stops_nobody(source: Node) -> None:
    generator = np.random.default_rng(5)
    for _ in range(12):
        with Target("shm") as target:
            link, template = target.pair_with(source)
            target.ask("expect", num_rows=1 << 40)
            send(source, link, template, 400)
            time.sleep(generator.uniform(0, 0.03))  # anywhere in its traffic
            target.process.send_signal(signal.SIGSTOP)
            for _ in range(8):
                rounds = source.poller.stats()["rounds"]
                limit_s = time.monotonic() + 3
                while source.poller.stats()["rounds"] < rounds + 20:
                    assert time.monotonic() < limit_s, source.poller.stats()
            source.poller.close_link(link)
            source.wait(native.LINK_CLOSED, link)
