"""Describing caches: what comes out, and what is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvmsgr.errors import LayoutError
from kvmsgr.layout import RegionRange, describe_cache, describe_group, number_signals
from kvmsgr.types import RawArray
from kvmsgr_protocol import GroupLayout, LayerEntry, PlaneLayout


def dense(*shape: int, address: int = 4096, dtype: str = "bfloat16", item_bytes: int = 2) -> RawArray:
    """A dense array at some address."""
    strides = [item_bytes * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    return RawArray(address, shape, tuple(strides), dtype, item_bytes)


def test_one_tensor_with_all_layers() -> None:
    group, regions, _ = describe_group(
        [[dense(3, 10, 2, 4, 16, 64)]], "layer page plane head token dim", name="kv", head_start=4, total_heads=8
    )
    assert regions == [RegionRange(4096, 3 * 10 * 2 * 4 * 16 * 128)]
    assert (group.name, group.dtype, group.item_bytes) == ("kv", "bfloat16", 2)
    assert (group.page_tokens, group.num_pages) == (16, 10)
    assert (group.head_start, group.num_heads, group.total_heads) == (4, 4, 8)
    assert group.planes == [PlaneLayout(128, 16384, 2048, 128)] * 2
    assert group.entries == [
        LayerEntry(layer, plane, 0, layer * 163840 + plane * 8192, layer + 1)
        for layer in range(3)
        for plane in range(2)
    ]


def test_a_tensor_a_layer_in_any_order_of_address() -> None:
    arrays = [dense(10, 16, 4, 64, address=address) for address in (1 << 30, 1 << 20)]
    group, regions, _ = describe_group([arrays], "page token head dim", name="kv")
    assert regions == [RegionRange(1 << 20, 81920), RegionRange(1 << 30, 81920)]
    assert group.planes == [PlaneLayout(128, 8192, 128, 512)]
    assert group.entries == [LayerEntry(0, 0, 1, 0, 1), LayerEntry(1, 0, 0, 0, 2)]


def test_keys_and_values_apart_may_differ_in_width() -> None:
    keys, values = dense(10, 4, 16, 192, address=1 << 20), dense(10, 4, 16, 128, address=1 << 30)
    group, _, _ = describe_group([[keys], [values]], "page head token dim", name="kv")
    assert [plane.row_bytes for plane in group.planes] == [384, 256]
    assert group.entries == [LayerEntry(0, 0, 0, 0, 1), LayerEntry(0, 1, 1, 0, 1)]


def test_views_of_one_tensor_are_one_region() -> None:
    whole = np.zeros((10, 2, 4, 16, 8), np.float16)
    parts = [[RawArray(v.ctypes.data, v.shape, v.strides, "float16", 2)] for v in (whole[:, 0], whole[:, 1])]
    group, regions, _ = describe_group(parts, "page head token dim", name="kv")
    assert regions == [RegionRange(whole.ctypes.data, whole.nbytes)]
    assert [entry.offset_bytes for entry in group.entries] == [0, 1024]


def test_a_latent_cache_has_one_head_and_one_plane() -> None:
    group, _, _ = describe_group([[dense(2, 10, 16, 576)]], "layer page token dim", name="mla")
    assert (group.num_heads, group.total_heads) == (1, 1)
    assert group.planes == [PlaneLayout(1152, 18432, 0, 1152)]


def test_strides_of_single_elements_mean_nothing() -> None:
    array = RawArray(4096, (10, 1, 16, 1), (32, 999, 2, 777), "float16", 2)
    group, _, _ = describe_group([[array]], "page head token dim", name="kv")
    assert group.planes == [PlaneLayout(2, 32, 0, 2)]


def test_layers_are_final_in_their_global_order() -> None:
    arrays = [dense(10, 16, 64, address=address << 20) for address in (1, 2, 3)]
    group, _, _ = describe_group([arrays], "page token dim", name="kv", layers=[7, 2, 5])
    assert [(entry.layer, entry.region, entry.signal) for entry in group.entries] == [(2, 1, 1), (5, 2, 2), (7, 0, 3)]


def test_groups_share_regions_and_the_order_of_layers() -> None:
    shared = dense(2, 10, 16, 64, address=1 << 20)
    window, _, _ = full = describe_group([[shared]], "layer page token dim", name="full", layers=[1, 3])
    other = dense(10, 32, 32, address=1 << 20)  # the same memory, cut otherwise
    far = dense(10, 32, 32, address=1 << 10)
    groups, regions = describe_cache(
        [full, describe_group([[other, far]], "page token dim", name="window", layers=[0, 2])]
    )
    assert regions == [RegionRange(1 << 10, 20480), RegionRange(1 << 20, 40960)]
    assert [(e.layer, e.region, e.offset_bytes, e.signal) for e in groups[0].entries] == [
        (1, 1, 0, 2),
        (3, 1, 20480, 4),
    ]
    assert [(e.layer, e.region, e.offset_bytes, e.signal) for e in groups[1].entries] == [(0, 1, 0, 1), (2, 0, 0, 3)]
    assert groups[0].planes == window.planes


def test_regions_that_touch_stay_apart() -> None:
    arrays = [dense(10, 16, 64, address=4096), dense(10, 16, 64, address=4096 + 20480)]
    _, regions, _ = describe_group([arrays], "page token dim", name="kv")
    assert regions == [RegionRange(4096, 20480), RegionRange(24576, 20480)]


def test_a_range_inside_another_adds_nothing() -> None:
    group = describe_group([[dense(10, 16, 64)]], "page token dim", name="a")
    inner = describe_group([[dense(2, 16, 64, address=4098)]], "page token dim", name="b")
    groups, regions = describe_cache([group, inner])
    assert regions == [RegionRange(4096, 20480)]
    assert groups[1].entries[0].offset_bytes == 2


def test_a_cache_has_groups_of_different_names() -> None:
    group = describe_group([[dense(10, 16, 64)]], "page token dim", name="kv")
    with pytest.raises(LayoutError, match=r"each has its own name, seen: \['kv', 'kv'\]"):
        describe_cache([group, group])
    with pytest.raises(LayoutError, match="at least one group"):
        describe_cache([])


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("page token heads dim", "axis 'heads' is unknown, known are layer, page, plane, head, token, dim"),
        ("page token token dim", "axis 'token' is named twice"),
        ("layer head token dim", "axis 'page' is missing"),
        ("layer page head dim", "axis 'token' is missing"),
        ("layer page head token", "axis 'dim' is missing"),
        ("page token dim head", "axis 'dim' must be the last one, the last is 'head'"),
        ("page token dim", "dims name 3 axes, the array has 4"),
    ],
)
def test_bad_dims_are_refused(dims: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        describe_group([[dense(4, 4, 4, 4)]], dims, name="kv")


PAGE_TOKEN_DIM = "page token dim"


@pytest.mark.parametrize(
    ("parts", "dims", "message"),
    [
        ([], PAGE_TOKEN_DIM, "group 'kv' has no arrays"),
        ([[]], PAGE_TOKEN_DIM, "part 0: 0 arrays, needed is one array a layer"),
        ([[dense(2, 4, 4, 4)] * 2], "layer page token dim", "part 0: 2 arrays, needed is one array, which holds all"),
        (
            [[dense(4, 2, 4, 4)]] * 2,
            "page plane token dim",
            "2 parts are a plane each, so there can be no axis 'plane'",
        ),
        (
            [[RawArray(0, (4, 4, 4), (32, 8), "f", 2)]],
            PAGE_TOKEN_DIM,
            r"the array has 3 \(shape \(4, 4, 4\)\) and 2 str",
        ),
        ([[RawArray(0, (4, 0, 4), (32, 8, 2), "f", 2)]], PAGE_TOKEN_DIM, "axis 'token' has 0 elements"),
        (
            [[RawArray(0, (4, 4, 4), (32, 8, 4), "f", 2)]],
            PAGE_TOKEN_DIM,
            "axis 'dim' has a stride of 4 bytes, needed is 2",
        ),
        (
            [[RawArray(0, (4, 4, 4), (32, 6, 2), "f", 2)]],
            PAGE_TOKEN_DIM,
            "axis 'token' has a stride of 6 .* at least 8",
        ),
        ([[RawArray(0, (4, 4, 4), (0, 8, 2), "f", 2)]], PAGE_TOKEN_DIM, "axis 'page' has a stride of 0 bytes"),
        ([[RawArray(0, (4, 4, 4), (-32, 8, 2), "f", 2)]], PAGE_TOKEN_DIM, "axis 'page' has a stride of -32 bytes"),
        (
            [[RawArray(0, (4, 4, 4), (8, 16, 2), "f", 2)]],
            PAGE_TOKEN_DIM,
            "axis 'token' has a stride of 16 .* at least 32",
        ),
        ([[dense(4, 4, 4)], [dense(4, 4, 4)] * 2], PAGE_TOKEN_DIM, "the number of arrays is 2, that of .* is 1"),
        (
            [[dense(4, 4, 4)], [dense(4, 4, 4, dtype="float16")]],
            PAGE_TOKEN_DIM,
            r"part 1, array 0: dtype and item size is \('float16', 2\), that of group 'kv', part 0, array 0 is \('bf",
        ),
        ([[dense(4, 4, 4), dense(4, 8, 4)]], PAGE_TOKEN_DIM, "the size of axis 'token' is 8, that of .* is 4"),
        ([[dense(4, 4, 4), dense(5, 4, 4)]], PAGE_TOKEN_DIM, "the size of axis 'page' is 5"),
        ([[dense(4, 4, 4), dense(4, 4, 8)]], PAGE_TOKEN_DIM, "the size of axis 'dim' is 8"),
        ([[dense(4, 2, 4, 4)], [dense(4, 3, 4, 4)]], "page head token dim", "the size of axis 'head' is 3"),
        (
            [[dense(4, 4, 4), RawArray(1 << 20, (4, 4, 4), (64, 8, 2), "bfloat16", 2)]],
            PAGE_TOKEN_DIM,
            "the stride of axis 'page' is 64",
        ),
        (
            [[RawArray(plane << 20, (2, 4, 4, 4), (plane << 12, 32, 8, 2), "f", 2) for plane in (1, 2)]],
            "plane page token dim",
            "the stride of axis 'plane' is 8192, that of .* is 4096",
        ),
        ([[dense(4, 4, 4), dense(4, 4, 4, address=4096 + 8)]], PAGE_TOKEN_DIM, "share bytes"),
    ],
)
def test_arrays_that_are_no_group_are_refused(parts: Sequence[Sequence[RawArray]], dims: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        describe_group(parts, dims, name="kv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0]}, "layers names 1 layers, the arrays hold 2"),
        ({"layers": [3, 3]}, r"layers \[3, 3\] must be different"),
        ({"layers": [-1, 3]}, "not negative"),
        ({"head_start": 1}, "head_start 1 and 1 heads do not fit into total_heads 1"),
        ({"head_start": -1, "total_heads": 4}, "head_start -1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        describe_group([[dense(2, 4, 4, 4)]], "layer page token dim", name="kv", **options)


def test_layers_that_share_a_buffer_are_one_entry_that_is_final_with_the_last() -> None:
    whole, windowed, own = (dense(10, 16, 64, address=address << 20) for address in (1, 2, 3))
    group = describe_group(
        [[whole, windowed, own, whole, windowed, whole]], "page token dim", name="kv", layers=[0, 2, 3, 4, 5, 9]
    )
    assert group.layers == [0, 2, 3, 4, 5, 9]
    assert [(entry.layer, entry.region, entry.signal) for entry in group.layout.entries] == [
        (3, 2, 3),
        (2, 1, 5),
        (0, 0, 6),
    ]
    other = describe_group([[dense(10, 16, 8, address=4 << 20)] * 2], "page token dim", name="other", layers=[1, 8])
    (first, second), _ = describe_cache([group, other])
    assert [(entry.layer, entry.signal) for entry in first.entries] == [(3, 4), (2, 6), (0, 8)]
    assert [(entry.layer, entry.signal) for entry in second.entries] == [(1, 7)]


def test_a_recurrent_group_holds_states() -> None:
    state = RawArray(4096, (10, 4, 96), (1024, 192, 2), "float16", 2)
    group, _, _ = describe_group([[state]], "page head dim", name="state", recurrent=True)
    assert (group.recurrent, group.page_tokens, group.num_heads) == (True, 1, 4)
    assert group.planes == [PlaneLayout(192, 1024, 192, 0)]
    with pytest.raises(LayoutError, match="group 'kv': recurrent, with 4 tokens a page; a state has one"):
        describe_group([[dense(4, 4, 4)]], PAGE_TOKEN_DIM, name="kv", recurrent=True)
    with pytest.raises(LayoutError, match="axis 'page' is missing"):
        describe_group([[dense(4, 4)]], "head dim", name="kv", recurrent=True)


def rank(*groups: Sequence[int]) -> list[GroupLayout]:
    """A rank with the layers of each group. Layers of a group whose numbers differ by 100 share a buffer."""
    return describe_cache(
        [
            describe_group(
                [[dense(4, 4, 4, address=(layer % 100 + 1) << 20) for layer in layers]],
                PAGE_TOKEN_DIM,
                name=f"group {index}",
                layers=layers,
            )
            for index, layers in enumerate(groups)
        ]
    )[0]


def signals(groups: Sequence[GroupLayout]) -> list[list[tuple[int, int]]]:
    return [[(entry.layer, entry.signal) for entry in group.entries] for group in groups]


def test_a_shared_counter_counts_the_layers_of_all_ranks() -> None:
    first, second = number_signals([rank([0, 1], [3]), rank([2, 5], [4])])
    assert signals(first) == [[(0, 1), (1, 2)], [(3, 4)]]
    assert signals(second) == [[(2, 3), (5, 6)], [(4, 5)]]


@pytest.mark.parametrize("other", [[3, 4], [0, 100], [0, 1, 2, 100]])
def test_shared_buffers_and_a_shared_counter_need_ranks_with_equal_layers(other: list[int]) -> None:
    sharing = rank([0, 1, 100])
    assert signals(sharing) == [[(1, 2), (0, 3)]]
    assert number_signals([sharing, sharing]) == [sharing, sharing]
    for ranks in ([sharing, rank(other)], [rank(other), sharing]):
        with pytest.raises(LayoutError, match=r"rank [01] has layers that share buffers"):
            number_signals(ranks)
