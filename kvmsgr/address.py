"""Addresses of control sockets: "tcp://host:port" (an IPv6 host in brackets) or "unix:path"."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvmsgr.errors import AddressError


@dataclass(frozen=True, slots=True)
class Tcp:
    """Host and port; port 0 stands for any."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Whether it means every interface, so that nobody can dial it."""
        return self._ip is not None and self._ip.is_unspecified

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        return self.host == "localhost" or (self._ip is not None and self._ip.is_loopback)

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None  # a name


@dataclass(frozen=True, slots=True)
class Unix:
    """Path of a unix socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"

    @property
    def is_local(self) -> bool:
        """Only this host can reach it."""
        return True


def parse(address: str) -> Tcp | Unix:
    """Read an address.

    Raises:
        AddressError: It is none.
    """
    if address.startswith("unix:") and len(address) > len("unix:") and "\0" not in address:
        return Unix(address.removeprefix("unix:"))
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if in_brackets else host
    if (
        not address.startswith("tcp://")
        or not name
        or (":" in name) is not in_brackets
        or not (port.isascii() and port.isdigit() and int(port) < 1 << 16)
    ):
        raise AddressError(f'{address!r} is no address: "tcp://host:port" or "unix:path" is expected')
    return Tcp(name, int(port))
