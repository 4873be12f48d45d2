from __future__ import annotations

import pytest
import torch

from tests.refengine.tiny import CONFIG
from tools.refengine.cache import Layout, PagedCache


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("page_tokens", [8, 32])
def test_what_is_written_is_read_back_in_order_of_position(layout: Layout, page_tokens: int) -> None:
    cache = PagedCache(CONFIG, 40, page_tokens, layout, seed=3)
    num_tokens = 61
    pages = cache.allocate(cache.pages_for(num_tokens))
    table = cache.table([pages], num_tokens)
    keys = torch.randn(num_tokens, CONFIG.num_kv_heads, CONFIG.head_dim)
    values = torch.randn(num_tokens, CONFIG.num_kv_heads, CONFIG.head_dim)
    positions = torch.arange(num_tokens)
    cache.write(1, table[0, positions // page_tokens], positions % page_tokens, keys, values)
    found_keys, found_values = cache.read(1, table)
    assert found_keys.shape == (1, CONFIG.num_kv_heads, 64, CONFIG.head_dim)
    assert torch.equal(found_keys[0, :, :num_tokens], keys.transpose(0, 1))
    assert torch.equal(found_values[0, :, :num_tokens], values.transpose(0, 1))
    assert cache.tensor[0].isnan().all()


def test_layouts_are_what_their_names_say() -> None:
    hnd, nhd = (PagedCache(CONFIG, 3, 8, layout, seed=0).tensor.shape for layout in ("hnd", "nhd"))
    assert hnd == (2, 3, 2, 2, 8, 16)
    assert nhd == (2, 3, 2, 8, 2, 16)


def test_pages_come_in_shuffled_order_and_released_pages_are_poisoned() -> None:
    cache = PagedCache(CONFIG, 32, 8, "hnd", seed=1)
    pages = cache.allocate(32)
    assert sorted(pages) == list(range(32)) != pages
    cache.tensor.zero_()
    cache.release(pages[:5])
    assert cache.tensor[:, pages[:5]].isnan().all()
    assert not cache.tensor[:, pages[5:]].isnan().any()
    assert sorted(cache.allocate(5)) == sorted(pages[:5])


def test_too_many_pages_are_refused_and_none_is_lost() -> None:
    cache = PagedCache(CONFIG, 4, 8, "hnd", seed=0)
    with pytest.raises(MemoryError, match="5 pages wanted, 4 of 4 are free"):
        cache.allocate(5)
    assert cache.num_free == 4


def test_page_sizes_that_do_not_divide_a_block_of_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide 64"):
        PagedCache(CONFIG, 4, 24, "hnd", seed=0)
