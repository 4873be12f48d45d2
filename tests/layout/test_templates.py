"""Templates: how many writes a page costs, and where they go."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvmsgr.errors import LayoutMismatchError
from kvmsgr.layout import build_templates, check_groups, describe_group
from kvmsgr.layout.rowtable import RowTable
from kvmsgr.types import RawArray
from kvmsgr_protocol import MAX_ROWS, GroupLayout, LayerEntry

HND = "page plane head token dim"
NHD = "page plane token head dim"
ROW_BYTES = 128


def group(
    dims: str,
    *,
    head: int = 4,
    token: int = 16,
    dim: int = 64,
    plane: int = 2,
    layers: int = 3,
    planes_apart: bool = False,
) -> GroupLayout:
    """A dense group of 10 pages, a tensor a layer; `planes_apart`: and a tensor a plane."""
    sizes = {"page": 10, "plane": plane, "head": head, "token": token, "dim": dim}
    axes = [axis for axis in dims.split() if not (planes_apart and axis == "plane")]
    shape = [sizes[axis] for axis in axes]
    strides = tuple(2 * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    parts = [
        [RawArray(part << 40 | layer << 30, tuple(shape), strides, "bfloat16", 2) for layer in range(layers)]
        for part in range(1, 1 + (plane if planes_apart else 1))
    ]
    return describe_group(parts, " ".join(axes), name="kv")[0]


@pytest.mark.parametrize(
    ("src", "dst", "templates", "writes"),
    [
        (group(HND), group(HND), 1, 3),  # keys and values of a page in one write
        (group(NHD), group(NHD), 1, 3),
        (group(HND), group(HND, planes_apart=True), 1, 6),
        (group(HND, planes_apart=True), group(HND), 1, 6),
        (group("plane page head token dim"), group("plane page head token dim"), 1, 6),
        (group(HND, plane=1), group(HND, plane=1), 1, 3),
        (group(HND, head=1), group(NHD, head=1), 1, 3),  # with one head they are the same
        (group(HND, planes_apart=True), group(NHD, planes_apart=True), 1, 6 * 4 * 16),
        (group(HND, token=1), group("page token head plane dim", token=1), 1, 3 * 8),
    ],
)
def test_writes_of_a_page(src: GroupLayout, dst: GroupLayout, templates: int, writes: int) -> None:
    found = build_templates(src, dst)
    assert (len(found), sum(template.writes_per_page for template in found)) == (templates, writes)
    assert sum(template.rows_per_position for template in found) == src.num_heads * len(src.planes) * 3


def test_the_arrays_the_native_layer_takes() -> None:
    (template,) = build_templates(group(HND), group(HND, planes_apart=True))
    assert [str(array.dtype) for array in (template.runs, template.entries)] == ["uint64", "int64"]
    assert template.runs.tolist() == [[0, 0, 8192, 64]]
    assert template.entries.tolist() == [
        [layer, plane * 8192, plane * 3 + layer, 0, layer + 1] for layer in range(3) for plane in range(2)
    ]
    assert (template.src_page_bytes, template.dst_page_bytes) == (16384, 8192)
    assert (template.row_bytes, template.item_bytes, template.rows_per_position) == (ROW_BYTES, 2, 24)


def test_planes_of_different_width_are_two_templates() -> None:
    arrays = (
        [RawArray(1 << 20, (10, 16, 192), (6144, 384, 2), "bfloat16", 2)],
        [RawArray(1 << 30, (10, 16, 128), (4096, 256, 2), "bfloat16", 2)],
    )
    layout, _, _ = describe_group(arrays, "page token dim", name="kv")
    templates = build_templates(layout, layout)
    assert [template.runs.tolist() for template in templates] == [[[0, 0, 6144, 16]], [[0, 0, 4096, 16]]]
    assert [template.entries.tolist() for template in templates] == [[[0, 0, 0, 0, 1]], [[1, 0, 1, 0, 1]]]


def test_values_may_lie_before_keys() -> None:
    whole = [
        RawArray(address, (10, 4, 16, 64), (16384, 2048, 128, 2), "bfloat16", 2) for address in (8192 + 8192, 8192)
    ]
    layout, _, _ = describe_group([[array] for array in whole], "page head token dim", name="kv")
    (template,) = build_templates(layout, layout)
    assert template.runs.tolist() == [[0, 0, 16384, 128]]
    assert template.entries.tolist() == [[0, 0, 0, 0, 1]]


def test_planes_that_do_not_join_are_entries() -> None:
    """One run that neighbouring pages can continue, not two that alternate."""
    (template,) = build_templates(group("plane page head token dim"), group("plane page head token dim"))
    assert (len(template.runs), len(template.entries)) == (1, 6)


def plane(address: int, width: int = 64, page: int = 4096) -> list[RawArray]:
    """One plane of one layer: 4 pages of 16 tokens, `page` bytes apart, rows 128 bytes apart."""
    return [RawArray(address, (4, 16, width), (page, 128, 2), "bfloat16", 2)]


def test_planes_with_different_page_strides_are_two_templates() -> None:
    """Page 0 of the values follows that of the keys, page 1 does not."""
    layout, regions, _ = describe_group([plane(0, page=8192), plane(2048, page=4096)], "page token dim", name="kv")
    assert len(regions) == 1
    templates = build_templates(layout, layout)
    assert [template.src_page_bytes for template in templates] == [8192, 4096]


def test_planes_of_different_width_in_one_tensor_are_two_templates() -> None:
    layout, regions, _ = describe_group([plane(0, 48), plane(96, 16)], "page token dim", name="kv")
    assert len(regions) == 1
    templates = build_templates(layout, layout)
    assert [(template.row_bytes, len(template.runs)) for template in templates] == [(96, 16), (32, 16)]


def test_planes_in_different_regions_never_join() -> None:
    layout, _, _ = describe_group([plane(0), plane(2048)], "page token dim", name="kv")
    assert len(build_templates(layout, layout)[0].entries) == 1
    keys, values = layout.entries
    layout = msgspec.structs.replace(layout, entries=[keys, msgspec.structs.replace(values, region=1)])
    assert build_templates(layout, layout)[0].entries.tolist() == [[0, 0, 0, 0, 1], [1, 2048, 1, 2048, 1]]


def test_a_run_without_rows_is_left_out() -> None:
    strides = np.arange(6, dtype=np.int64) * 8
    table = RowTable.build(strides, strides * 2, np.array([0, 1, 2, 0, 1, 2]), 8)
    assert table.runs(0, 3, 2)[:, 3].tolist() == [1, 1, 1, 1]


def test_planes_at_changing_distances_are_entries() -> None:
    parts = [
        [
            RawArray((layer << 20) + plane * layer * 8192, (10, 4, 16, 64), (32768, 2048, 128, 2), "bfloat16", 2)
            for layer in (1, 2)
        ]
        for plane in (0, 1)
    ]
    layout, _, _ = describe_group(parts, "page head token dim", name="kv")
    (template,) = build_templates(layout, layout)
    assert len(template.entries) == 4


def test_edges_of_a_page() -> None:
    (template,) = build_templates(group(HND), group(HND))
    page, head = 16384, 16 * ROW_BYTES
    exact = template.edge_runs(2, 3, 4, 16, False).tolist()
    assert exact == [[2 * page + h * head + 512, 3 * page + h * head + 512, head - 512, 12] for h in range(8)]
    (whole,) = template.edge_runs(2, 3, 0, 5, True).tolist()
    assert whole == [2 * page, 3 * page, page - 11 * ROW_BYTES, 40]  # ends with the last row that counts
    assert len(template.edge_runs(2, 3, 0, 5, False)) == 8
    assert template.edge_runs(0, 0, 0, 16, True).tolist() == template.runs.tolist()


def test_what_lies_before_the_first_position_is_never_written() -> None:
    (template,) = build_templates(group(HND), group(HND))
    assert template.edge_runs(0, 0, 4, 9, True)[:, 3].tolist() == [5] * 8


def test_a_large_page_is_not_written_for_one_token() -> None:
    (template,) = build_templates(group(HND, token=1024), group(HND, token=1024))
    assert template.edge_runs(0, 0, 0, 1, True)[:, 2].tolist() == [ROW_BYTES] * 8
    assert template.edge_runs(0, 0, 0, 1023, True)[:, 3].tolist() == [1023] * 8  # long writes cost no more than one


def test_a_run_that_counts_less_than_it_is_long_fits_one_write() -> None:
    layout = group(HND, head=64, token=256, dim=1)
    (template,) = build_templates(layout, layout)
    assert len(template.runs) == 1
    assert template.runs[0, 3] == 2 * MAX_ROWS
    assert len(template.edge_runs(0, 0, 0, 255, True)) == 128


def changed(**changes: Any) -> GroupLayout:
    return msgspec.structs.replace(group(HND), **changes)


@pytest.mark.parametrize(
    ("theirs", "field", "ours_seen", "theirs_seen"),
    [
        (changed(dtype="float16"), "dtype", "bfloat16", "float16"),
        (changed(item_bytes=1), "item_bytes", 2, 1),
        (group(HND, token=24), "page_tokens", 16, 24),
        (changed(recurrent=True, page_tokens=1), "recurrent", False, True),
        (changed(total_heads=8), "total_heads", 4, 8),
        (group(HND, plane=1), "number of planes", 2, 1),
        (group(HND, dim=32), "row_bytes", [128, 128], [64, 64]),
    ],
)
def test_what_must_match_is_refused_by_name(theirs: GroupLayout, field: str, ours_seen: Any, theirs_seen: Any) -> None:
    for check in (build_templates, lambda ours, theirs: check_groups([ours], [theirs])):
        with pytest.raises(LayoutMismatchError) as caught:
            check(group(HND), theirs)
        assert caught.value.field == f"group 'kv': {field}"
        assert (caught.value.ours, caught.value.theirs) == (ours_seen, theirs_seen)


def test_groups_of_different_names_have_no_templates() -> None:
    with pytest.raises(LayoutMismatchError, match="group 'kv': name differs: ours is 'kv', theirs is 'window'"):
        build_templates(group(HND), changed(name="window"))


def test_groups_are_compared_in_their_order() -> None:
    one, other = group(HND), changed(name="window")
    check_groups([one, other], [changed(num_pages=77), other])
    with pytest.raises(
        LayoutMismatchError, match=r"cache: groups differs: ours is \['kv'\], theirs is \['kv', 'window'\]"
    ):
        check_groups([one], [one, other])


@pytest.mark.parametrize(
    ("src", "dst", "src_page", "dst_page", "writes", "of_a_page"),
    [
        (group(HND, token=64), group(HND), (65536, 4, 2048), (16384, 1, 0), 3 * 8, 3 * 8),
        (group(NHD), group(NHD, token=64), (16384, 1, 0), (65536, 4, 8192), 3 * 2, 3 * 2 * 4),
        (group(NHD, plane=1, token=64), group(NHD, plane=1), (32768, 4, 8192), (8192, 1, 0), 3, 3),
        (group(HND, token=64), group(HND, token=64), (65536, 1, 0), (65536, 1, 0), 3, 3),
    ],
)
def test_a_unit_is_the_smaller_page(
    src: GroupLayout,
    dst: GroupLayout,
    src_page: tuple[int, int, int],
    dst_page: tuple[int, int, int],
    writes: int,
    of_a_page: int,
) -> None:
    templates = build_templates(src, dst)
    assert {(template.src_page, template.dst_page) for template in templates} == {(src_page, dst_page)}
    assert {template.unit_tokens for template in templates} == {min(src.page_tokens, dst.page_tokens)}
    assert sum(template.writes_per_unit for template in templates) == writes
    assert sum(template.writes_per_page for template in templates) == of_a_page


def test_an_edge_lies_in_its_unit() -> None:
    (template,) = build_templates(group(NHD, plane=1, token=64), group(NHD, plane=1))
    (run,) = template.edge_runs(4 * 3 + 2, 5, 1, 3, False).tolist()
    assert run == [3 * 32768 + 2 * 8192 + 512, 5 * 8192 + 512, 1024, 8]


def test_only_what_both_sides_hold_is_moved() -> None:
    src = msgspec.structs.replace(group(HND, head=2), head_start=1, total_heads=4)
    dst = group(HND, head=4, layers=2)
    (template,) = build_templates(src, dst)
    assert template.runs.tolist() == [[0, 2048, 4096, 32]]
    assert template.entries.tolist() == [
        [layer, plane * 4096, layer, plane * 8192, layer + 1] for layer in range(2) for plane in range(2)
    ]
    assert template.rows_per_position == 2 * 2 * 2


@pytest.mark.parametrize("theirs", [{"head_start": 2, "num_heads": 2}, {"entries": [LayerEntry(9, 0, 0, 0, 1)]}])
def test_ranks_with_nothing_in_common_have_no_template(theirs: dict[str, Any]) -> None:
    ours = msgspec.structs.replace(group(HND, head=2, plane=1), total_heads=4)
    assert build_templates(ours, msgspec.structs.replace(group(HND, plane=1), **theirs)) == ()


def test_planes_of_different_order_are_two_templates() -> None:
    """Whole pages of both are one run; parts of them are not the same runs."""
    keys = [RawArray(1 << 20, (4, 2, 16, 64), (4096, 2048, 128, 2), "bfloat16", 2)]
    values = [RawArray(1 << 30, (4, 2, 16, 64), (4096, 128, 256, 2), "bfloat16", 2)]
    layout, _, _ = describe_group([keys, values], "page head token dim", name="kv")
    templates = build_templates(layout, layout)
    assert [template.runs.tolist() for template in templates] == [[[0, 0, 4096, 32]]] * 2
    assert [template.edge_runs(0, 0, 4, 8, False)[:, 3].tolist() for template in templates] == [[4, 4], [8]]


def test_planes_whose_parts_lie_differently_never_join() -> None:
    """The planes of a page join, but the parts of the planes of a larger one are not equally far apart."""
    keys = [RawArray(0, (4, 2, 32, 64), (16384, 4096, 128, 2), "bfloat16", 2)]
    values = [RawArray(8192, (4, 2, 32, 64), (16384, 128, 256, 2), "bfloat16", 2)]
    large, _, _ = describe_group([keys, values], "page head token dim", name="kv")
    assert len(build_templates(large, large)) == 1
    assert len(build_templates(large, group(HND, head=2))) == 2
