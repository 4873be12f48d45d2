"""How the ranks of a node add up their terms: shared memory, and a byte to each other rank that says "mine are written".

A rank that dies closes its sockets, and all that wait for it are told at once.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping

from torch import Tensor


class RankLost(Exception):
    """A rank did not come to a meeting. The message says which, and why."""


class Collective:
    """One rank's end of a node's meetings. Every rank must come to all of them, in the same order.

    Args:
        rank: Our own.
        peers: A connected socket to each other rank.
        memory: Shared by all ranks, float32 [2, heads, elements]: what two meetings in a row exchange.
        timeout_s: How long the others may take to come.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], memory: Tensor, timeout_s: float) -> None:
        self._rank, self._peers, self._memory, self._timeout_s = rank, peers, memory, timeout_s
        self._num_meetings = 0
        self._ranks = {peer.fileno(): number for number, peer in peers.items()}

    def exchange(self, terms: Tensor) -> Tensor:
        """Give our terms [own heads, rows, hidden] and get those of all heads, [heads, rows, hidden].

        The result is overwritten at the meeting after the next, which no rank begins before all have begun the next.

        Raises:
            RankLost: A rank has died, or did not come in time.
        """
        num_own, *shape = terms.shape
        num_elements = terms[0].numel()
        if num_elements > self._memory.shape[2]:
            raise ValueError(f"{num_elements} elements a head are too many; there is room for {self._memory.shape[2]}")
        place = self._memory[self._num_meetings % 2, :, :num_elements].unflatten(1, shape)
        place[self._rank * num_own : (self._rank + 1) * num_own] = terms
        self._meet()
        return place

    def _meet(self) -> None:
        self._num_meetings += 1
        for number, peer in self._peers.items():
            try:
                peer.send(b".")
            except (BrokenPipeError, ConnectionResetError):
                raise RankLost(f"rank {self._rank}: rank {number} has died") from None
        missing = dict(self._ranks)
        poll = select.poll()
        for descriptor in missing:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + self._timeout_s
        while missing:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if not ready:
                late = ", ".join(f"rank {number}" for number in missing.values())
                raise RankLost(f"rank {self._rank}: {late} did not come to meeting {self._num_meetings} "
                    f"within {self._timeout_s:g} s")
            for descriptor, _ in ready:
                number = missing.pop(descriptor)
                poll.unregister(descriptor)
                if not self._heard(number):
                    raise RankLost(f"rank {self._rank}: rank {number} has died")

    def _heard(self, number: int) -> bool:
        try:
            return bool(self._peers[number].recv(1))
        except ConnectionResetError:
            return False


def connect(num_ranks: int) -> list[dict[int, socket.socket]]:
    """A socket between each two ranks; result [rank][other rank]."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for one in range(num_ranks):
        for other in range(one):
            ends[one][other], ends[other][one] = socket.socketpair()
    return ends
