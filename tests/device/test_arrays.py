"""Caches are read from tensors, from DLPack, and from addresses: same memory, same strides, no copy."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import kvmsgr
from kvmsgr.device.arrays import raw_array
from kvmsgr.device.cache import Memory, bytes_at
from kvmsgr.errors import LayoutError


def test_a_torch_tensor_is_read_with_its_strides() -> None:
    tensor = torch.zeros(4, 2, 6, dtype=torch.bfloat16).transpose(0, 1)
    assert raw_array(tensor) == kvmsgr.RawArray(tensor.data_ptr(), (2, 4, 6), (12, 24, 2), "bfloat16", 2)


def test_dlpack_gives_the_same_as_torch() -> None:
    tensor = torch.zeros(4, 2, 6, dtype=torch.float16).permute(1, 0, 2)

    class OnlyDlpack:
        def __dlpack__(self, **more: object) -> object:
            return tensor.__dlpack__(**more)

        def __dlpack_device__(self) -> object:
            return tensor.__dlpack_device__()

    assert raw_array(OnlyDlpack()) == raw_array(tensor)


def test_an_array_by_its_address_is_taken_as_it_is() -> None:
    raw = kvmsgr.RawArray(1 << 20, (2, 3), (12, 4), "float32", 4)
    assert raw_array(raw) is raw


def test_what_is_no_array_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="list"):
        raw_array([1, 2, 3])
    with pytest.raises(LayoutError, match="meta"):
        raw_array(torch.zeros(3, device="meta"))


def test_read_only_memory_that_dlpack_refuses_is_said_so() -> None:
    array = np.zeros(3)
    array.flags.writeable = False

    class Refusing:
        def __dlpack__(self, **more: object) -> object:
            raise BufferError("read only")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(LayoutError, match="read only"):
        raw_array(Refusing())


def describe(cache: kvmsgr.Cache, *context: kvmsgr.ContextBuffer) -> Memory:
    return Memory.describe([kvmsgr.Rank(cache, context)], shared_counter=True)


def test_memory_names_every_buffer_once() -> None:
    kv = torch.zeros(3, 5, 2, 2, 4, 8)
    hidden = torch.zeros(7, 16)
    group = kvmsgr.CacheGroup.from_tensors([kv], "layer page plane head token dim")
    memory = describe(kvmsgr.Cache([group]), kvmsgr.ContextBuffer("hidden", hidden))
    [rank] = memory.ranks
    assert [(region.address, region.num_bytes) for region in rank.regions] == [
        (kv.data_ptr(), kv.nbytes),
        (hidden.data_ptr(), hidden.nbytes),
    ]
    assert memory.num_signals == (3,)
    rank.context_views(2)["hidden"][:] = np.arange(16, dtype=np.float32).view(np.uint8)
    assert hidden[2].tolist() == list(range(16))
    assert hidden[1].tolist() == hidden[3].tolist() == [0] * 16


def test_a_cache_without_groups_is_refused() -> None:
    with pytest.raises(LayoutError, match="at least one group"):
        describe(kvmsgr.Cache([]))


def test_bytes_at_is_a_view_that_keeps_its_memory() -> None:
    class Array(np.ndarray):  # type: ignore[type-arg]  # can be referred to weakly
        pass

    array = np.zeros(4, np.uint8).view(Array)
    alive = weakref.ref(array)
    view = bytes_at(array.ctypes.data, 4, array)
    view[:] = 7
    assert array.tolist() == [7, 7, 7, 7]
    del array
    assert alive() is not None
    del view
    assert alive() is None


def test_read_only_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(bytes(64))
    with pytest.raises(LayoutError, match="read-only"):
        raw_array(np.memmap(tmp_path / "kv", mode="r"))


@pytest.mark.parametrize("address", [0, -8, 1 << 64])
def test_no_memory_is_refused(address: int) -> None:
    with pytest.raises(LayoutError, match="no memory"):
        raw_array(kvmsgr.RawArray(address, (2, 3), (12, 4), "float32", 4))


def test_context_buffers_have_memory_and_names_of_their_own() -> None:
    kv, hidden = torch.zeros(3, 5, 2, 2, 4, 8), torch.zeros(7, 16)
    cache = kvmsgr.Cache([kvmsgr.CacheGroup.from_tensors([kv], "layer page plane head token dim")])
    with pytest.raises(LayoutError, match="shares memory with buffer 0"):
        describe(cache, kvmsgr.ContextBuffer("a", hidden[:5]), kvmsgr.ContextBuffer("b", hidden[4:]))
    with pytest.raises(LayoutError, match="shares memory with the cache"):
        describe(cache, kvmsgr.ContextBuffer("a", kv.view(-1, 16)[:2]))
    with pytest.raises(LayoutError, match="named 'a'"):
        describe(cache, kvmsgr.ContextBuffer("a", hidden[:3]), kvmsgr.ContextBuffer("a", hidden[3:]))


def group(page_tokens: int = 4, name: str = "kv", layers: tuple[int, ...] = (0, 1, 2)) -> kvmsgr.CacheGroup:
    array = np.zeros((3, 5, 2, page_tokens, 8), np.float32)
    return kvmsgr.CacheGroup.from_tensors([array], "layer page head token dim", name=name, layers=layers, total_heads=2)


@pytest.mark.parametrize(
    ("other", "said"),
    [(group(8), r"page_tokens of rank 1 are \[8\], those of rank 0 \[4\]"), (group(name="b"), "groups of rank 1")],
)
def test_ranks_of_a_messenger_have_the_same_pages(other: kvmsgr.CacheGroup, said: str) -> None:
    ranks = [kvmsgr.Rank(kvmsgr.Cache([one])) for one in (group(), other)]
    with pytest.raises(LayoutError, match=said):
        Memory.describe(ranks, shared_counter=True)


def test_signals_count_the_layers_of_all_ranks_or_of_each() -> None:
    ranks = [kvmsgr.Rank(kvmsgr.Cache([group(layers=layers)])) for layers in ((0, 1, 2), (2, 5, 7))]
    assert Memory.describe(ranks, shared_counter=True).num_signals == (5,)
    own = Memory.describe(ranks, shared_counter=False)
    assert own.num_signals == (3, 3)
    assert [entry.signal for entry in own.ranks[1].groups[0].entries] == [1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([], "at least one rank"), ([kvmsgr.Rank(kvmsgr.Cache([group()]), interfaces=())], "rank 0: .* interface")],
)
def test_a_messenger_has_ranks_and_a_rank_has_interfaces(ranks: list[kvmsgr.Rank], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Memory.describe(ranks, shared_counter=True)


def test_ranks_say_which_heads_they_hold() -> None:
    """Else each would pass for a copy of the others, and wrong bytes for success."""
    silent = kvmsgr.CacheGroup.from_tensors([np.zeros((3, 5, 2, 4, 8), np.float32)], "layer page head token dim")
    with pytest.raises(LayoutError, match=r"rank 1: group 'kv' does not say which heads.*total_heads="):
        Memory.describe([kvmsgr.Rank(kvmsgr.Cache([one])) for one in (group(), silent)], shared_counter=True)
    describe(kvmsgr.Cache([silent]))  # alone it has all heads
