"""How the ranks of a node add up: terms in shared memory, and a byte to each other rank that says "mine are written".

A rank that dies closes its sockets, and all that wait for it are told at once.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping

from torch import Tensor


class RankLost(Exception):
    """A rank does not take part any more.

    Args:
        rank: Which.
        why: What is known of it.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why

    def __str__(self) -> str:
        return f"rank {self.rank} is lost: {self.why}"


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
        place = self._memory[self._num_meetings % 2, :, :num_elements].view(-1, *shape)
        place[self._rank * num_own : (self._rank + 1) * num_own] = terms
        self._meet()
        return place

    def _meet(self) -> None:
        self._num_meetings += 1
        missing = {peer.fileno(): number for number, peer in self._peers.items()}
        poll = select.poll()
        for descriptor, number in missing.items():
            self._check(number, self._say(number))
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + self._timeout_s
        while missing:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            for descriptor, _ in ready:
                poll.unregister(descriptor)
                number = missing.pop(descriptor)
                self._check(number, self._hear(number))
            if not ready:
                where = f"to meeting {self._num_meetings} within {self._timeout_s:g} s"
                raise RankLost(min(missing.values()), f"of ranks {sorted(missing.values())} none came {where}")

    def _check(self, number: int, alive: bool) -> None:
        if not alive:
            raise RankLost(number, f"its process ended before meeting {self._num_meetings} with rank {self._rank}")

    def _say(self, number: int) -> bool:
        try:
            return bool(self._peers[number].send(b"."))
        except (BrokenPipeError, ConnectionResetError):
            return False

    def _hear(self, number: int) -> bool:
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
