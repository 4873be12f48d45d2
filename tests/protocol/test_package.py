"""Versions, packing, codes, and what the package shows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvmsgr_protocol as wire
from kvmsgr_protocol import Reason, VersionMismatch, negotiate


@pytest.mark.parametrize(
    ("ours", "theirs", "version"), [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 9), (4, 4), 4)]
)
def test_the_highest_common_version_is_taken(ours: tuple[int, int], theirs: tuple[int, int], version: int) -> None:
    assert negotiate(ours, theirs) == version


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1), (2, 3)), ((2, 3), (1, 1)), ((1, 4), (3, 2))])
def test_no_common_version_names_both_ranges(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    with pytest.raises(VersionMismatch, match=f"ours are {ours[0]} to {ours[1]}, theirs are {theirs[0]} to") as caught:
        negotiate(ours, theirs)
    assert (caught.value.ours, caught.value.theirs) == (ours, theirs)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_round_trip(tokens: list[int]) -> None:
    assert wire.unpack_tokens(wire.pack_tokens(tokens)) == tuple(tokens)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_pages_round_trip(pages: list[int]) -> None:
    assert wire.unpack_pages(wire.pack_pages(pages)) == tuple(pages)


def test_packing_is_little_endian() -> None:
    assert wire.pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert wire.pack_pages([258]) == b"\x02\x01\0\0"


def test_packing_names_what_is_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"tokens\[2\] is 4294967296, needed is 0\.\.4294967295"):
        wire.pack_tokens([1, 2, 2**32])
    with pytest.raises(ValueError, match=r"pages\[1\] is -1, needed is 0\.\.2147483647"):
        wire.pack_pages([0, -1, -2])
    with pytest.raises(ValueError, match=r"pages\[1\] is -1, a page index is not negative"):
        wire.unpack_pages(b"\0\0\0\0\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="tokens has 3 bytes, needed is a multiple of 4"):
        wire.unpack_tokens(b"\0\0\0")


def test_codes_travel_under_their_names() -> None:
    assert all(reason.value == reason.name for reason in Reason)


def test_every_exported_name_is_there() -> None:
    assert len(set(wire.__all__)) == len(wire.__all__)
    assert all(hasattr(wire, name) for name in wire.__all__)


@pytest.mark.slow
def test_the_package_stands_alone() -> None:
    code = "import sys, kvmsgr_protocol; print(*(m for m in sys.modules if m.partition('.')[0] in ('kvmsgr', 'numpy')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == ""
