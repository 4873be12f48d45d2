"""Connections that were begun and not finished when the endpoint they are for is closed."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import sys

import pytest

from kvmsgr._ext import native
from tests.native.loopback import DEADLINE_S, NUM_PAGES, Node, Pair

NUM_CONNECTIONS = 200
ALL_PAGES = [(page, page) for page in range(NUM_PAGES)]


@pytest.mark.parametrize("held", ["", "held"])
@pytest.mark.parametrize("endpoint", ["own", "shared"])
def test_they_are_cut_off_before_it_is_closed(endpoint: str, held: str) -> None:
    """libfabric would keep them, and crash when they go on or end, if what it has freed is changed."""
    provider = next((name for name in ("net", "tcp") if name in native.providers()), None)
    if not provider:
        pytest.skip("libfabric offers neither net nor tcp here")
    command = [sys.executable, "-m", __name__, provider, endpoint, held]
    overwrite = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.perturb=165"}
    ran = subprocess.run(command, env=os.environ | overwrite, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def begin_connection(node: Node, link: int) -> socket.socket:
    """Somebody whose request never comes: stopped or cut off when it was about to send it."""
    _, port, address = struct.unpack("!HH4s", node.poller.link_address(link)[:8])
    return socket.create_connection((socket.inet_ntoa(address), port), timeout=DEADLINE_S)


def wait_rounds(node: Node, num: int) -> None:
    rounds = node.poller.stats()["rounds"]
    while node.poller.stats()["rounds"] < rounds + num:
        pass


def close_amid_connections(pair: Pair, *, shared: bool, held: bool) -> None:
    target, link = pair.target, pair.target_link
    pair.expect(NUM_PAGES)
    pair.begin(ALL_PAGES, num_bumps=0, ready=True)
    target.wait(native.REACHED)
    half_made = [begin_connection(target, link) for _ in range(NUM_CONNECTIONS)]
    wait_rounds(target, 2 * NUM_CONNECTIONS)
    target.poller.hold(held)
    half_made.append(begin_connection(target, link))  # still to be accepted, if it is held
    if shared:
        target.poller.rotate([[secrets.randbits(63)]])
        target.wait(native.PORT_OPENED)
        target.poller.close_port(1)
        target.wait(native.PORT_CLOSED, 1)
    else:
        target.poller.close_link(link)
        target.wait(native.LINK_CLOSED, link)
    target.poller.hold(False)
    for connection in half_made:
        with connection, pytest.raises(ConnectionResetError):
            connection.recv(1)
    pair.reconnect()  # the completion queue is read again
    wait_rounds(target, 2 * NUM_CONNECTIONS)


if __name__ == "__main__":
    with Pair(sys.argv[1], shared_endpoint=sys.argv[2] == "shared") as pair:
        close_amid_connections(pair, shared=sys.argv[2] == "shared", held=sys.argv[3] == "held")
