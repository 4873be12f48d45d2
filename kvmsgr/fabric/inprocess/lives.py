"""The lives of links and of the ports they use: how they open, beat, move, fail and close."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence

from kvmsgr._ext import native
from kvmsgr._ext.native import LINK_CLOSED, LINK_FAILED, LINK_OPENED
from kvmsgr.fabric.interface import FAILED_LEASE, LINK_HELD, PORT_CLOSED, PORT_FAILED, PORT_OPENED, RemoteAt

from .air import Air, Owner, Region
from .links import Heart, Link, Port
from .posting import Posting
from .records import Records

ENOKEY = 126


class Lives:
    """Links and ports of one poller.

    Args:
        num_nics: Network interfaces.
        shared: All links of an interface use one port; else each has its own.
    """

    def __init__(
        self, air: Air, owner: Owner, records: Records, posting: Posting, *, num_nics: int, shared: bool,
        op_timeout_ns: int, heartbeat_ns: int, lease_ns: int,
    ) -> None:  # fmt: skip
        self.links: dict[int, Link] = {}
        self.ports: list[Port] = []
        self.held = False
        self.num_nics = num_nics
        self._air = air
        self._owner = owner
        self._records = records
        self._posting = posting
        self._shared = shared
        self._op_timeout_ns = op_timeout_ns
        self._heartbeat_ns = heartbeat_ns
        self._lease_ns = lease_ns
        self._num_ports = 0
        self._current: dict[int, Port] = {}  # of each interface: where new links go, and old ones move to
        self._closing: list[Port] = []
        self._payload = ctypes.create_string_buffer(b"kvmsgr", 8)

    # Opening

    def open(self, link: Link) -> None:
        self.links[link.number] = link
        port = self._current.get(link.nic)
        keys = link.keys if port is None else link.keys[-1:]
        if port is None:
            port = None if self._taken(link.nic, keys) else self._open_port(link.nic, link.keys[:-1])
        if port is None or self._taken(link.nic, link.keys[-1:]):
            self.fail(link, ENOKEY, native.FAILED_REGISTER)
            return
        link.port = port
        for each in self.ports:
            if each is port or (self._shared and each.nic == link.nic):
                self._add_cell(each, link)
        if self._shared:
            self._current[link.nic] = port
        self._records.report(LINK_OPENED, link.number, 0)

    def _taken(self, nic: int, keys: Sequence[int]) -> bool:
        ours = {key for port in self.ports if port.nic == nic for key in port.endpoint.regions}
        return len(set(keys)) < len(keys) or not ours.isdisjoint(keys)

    def _open_port(self, nic: int, keys: Sequence[int], number: int = 0) -> Port:
        """Number 0: that of the other interfaces' current ports, or the next."""
        number = number or next((port.number for port in self._current.values()), 0) or self._next_number()
        sources = [source for source in self._posting.sources if nic in source.nics]
        regions = [Region(source.address, source.num_bytes, key) for source, key in zip(sources, keys, strict=True)]
        port = Port(number, nic, self._air.open(self._owner, regions), tuple(keys))
        self.ports.append(port)
        return port

    def _next_number(self) -> int:
        self._num_ports += 1
        return self._num_ports

    @staticmethod
    def _add_cell(port: Port, link: Link) -> None:
        key = link.keys[-1]
        port.endpoint.regions[key] = Region(ctypes.addressof(link.cell), len(link.cell), key)

    def landing(self, link: Link) -> Port | None:
        """Where the peer of a link is to write to from now on, and may write to until that is closed."""
        port = self._current.get(link.nic) if self._shared and link.port is not None else link.port
        if port is not None:
            link.told.add(port)
        return port

    def connect(self, link: Link) -> None:
        link.connected = True
        link.heard_ns = self._records.clock()

    # Moving

    def rotate(self, keys: Sequence[Sequence[int]]) -> None:
        if any(self._taken(nic, its_keys) for nic, its_keys in enumerate(keys)):
            self._records.report(PORT_FAILED, 0, ENOKEY)
            return
        number = self._next_number()
        self._current = {nic: self._open_port(nic, its_keys, number) for nic, its_keys in enumerate(keys)}
        for link in self.links.values():
            self._add_cell(self._current[link.nic], link)
        self._records.report(PORT_OPENED, number, 0)

    @staticmethod
    def retarget(link: Link, targets: Sequence[bytes], regions: Sequence[RemoteAt], hearts: Sequence[Heart]) -> None:
        """A heart that beats where it was beats on there; then at the new place."""
        link.retarget = targets, regions
        for heart, new in zip(link.hearts, hearts, strict=True):
            heart.address, heart.offset, heart.key, heart.immediate = new.address, new.offset, new.key, new.immediate
            heart.due_ns = 0

    def go_on_moving(self) -> None:
        """A link moves when nothing of it is in flight."""
        for link in self.links.values():
            if link.retarget is not None and not link.num_flying:
                (link.targets, link.regions), link.retarget, link.held = link.retarget, None, True
                self._records.report(LINK_HELD, link.number, 0)
            if self._shared and not link.closing and not link.flying:
                link.port = self._current.get(link.nic) if link.port is not None else None

    def may_post(self, link: Link) -> bool:
        """Not while it is held, or has to move first; and only while its lease lasts, by a fresh clock."""
        stays = not link.waits and (not self._shared or link.port is self._current.get(link.nic))
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
        if self._current.get(port.nic) is port:
            del self._current[port.nic]
        for link in list(self.links.values()):
            for flight in [flight for flight in link.flying if flight.source is port.endpoint]:
                self._posting.retire(link, flight)
            link.told.discard(port)
            if link.closing and not link.told and (link.port is None or link.port.closed):
                self._end(link)
        if port.asked and not any(other.number == port.number for other in self.ports):
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
            if link.alive:
                times += [heart.due_ns for heart in link.hearts if not heart.beating]
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
        if link.alive and not self.held and self._records.clock() - link.heard_ns > self._lease_ns:
            self.fail(link, errno.ETIMEDOUT, FAILED_LEASE)
        return link.alive

    def check_leases(self) -> None:
        for link in list(self.links.values()):
            self.is_live(link)

    def beat(self, now_ns: int) -> bool:
        beaten = False
        for link in self.links.values():
            for heart in link.hearts:
                if not heart.beating and now_ns >= heart.due_ns and self.is_live(link):
                    heart.due_ns = now_ns + self._heartbeat_ns
                    self._posting.beat(link, heart, ctypes.addressof(self._payload), now_ns)
                    beaten = True
        return beaten

    def check_timeouts(self, now_ns: int) -> None:
        for link in list(self.links.values()):
            if not link.alive:
                continue
            since_ns = min((operation.posted_ns for operation in link.flying.values()), default=now_ns)
            if now_ns - min(since_ns, link.again_since_ns or now_ns) > self._op_timeout_ns:
                self.fail(link, errno.ETIMEDOUT, native.FAILED_TIMEOUT)
