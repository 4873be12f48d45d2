"""Who sends what: shares of a destination rank, what nobody holds, and copies that share the work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import pytest

from kvmsgr.errors import LayoutError, LayoutMismatchError
from kvmsgr.layout import Balance, Share, check_covered, divide, head_share
from kvmsgr_protocol import GroupLayout, LayerEntry, PlaneLayout, rows_per_position

TOTAL_HEADS = 8


def rank(layers: Iterable[int], heads: range, total_heads: int = TOTAL_HEADS, num_planes: int = 2) -> GroupLayout:
    """A rank that holds these layers and heads."""
    planes = [PlaneLayout(2, 1 << 20, 1 << 10, 2)] * num_planes
    entries = [
        LayerEntry(layer, plane, 0, layer << 30, order + 1)
        for order, layer in enumerate(layers)
        for plane in range(num_planes)
    ]
    return GroupLayout("kv", "int8", 1, 16, 4, heads.start, len(heads), total_heads, planes, entries)


def tensor_parallel(total_heads: int, num_ranks: int) -> list[GroupLayout]:
    return [rank(range(3), head_share(total_heads, num_ranks, index), total_heads) for index in range(num_ranks)]


def test_each_rank_holds_its_part() -> None:
    assert divide(tensor_parallel(8, 4), rank(range(3), range(8))) == [Share((index,), 2 * 3 * 2) for index in range(4)]
    assert divide(tensor_parallel(8, 4), rank(range(3), range(3, 5))) == [Share((1,), 6), Share((2,), 6)]


def test_copies_are_interchangeable() -> None:
    whole = rank(range(3), range(2), 2)
    assert divide(tensor_parallel(2, 6), whole) == [Share((0, 1, 2), 6), Share((3, 4, 5), 6)]
    assert divide([whole, rank(range(3), range(1), 2)], rank(range(3), range(1), 2)) == [Share((0, 1), 6)]


def test_shares_are_ordered_by_layer_and_head() -> None:
    low, high = range(4), range(4, 8)
    stages = [rank([2], high), rank([0, 1], high), rank([2], low), rank([0, 1], low)]
    assert divide(stages, rank(range(3), range(8))) == [
        Share((3,), 16),
        Share((1,), 16),
        Share((2,), 8),
        Share((0,), 8),
    ]


def test_a_messenger_may_hold_a_part_or_nothing() -> None:
    destination = rank(range(3), range(4))
    assert divide([rank([2, 9], range(8)), rank([0], range(5, 8)), rank([7], range(8))], destination) == [
        Share((0,), 8)
    ]
    assert divide([], destination) == []


def test_messengers_together_hold_all_rows() -> None:
    destination = rank(range(4), range(2, 6))
    first, second = [rank([0, 1], range(8))], [rank([2, 3], range(4)), rank([2, 3], range(4, 8))]
    legs = [sum(share.rows_per_position for share in divide(leg, destination)) for leg in (first, second)]
    assert legs == [rows_per_position(destination, leg) for leg in (first, second)]
    assert sum(legs) == rows_per_position(destination)
    check_covered([*first, *second], destination)


def test_parts_that_overlap_are_refused() -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        divide([rank([5], range(8)), rank([0, 1, 2], range(4)), rank([2], range(3, 8))], rank([0, 1, 2], range(8)))
    assert caught.value.field == "group 'kv': what source ranks 1 and 2 hold"
    assert (caught.value.ours, caught.value.theirs) == ("layers 0..2, heads 0..3", "layers 2, heads 3..7")
    assert "must hold all of the same" in str(caught.value)


@pytest.mark.parametrize(
    ("sources", "layer", "seen", "missing"),
    [
        ([], 1, "none", "2..5"),
        ([rank([1], range(8))], 4, "none", "2..5"),
        ([rank([1, 4], range(3)), rank([1, 4], range(4, 8))], 1, "2, 4, 5", "3"),
        ([rank([4], range(8)), rank([1], range(4))], 1, "2, 3", "4, 5"),
        ([rank([1, 4], range(4)), rank([1, 9], range(4, 8)), rank([4], range(5, 8))], 4, "2, 3, 5", "4"),
    ],
)
def test_what_nobody_holds_is_named(sources: Sequence[GroupLayout], layer: int, seen: str, missing: str) -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        check_covered(sources, rank([1, 4], range(2, 6)))
    assert caught.value.field == f"group 'kv': heads of layer {layer}"
    assert (caught.value.ours, caught.value.theirs) == ("2..5", seen)
    assert f"no source holds {missing} of it" in str(caught.value)


@pytest.mark.parametrize(("total_heads", "num_ranks"), [(8, 1), (8, 2), (8, 8), (2, 8), (1, 5), (3, 6), (6, 3)])
def test_heads_are_dealt_evenly(total_heads: int, num_ranks: int) -> None:
    shares = [head_share(total_heads, num_ranks, index) for index in range(num_ranks)]
    held = [head for share in shares for head in share]
    assert held == sorted(held)
    assert {held.count(head) for head in range(total_heads)} == {max(1, num_ranks // total_heads)}


def test_heads_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(LayoutError, match="8 heads cannot be dealt to 3 ranks"):
        head_share(8, 3, 0)


def test_the_least_loaded_copy_is_chosen() -> None:
    balance = Balance(4)
    assert balance.choose((1, 3), 100, draw=1) == 3
    assert balance.choose((1, 3), 10, draw=5) == 1
    assert balance.choose((1, 3), 10, draw=5) == 1
    assert balance.choose((0, 2), 1, draw=6) == 0
    assert balance.given_bytes == [1, 20, 0, 100]


def whole_node(num_ranks: int) -> list[list[int]]:
    return [list(range(num_ranks))] * 1000


def one_rank_each(num_ranks: int) -> list[list[int]]:
    random = Random(3)
    return [[random.randrange(num_ranks)] for _ in range(1000)]


@pytest.mark.parametrize(
    ("sources", "destinations", "filled"),
    [
        pytest.param(tensor_parallel(1, 8), tensor_parallel(1, 8), whole_node(8), id="MLA TP8 to TP8"),
        pytest.param(tensor_parallel(1, 8), tensor_parallel(1, 8), one_rank_each(8), id="MLA TP8 to one rank of DP8"),
        pytest.param(tensor_parallel(4, 8), tensor_parallel(4, 4), whole_node(4), id="4 heads, TP8 to TP4"),
    ],
)
def test_copies_send_equal_amounts(
    sources: list[GroupLayout], destinations: list[GroupLayout], filled: list[list[int]]
) -> None:
    """1000 requests whose lengths have a heavy tail: a tenth of them has more than a third of all tokens."""
    random = Random(8)
    tokens = [min(131072, int(500 * random.paretovariate(1.1))) for _ in filled]
    assert sum(sorted(tokens)[-100:]) > sum(tokens) // 3
    balance = Balance(len(sources))
    for num_tokens, indices in zip(tokens, filled, strict=True):
        for index in indices:
            for share in divide(sources, destinations[index]):
                balance.choose(share.sources, share.rows_per_position * num_tokens, random.randrange(1 << 16))
    mean = sum(balance.given_bytes) / len(sources)
    assert all(0.8 * mean <= given <= 1.2 * mean for given in balance.given_bytes), balance.given_bytes
