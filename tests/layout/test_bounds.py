"""A layout that came from somewhere else must stay inside its regions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvmsgr.errors import LayoutError
from kvmsgr.layout import check_bounds, describe_context, describe_group
from kvmsgr.types import RawArray

ARRAY = RawArray(1 << 20, (3, 5, 2, 2, 4, 8), (5 * 256, 256, 128, 64, 16, 2), "float16", 2)
GROUP, (REGION,), _ = describe_group([[ARRAY]], "layer page plane head token dim", name="kv")
CONTEXT, CONTEXT_REGION = describe_context("hidden", RawArray(1 << 24, (4, 16), (64, 4), "float32", 4), region=1)
BYTES = [REGION.num_bytes, CONTEXT_REGION.num_bytes]


def test_what_describes_itself_fits() -> None:
    check_bounds([GROUP], [CONTEXT], BYTES)


@pytest.mark.parametrize("short", [0, 1])
def test_one_byte_less_does_not(short: int) -> None:
    region_bytes = [num_bytes - (index == short) for index, num_bytes in enumerate(BYTES)]
    with pytest.raises(LayoutError, match=str(region_bytes[short])):
        check_bounds([GROUP], [CONTEXT], region_bytes)


def test_a_region_that_is_not_there_is_named() -> None:
    with pytest.raises(LayoutError, match="region 1; there are 1"):
        check_bounds([GROUP], [CONTEXT], BYTES[:1])


@pytest.mark.parametrize("field", ["page_stride_bytes", "head_stride_bytes", "token_stride_bytes", "row_bytes"])
def test_a_stride_that_leads_out_is_found(field: str) -> None:
    plane = replace(GROUP.planes[1], **{field: 1 << 30})
    with pytest.raises(LayoutError, match="plane 1 ends at byte"):
        check_bounds([replace(GROUP, planes=[GROUP.planes[0], plane])], [], BYTES)
