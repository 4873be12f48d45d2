"""The lives of links and of the ports they use: how they open, beat, move, fail and close."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence

from kvmsgr._ext import native
from kvmsgr._ext.native import LINK_CLOSED, LINK_FAILED, LINK_OPENED
from kvmsgr.fabric.interface import FAILED_LEASE, LINK_HELD, PORT_CLOSED, PORT_FAILED, PORT_OPENED, Remote

from .air import Air, Owner, Region
from .links import Link, Port
from .posting import Posting
from .records import Records

ENOKEY = 126


class Lives:
    """Links and ports of one poller.

    Args:
        shared: All links use one port; else each has its own.
    """

    def __init__(
        self, air: Air, owner: Owner, records: Records, posting: Posting, *, shared: bool, op_timeout_ns: int,
        heartbeat_ns: int, lease_ns: int,
    ) -> None:  # fmt: skip
        self.links: dict[int, Link] = {}
        self.ports: list[Port] = []
        self.held = False
        self._air = air
        self._owner = owner
        self._records = records
        self._posting = posting
        self._shared = shared
        self._op_timeout_ns = op_timeout_ns
        self._heartbeat_ns = heartbeat_ns
        self._lease_ns = lease_ns
        self._num_ports = 0
        self._current: Port | None = None  # where new links go, and old ones move to
        self._closing: list[Port] = []
        self._heart = ctypes.create_string_buffer(b"kvmsgr", 8)

    # Opening

    def open(self, link: Link) -> None:
        self.links[link.number] = link
        port = self._current if self._shared else None
        keys = link.keys if port is None else link.keys[-1:]
        if port is None:
            port = None if self._taken(keys) else self._open_port(link.keys[:-1])
        if port is None or self._taken(link.keys[-1:]):
            self.fail(link, ENOKEY, native.FAILED_REGISTER)
            return
        link.port = port
        for each in self.ports if self._shared else [port]:
            self._add_cell(each, link)
        if self._shared:
            self._current = port
        self._records.report(LINK_OPENED, link.number, 0)

    def _taken(self, keys: Sequence[int]) -> bool:
        ours = {key for port in self.ports for key in port.endpoint.regions}
        return len(set(keys)) < len(keys) or not ours.isdisjoint(keys)

    def _open_port(self, keys: Sequence[int]) -> Port:
        self._num_ports += 1
        sources = self._posting.sources
        regions = [Region(source.address, source.num_bytes, key) for source, key in zip(sources, keys, strict=True)]
        port = Port(self._num_ports, self._air.open(self._owner, regions), tuple(keys))
        self.ports.append(port)
        return port

    @staticmethod
    def _add_cell(port: Port, link: Link) -> None:
        key = link.keys[-1]
        port.endpoint.regions[key] = Region(ctypes.addressof(link.cell), len(link.cell), key)

    def landing(self, link: Link) -> Port | None:
        """Where the peer of a link is to write to from now on, and may write to until that is closed."""
        port = self._current if self._shared and link.port is not None else link.port
        if port is not None:
            link.told.add(port)
        return port

    def connect(self, link: Link) -> None:
        link.connected = True
        link.heard_ns = self._records.clock()

    # Moving

    def rotate(self, keys: Sequence[int]) -> None:
        if self._taken(keys):
            self._records.report(PORT_FAILED, 0, ENOKEY)
            return
        port = self._current = self._open_port(keys)
        for link in self.links.values():
            self._add_cell(port, link)
        self._records.report(PORT_OPENED, port.number, 0)

    def retarget(self, link: Link, address: bytes, regions: Sequence[Remote], beat: tuple[int, int, int]) -> None:
        link.retarget = address, regions
        link.beat = (address, *beat)
        link.beat_due_ns = 0

    def go_on_moving(self) -> None:
        """A link moves when nothing of it is in flight."""
        for link in self.links.values():
            if link.retarget is not None and not link.num_flying:
                (link.target, link.regions), link.retarget, link.held = link.retarget, None, True
                self._records.report(LINK_HELD, link.number, 0)
            if self._shared and not link.closing and not link.flying:
                link.port = self._current if link.port is not None else None

    def may_post(self, link: Link) -> bool:
        """Not while it is held, or has to move first; and only while its lease lasts, by a fresh clock."""
        stays = not link.waits and (not self._shared or link.port is self._current)
        return stays and self.is_live(link)

    # Ending

    def fail(self, link: Link, error: int, call: int) -> None:
        self._records.count("errors")
        if link.failed or link.closing:
            return
        link.failed = True
        self._records.report(LINK_FAILED, link.number, error, call)
        self._posting.stop_all(link)

    def close(self, link: Link, fence: bool = True) -> None:
        """It ends with the ports that its peer may write to. Where it has one to itself, that is now."""
        if link.closing:
            return
        link.closing = True
        self._posting.stop_all(link)
        if not self._shared and link.port is not None:
            self._closing.append(link.port)
        elif link.port is None or (not fence and not link.flying):
            self._end(link)

    def close_port(self, number: int) -> None:
        for port in self.ports:
            if port.number == number and not port.asked:
                port.asked = True
                self._closing.append(port)

    def go_on_closing(self, emptied: bool) -> bool:
        """A port is closed, then the completion queue is read to its end; then links end that have no other."""
        for port in list(self._closing):
            if not port.closed:
                self._air.close(port.endpoint)
                port.closed = True
            elif emptied:
                self._end_port(port)
        return bool(self._closing)

    def _end_port(self, port: Port) -> None:
        self._closing.remove(port)
        self.ports.remove(port)
        self._current = None if self._current is port else self._current
        for link in list(self.links.values()):
            for flight in [flight for flight in link.flying if flight.source is port.endpoint]:
                self._posting.retire(link, flight)
            link.told.discard(port)
            if link.closing and not link.told and (link.port is None or link.port.closed):
                self._end(link)
        if port.asked:
            self._records.report(PORT_CLOSED, port.number, 0)

    def _end(self, link: Link) -> None:
        for port in self.ports:
            port.endpoint.regions.pop(link.keys[-1], None)
        self._records.report(LINK_CLOSED, link.number, 0)
        del self.links[link.number]

    def close_all(self) -> None:
        for link in list(self.links.values()):
            self.close(link)
        self._closing += [port for port in self.ports if port not in self._closing]

    # Time

    @property
    def next_ns(self) -> list[int]:
        """When something is to be done even if nothing happens."""
        times = []
        for link in self.links.values():
            if link.alive and link.beat is not None:
                times += [] if link.beating else [link.beat_due_ns]
                times += [] if self.held else [link.heard_ns + self._lease_ns]
        return times

    def hold(self, held: bool) -> None:
        """Leases are not judged while nothing is read, and anew afterwards."""
        self.held = held
        if not held:
            for link in self.links.values():
                link.heard_ns = self._records.clock()

    def heard(self, number: int) -> None:
        self._records.count("beats_heard")
        if number in self.links:
            self.links[number].heard_ns = self._records.clock()

    def is_live(self, link: Link) -> bool:
        judged = link.alive and link.beat is not None and not self.held
        if judged and self._records.clock() - link.heard_ns > self._lease_ns:
            self.fail(link, errno.ETIMEDOUT, FAILED_LEASE)
        return link.alive

    def check_leases(self) -> None:
        for link in list(self.links.values()):
            self.is_live(link)

    def beat(self, now_ns: int) -> bool:
        beaten = False
        for link in self.links.values():
            due = link.beat is not None and not link.beating and now_ns >= link.beat_due_ns
            if due and self.is_live(link):
                link.beat_due_ns = now_ns + self._heartbeat_ns
                self._posting.beat(link, ctypes.addressof(self._heart), now_ns)
                beaten = True
        return beaten

    def check_timeouts(self, now_ns: int) -> None:
        for link in list(self.links.values()):
            if not link.alive:
                continue
            since_ns = min((operation.posted_ns for operation in link.flying.values()), default=now_ns)
            if now_ns - min(since_ns, link.again_since_ns or now_ns) > self._op_timeout_ns:
                self.fail(link, errno.ETIMEDOUT, native.FAILED_TIMEOUT)
