from __future__ import annotations

import pytest
import torch

from tests.refengine import tiny
from tests.refengine.tiny import CONFIG
from tools.refengine.cache import PagedCache, PagePool, num_elements
from tools.refengine.engine import page_table
from tools.refengine.scheduler import Holding
from tools.refengine.spec import CacheSpec, Group

SPECS = {
    "hnd": tiny.spec(),
    "nhd": tiny.spec(layout="nhd"),
    "pages of 32": tiny.spec(32),
    "latent": tiny.spec(latent=True),
    "two ranks": tiny.spec(num_ranks=2),
    "latent, two ranks": tiny.spec(latent=True, num_ranks=2),
}


def make_cache(spec: CacheSpec, num_pages: int = 40, rank: int = 0) -> PagedCache:
    return PagedCache(CONFIG, spec, spec.groups[0], num_pages, rank)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_is_written_is_read_back_in_order_of_position(spec: CacheSpec) -> None:
    rank = spec.num_ranks - 1
    cache, num_tokens = make_cache(spec, rank=rank), 61
    page_tokens = cache.group.page_tokens
    pages = PagePool(40, seed=3).allocate(-(-num_tokens // page_tokens))
    table = page_table([Holding(page_tokens, 0, pages)], 0, num_tokens)
    num_stored = cache.heads.stop - cache.heads.start
    keys, values = torch.randn(2, num_stored, num_tokens, CONFIG.head_dim)
    positions = torch.arange(num_tokens)
    cache.write(1, table[0, positions // page_tokens], positions % page_tokens, keys, values)
    found_keys, found_values = cache.read(1, table)
    own = spec.heads(CONFIG, rank)
    mine = slice(own.start - cache.heads.start, own.stop - cache.heads.start)
    assert found_keys.shape == (CONFIG.num_kv_heads // spec.num_ranks, 1, 64, CONFIG.head_dim)
    assert torch.equal(found_keys[:, 0, :num_tokens], keys[mine])
    assert torch.equal(found_values[:, 0, :num_tokens], values[mine])
    assert cache.tensor[0].isnan().all()


def test_layouts_are_what_their_names_say() -> None:
    shapes = {name: tuple(make_cache(spec, 3).tensor.shape) for name, spec in SPECS.items()}
    assert shapes["hnd"] == (3, 3, 2, 4, 8, 16)
    assert shapes["nhd"] == (3, 3, 2, 8, 4, 16)
    assert shapes["two ranks"] == (3, 3, 2, 2, 8, 16)
    assert shapes["latent"] == shapes["latent, two ranks"] == (3, 3, 8, 128)


def test_a_group_holds_its_own_layers_in_given_memory() -> None:
    spec = tiny.spec(num_groups=2)
    window = spec.groups[1]
    memory = torch.zeros(num_elements(CONFIG, spec, window, 5))
    cache = PagedCache(CONFIG, spec, window, 5, memory=memory)
    assert (window.layers, len(cache.tensor)) == ((1,), 1)
    assert memory.isnan().all()


def test_released_pages_are_poisoned() -> None:
    cache = make_cache(tiny.spec(), 6)
    cache.tensor.zero_()
    cache.poison([1, 5])
    assert cache.tensor[:, [1, 5]].isnan().all()
    assert not cache.tensor[:, [0, 2, 3, 4]].isnan().any()


def test_pages_come_in_shuffled_order_and_come_back() -> None:
    pool = PagePool(32, seed=1)
    pages = pool.allocate(32)
    assert sorted(pages) == list(range(32)) != pages
    pool.release(pages[:5])
    assert sorted(pool.allocate(5)) == sorted(pages[:5])


def test_too_many_pages_are_refused_and_none_is_lost() -> None:
    pool = PagePool(4, seed=0)
    with pytest.raises(MemoryError, match="5 pages wanted, 4 of 4 are free"):
        pool.allocate(5)
    assert pool.num_free == 4


def test_page_sizes_that_do_not_divide_a_block_of_keys_are_refused() -> None:
    spec = CacheSpec((Group("kv", (0, 1, 2), 24),))
    with pytest.raises(ValueError, match="must divide 64"):
        make_cache(spec)


def test_a_table_begins_at_a_block_of_keys_and_knows_what_is_held() -> None:
    held = [Holding(16, 5, [50, 51, 52]), Holding(16, 4, [40])]
    assert page_table(held, 64, 129).tolist() == [[0, 50, 51, 52, 0, 0, 0, 0], [40, 0, 0, 0, 0, 0, 0, 0]]
    assert page_table([Holding(16, 0, [7, 8, 9, 6, 5])], 64, 70).tolist() == [[5, 0, 0, 0]]


def test_pages_behind_a_window_are_given_up() -> None:
    held = Holding(8, 1, [10, 11, 12, 13])
    assert held.between(16, 25) == [11, 12]
    assert held.between(0, 9) == [10]
    assert held.take_before(31) == [10, 11]
    assert (held.first_page, held.pages, held.take_before(31)) == (3, [12, 13], [])
    assert held.between(0, 100) == [12, 13]
