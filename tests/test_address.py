"""Addresses are read strictly and written back as they were."""

from __future__ import annotations

import pytest

from kvmsgr.address import Tcp, Unix, parse
from kvmsgr.errors import AddressError


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:80", "tcp://[::1]:0", "tcp://node-7:65535", "unix:/run/k.sock"])
def test_round_trip(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "127.0.0.1:80", "tcp://h", "tcp://:80", "tcp://h:65536", "tcp://h:x", "tcp://::1:80", "tcp://h:٣"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="is no address"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("tcp://127.0.0.9:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://node-7:1", False),
        ("unix:/a", True),
    ],
)
def test_who_can_reach_it(text: str, local: bool) -> None:
    assert parse(text).is_local is local


def test_a_wildcard_is_known() -> None:
    assert Tcp("0.0.0.0", 1).is_wildcard
    assert Tcp("::", 1).is_wildcard
    assert not Tcp("10.0.0.1", 1).is_wildcard
    assert Unix("/a").is_local
