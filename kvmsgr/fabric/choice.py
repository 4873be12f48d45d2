"""Which libfabric provider to use, and why."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

REFUSED = {
    "sockets": "its latency is 8 ms a write",
    "udp;ofi_rxd": "it loses completions under load and after errors",
}


@dataclass(frozen=True, slots=True)
class FabricChoice:
    """Args:
    provider: Name as libfabric spells it.
    why: One sentence for logs and people.
    """

    provider: str
    why: str


def is_local(listen: str) -> bool:
    """Whether only peers of this host can reach the control socket."""
    if listen.startswith("unix:"):
        return True
    host = split_tcp(listen)[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_tcp(listen: str) -> tuple[str, int]:
    """Host and port of "tcp://host:port"; the host of an IPv6 address stands in brackets."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def candidates(fabric: str, listen: str) -> tuple[str, ...]:
    """Providers to try, best first."""
    if fabric != "auto":
        return (fabric,)
    return ("shm", "tcp", "net") if is_local(listen) else ("tcp", "net")
