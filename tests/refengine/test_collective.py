"""Ranks add up, and none waits for one that is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tools.refengine.collective import Collective, RankLost, connect

HEADS_A_RANK, ROWS, HIDDEN = 2, 5, 3


@pytest.fixture(params=[2, 3])
def sockets(request: pytest.FixtureRequest) -> Iterator[list[dict[int, socket.socket]]]:
    ends = connect(request.param)
    yield ends
    for peers in ends:
        for peer in peers.values():
            peer.close()


def make_collectives(sockets: list[dict[int, socket.socket]], timeout_s: float = 10.0) -> list[Collective]:
    memory = torch.full((2, HEADS_A_RANK * len(sockets), ROWS * HIDDEN), torch.nan)
    return [Collective(rank, peers, memory, timeout_s) for rank, peers in enumerate(sockets)]


def terms(meeting: int, num_rows: int, num_ranks: int) -> torch.Tensor:
    """[heads, rows, hidden] of all ranks, different in each meeting."""
    size = num_ranks * HEADS_A_RANK * num_rows * HIDDEN
    return torch.arange(size, dtype=torch.float32).view(-1, num_rows, HIDDEN) + 1000 * meeting


def test_every_rank_gets_the_terms_of_all_in_every_meeting(sockets: list[dict[int, socket.socket]]) -> None:
    num_ranks = len(sockets)
    everything = [terms(meeting, 1 + meeting % ROWS, num_ranks) for meeting in range(200)]

    def run(collective: Collective, rank: int) -> bool:
        own = slice(rank * HEADS_A_RANK, (rank + 1) * HEADS_A_RANK)
        return all(torch.equal(collective.exchange(whole[own]), whole) for whole in everything)

    with ThreadPoolExecutor(num_ranks) as pool:
        assert list(pool.map(run, make_collectives(sockets), range(num_ranks))) == [True] * num_ranks


def test_a_rank_that_is_late_is_named_and_the_time_is_bounded(sockets: list[dict[int, socket.socket]]) -> None:
    collective = make_collectives(sockets, timeout_s=0.05)[0]
    with pytest.raises(RankLost, match=r"rank 1 is lost: of ranks \[1.*\] none came to meeting 1 within 0\.05 s"):
        collective.exchange(terms(0, 1, 1))


def test_a_rank_that_died_is_named_at_once(sockets: list[dict[int, socket.socket]]) -> None:
    dead = len(sockets) - 1
    collective = make_collectives(sockets, timeout_s=600.0)[0]
    for peer in sockets[dead].values():
        peer.close()
    with pytest.raises(RankLost, match=f"rank {dead} is lost: its process ended before meeting 1") as raised:
        collective.exchange(terms(0, 1, 1))
    assert raised.value.rank == dead


def test_more_rows_than_there_is_room_for_are_refused(sockets: list[dict[int, socket.socket]]) -> None:
    with pytest.raises(ValueError, match="18 elements a head are too many; there is room for 15"):
        make_collectives(sockets)[0].exchange(terms(0, ROWS + 1, 1))
