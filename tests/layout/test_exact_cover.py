"""Every sharding to every sharding: each byte of the destination exactly once, and the count known to it alone."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmsgr.errors import LayoutError
from kvmsgr.layout import head_share
from tests.layout.reference import ORDERS, Prompt, Shard, check_rank

HEADS = (1, 2, 4, 8)
RANKS = (1, 2, 4, 8, 16)
LAYERS = (0, 1)
NUM_TOKENS = 83  # two pages of 64 or six of 16, the last one partly filled


def ranks(
    total_heads: int, num_ranks: int, page_tokens: int, order: str, widths: tuple[int, ...], num_pages: int
) -> list[Shard]:
    """The ranks of one side, tensor-parallel."""
    return [
        Shard(LAYERS, head_share(total_heads, num_ranks, rank), total_heads, page_tokens, num_pages, widths, order)
        for rank in range(num_ranks)
    ]


def pages(random: Random, num_tokens: int, page_tokens: int, num_pages: int) -> Prompt:
    """Pages for all of a prompt, in any order."""
    return Prompt(num_tokens, [(0, random.sample(range(num_pages), -(-num_tokens // page_tokens)))])


@pytest.mark.slow
@pytest.mark.parametrize("total_heads", HEADS)
@pytest.mark.parametrize("latent", [False, True], ids=["GQA", "MLA"])
def test_exact_cover_t05(total_heads: int, latent: bool) -> None:
    """T05: every cell of the grid. A latent cache has one head, whatever the model has.

    Within a cell, two of the destination ranks are looked at and the copies are drawn.
    """
    random = Random(f"{total_heads} {latent}")
    kv_heads, widths = (1, (4,)) if latent else (total_heads, (2, 2))
    counts = {"supported": 0, "refused": 0}
    for src_ranks, dst_ranks in product(RANKS, RANKS):
        for src_page, dst_page, src_order, dst_order in product((16, 64), (16, 64), ("hnd", "nhd"), ("hnd", "nhd")):
            try:
                sources = ranks(kv_heads, src_ranks, src_page, src_order, widths, 8)
                destinations = ranks(kv_heads, dst_ranks, dst_page, dst_order, widths, 9)
            except LayoutError:
                counts["refused"] += 1
                continue
            computed = pages(random, NUM_TOKENS, src_page, 8)
            given_pages = pages(random, NUM_TOKENS, dst_page, 9)
            for destination in random.sample(destinations, min(2, dst_ranks)):
                stops = sorted(random.sample(range(NUM_TOKENS), 1))
                rows = check_rank(sources, destination, given_pages, computed, stops, random)
                assert rows == (NUM_TOKENS - 1) * len(destination.heads) * len(widths) * len(LAYERS)
            counts["supported"] += 1
    print(f"heads {total_heads}, latent {latent}: {counts}")
    assert counts == {"supported": 25 * 16, "refused": 0}


def test_every_number_of_ranks() -> None:
    """T05 beyond powers of two: 1..16 ranks on both sides. Where heads cannot be dealt there is no such layout."""
    random = Random(5)
    counts = {"supported": 0, "refused": 0}
    for total_heads, src_ranks, dst_ranks in product(HEADS, range(1, 17), range(1, 17)):
        src_order, dst_order = random.choice(["hnd", "nhd"]), random.choice(["hnd", "nhd"])
        src_page, dst_page = random.choice([(2, 2), (2, 4), (4, 2)])
        possible = all(total_heads % num == 0 or num % total_heads == 0 for num in (src_ranks, dst_ranks))
        if not possible:
            with pytest.raises(LayoutError, match=f"{total_heads} heads cannot be dealt to"):
                [ranks(total_heads, num, 2, "hnd", (2, 2), 4) for num in (src_ranks, dst_ranks)]
            counts["refused"] += 1
            continue
        sources = ranks(total_heads, src_ranks, src_page, src_order, (2, 2), 4)
        destinations = ranks(total_heads, dst_ranks, dst_page, dst_order, (2, 2), 4)
        computed, wanted = pages(random, 6, src_page, 4), pages(random, 6, dst_page, 4)
        check_rank(sources, random.choice(destinations), wanted, computed, [3], random)
        counts["supported"] += 1
    print(counts)
    assert counts == {"supported": 398, "refused": 626}


def cuts(total: int, most: int) -> st.SearchStrategy[list[range]]:
    """Cut 0..total-1 into up to `most` ranges of any length."""
    inner = st.sets(st.integers(1, total - 1), max_size=most - 1) if total > 1 else st.just(set())
    return inner.map(lambda at: [range(lo, hi) for lo, hi in pairwise([0, *sorted(at), total])])


@st.composite
def sides(draw: st.DrawFn, total_heads: int, num_layers: int, widths: tuple[int, ...], page_tokens: int) -> list[Shard]:
    """The ranks of one side: stages of a pipeline, each tensor-parallel in its own way, with copies."""
    found = []
    for stage in draw(cuts(num_layers, 3), label="stages"):
        shares = draw(
            st.one_of(
                st.sampled_from([n for n in range(1, 17) if total_heads % n == 0 or n % total_heads == 0]).map(
                    lambda num: [head_share(total_heads, num, rank) for rank in range(num)]
                ),
                cuts(total_heads, 4),
            ),
            label="heads",
        )
        apart = len(set(widths)) > 1 or draw(st.booleans(), label="apart")
        order = draw(st.sampled_from(sorted(ORDERS)), label="order")
        found += [
            Shard(tuple(stage), heads, total_heads, page_tokens, -(-MAX_TOKENS // page_tokens), widths, order, apart)
            for heads in shares
        ]
    return draw(st.permutations(found), label="ranks")


MAX_TOKENS = 300
PAGES = st.sampled_from(
    [(tokens, other) for tokens in (1, 3, 16, 32, 48, 64, 128, 256) for other in (16, 48, 256)]
).filter(lambda pair: max(pair) % min(pair) == 0)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data(), PAGES, st.booleans(), st.integers(0, 1 << 20))
def test_any_sharding_to_any_other(data: st.DataObject, page_tokens: tuple[int, int], swap: bool, seed: int) -> None:
    """Uneven stages and shares, copies, K and V apart, of different width or alone, windows, pages of 1..256 tokens."""
    random = Random(seed)
    total_heads, num_layers = data.draw(st.integers(1, 8), label="heads"), data.draw(st.integers(1, 4), label="layers")
    widths = data.draw(st.sampled_from([(2,), (2, 2), (3, 2)]), label="widths")
    src_page, dst_page = page_tokens[::-1] if swap else page_tokens
    sources = data.draw(sides(total_heads, num_layers, widths, src_page), label="sources")
    destinations = data.draw(sides(total_heads, num_layers, widths, dst_page), label="destinations")
    num_tokens = data.draw(st.integers(1, min(MAX_TOKENS, 4 * max(page_tokens))), label="tokens")
    window = data.draw(st.integers(0, num_tokens), label="first position wanted")
    computed, wanted = (late(random, num_tokens, tokens, window) for tokens in (src_page, dst_page))
    stops = sorted(data.draw(st.sets(st.integers(0, num_tokens), max_size=3), label="stops"))
    check_rank(sources, random.choice(destinations), wanted, computed, stops, random)


def late(random: Random, num_tokens: int, page_tokens: int, first: int) -> Prompt:
    """Pages from position `first` on, as a sliding window leaves them."""
    num_pages = max(0, -(-num_tokens // page_tokens) - first // page_tokens)
    return Prompt(num_tokens, [(first, random.sample(range(-(-MAX_TOKENS // page_tokens)), num_pages))])


@pytest.mark.parametrize("num_tokens", [1, 2, 1000])
@pytest.mark.parametrize(("src_ranks", "dst_ranks"), [(1, 4), (4, 2), (8, 8)])
def test_states_of_a_recurrent_group(src_ranks: int, dst_ranks: int, num_tokens: int) -> None:
    random = Random(num_tokens)

    def states(num_ranks: int, order: str, num_pages: int) -> list[Shard]:
        heads = [head_share(4, num_ranks, rank) for rank in range(num_ranks)]
        return [Shard(LAYERS, share, 4, 1, num_pages, (7, 5), order, apart=True, recurrent=True) for share in heads]

    computed, wanted = Prompt(num_tokens, [(700, [3])]), Prompt(num_tokens, [(0, [1])])
    for destination in states(dst_ranks, "nhd", 2):
        rows = check_rank(states(src_ranks, "hnd", 4), destination, wanted, computed, [num_tokens // 2], random)
        assert rows == (num_tokens > 1) * len(destination.heads) * 2 * 2


def test_layers_that_share_a_buffer_move_once() -> None:
    random = Random(1)
    heads, shared = range(2), {2: 0, 3: 1, 4: 0}
    source, destination = (
        Shard(tuple(range(5)), heads, 2, page_tokens, 6, (2, 2), order, shared=shared)
        for page_tokens, order in ((16, "hnd"), (64, "nhd"))
    )
    rows = check_rank([source], destination, pages(random, 70, 64, 6), pages(random, 70, 16, 6), [40], random)
    assert rows == 69 * 2 * 2 * 2
    apart = Shard(tuple(range(5)), heads, 2, 16, 6, (2, 2), "hnd")
    assert check_rank([apart], destination, pages(random, 9, 64, 6), pages(random, 9, 16, 6), [], random) == 8 * 8
