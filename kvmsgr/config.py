"""What a messenger is told when it opens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from kvmsgr.address import Tcp, parse
from kvmsgr.errors import ConfigError

MAX_S = 1e7
MAX_NAME = 256
MAX_CQ_ENTRIES = 1 << 20
MAX_POLLERS = 64
FABRICS = ("auto", "shm", "net", "tcp", "tcp;ofi_rxm", "verbs;ofi_rxm", "efa", "inprocess")

FENCES = ("auto", "endpoint", "rotation")

LAYER_COUNTERS = ("lead", "rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one messenger. Durations are in seconds.

    Args:
        name: Name in logs.
        model: Fingerprint of model and weights; messengers with different ones refuse each other.
        listen: Control socket: "tcp://host:port" (port 0: any) or "unix:path".
        advertise: Host that peers dial, where it is not the one in `listen`.
        fabric: "auto": the best that passes the start-up self-test. Or "shm" (one host), "net" or "tcp" (libfabric's
            tcp provider before and after 1.18), "tcp;ofi_rxm" (its fence is not proven), "verbs;ofi_rxm" and "efa"
            (untested), "inprocess" (messengers of one process, for tests).
        fabric_address: Address of the network interface the fabric uses; None: the host that
            peers dial.
        window: Writes a peer may have in flight to each of our network interfaces.
        cq_entries: Size of the completion queue of each network interface. The windows of all peers together take at
            most half of it, so that it limits the number of peers; the other half is for our own writes.
        time_allowed_s: Default for one request.
        stall_s: After the peer posted everything: how long no row may land before the request fails.
        heartbeat_s: How often the polling thread tells each peer that it is there.
        lease_s: A peer whose polling thread has not been heard of for so long is lost: its requests fail, and what it
            could write to is closed. At least twice the peer's `heartbeat_s`.
        drain_timeout_s: How long a peer that runs may take to say how much it has posted for a request that is over,
            before it is taken for lost. Its engine's event loop may be blocked for so long.
        fence: How a lost peer is kept from writing: "endpoint" gives each peer an endpoint of its own, which is closed;
            "rotation" gives all peers one, and moves those that live to another (not over shm). "auto": rotation where
            queue pairs are scarce (efa, verbs), else endpoints.
        layer_counters: Who signals layers where a messenger has several ranks. "lead": one counter for all of them,
            which is right only where on every rank the KV of a layer is stored before a collective that precedes the
            bump, as with tensor parallelism. "rank": each rank bumps a counter of its own.
        num_streams: Streams that run forward passes, each with its layer counter or set of them.
        quarantine_limit: Share of a cache group's pages (0 to 1) that may be in quarantine before the messenger calls
            itself unhealthy.
        connect_timeout_s: From dialling a peer until requests may go.
        step_timeout_s: From `begin_step` until the step must have run all its layers.
        max_requests: Requests alive at once on the prefill side; beyond that a decoder is told to come back later.
        pollers: Polling threads. Each serves the network interfaces of some ranks that are neighbours by number, and
            there are at most as many as ranks. "inprocess" has none, whatever is set.
        poller_core: CPU of the polling thread, or one for each; None: any.
        poller_spins: Whether a polling thread spins while something is under way; None: if there are more than
            two CPUs.
        state_dir: Folder (on tmpfs) of the state file; None: the user's runtime folder, else /dev/shm.
    """

    name: str
    model: str
    listen: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    fabric: str = "auto"
    fabric_address: str | None = None
    window: int = 256
    cq_entries: int = 32768
    time_allowed_s: float = 60.0
    stall_s: float = 2.0
    heartbeat_s: float = 0.5
    lease_s: float = 2.0
    drain_timeout_s: float = 10.0
    fence: str = "auto"
    layer_counters: str = "lead"
    num_streams: int = 1
    quarantine_limit: float = 0.5
    connect_timeout_s: float = 5.0
    step_timeout_s: float = 60.0
    max_requests: int = 1024
    pollers: int = 1
    poller_core: int | Sequence[int] | None = None
    poller_spins: bool | None = None
    state_dir: str | None = None

    def __post_init__(self) -> None:
        if self.fabric not in FABRICS:
            raise ConfigError(f"fabric is {self.fabric!r}; known are {', '.join(FABRICS)}")
        if self.fence not in FENCES:
            raise ConfigError(f"fence is {self.fence!r}; known are {', '.join(FENCES)}")
        if self.layer_counters not in LAYER_COUNTERS:
            raise ConfigError(f"layer_counters is {self.layer_counters!r}; known are {', '.join(LAYER_COUNTERS)}")
        listen = parse(self.listen)
        if isinstance(listen, Tcp) and listen.is_wildcard and self.advertise is None:
            raise ConfigError(f"listen is {self.listen!r}, which no peer can dial; set advertise to this host's name")
        for field in (field.name for field in fields(self) if field.name.endswith("_s")):
            if not 0 < getattr(self, field) < MAX_S:
                raise ConfigError(f"{field} is {getattr(self, field)!r}; it must be positive and below {MAX_S:g}")
        if self.heartbeat_s * 2 > self.lease_s:
            raise ConfigError(
                f"heartbeat_s is {self.heartbeat_s:g} and lease_s {self.lease_s:g}; a lease must outlast two heartbeats"
            )
        if self.num_streams < 1:
            raise ConfigError(f"num_streams is {self.num_streams}; an engine has at least one")
        if not 0 <= self.quarantine_limit <= 1:
            raise ConfigError(f"quarantine_limit is {self.quarantine_limit}; it is a share of the pages, 0 to 1")
        for field in ("name", "model"):
            if len(getattr(self, field)) > MAX_NAME:
                raise ConfigError(f"{field} has {len(getattr(self, field))} characters; at most {MAX_NAME} travel")
        self._check_pollers()
        if not 0 < self.cq_entries <= MAX_CQ_ENTRIES:
            raise ConfigError(f"cq_entries is {self.cq_entries}; it must be in 1..{MAX_CQ_ENTRIES}")
        if not 0 < self.window <= self.cq_entries // 2:
            raise ConfigError(f"window is {self.window}; it must be in 1..{self.cq_entries // 2} (half of cq_entries)")

    def _check_pollers(self) -> None:
        if not 1 <= self.pollers <= MAX_POLLERS:
            raise ConfigError(f"pollers is {self.pollers}; it must be in 1..{MAX_POLLERS}")
        if len(self.poller_cores) != self.pollers:
            raise ConfigError(f"poller_core is {self.poller_core}; {self.pollers} polling threads need one CPU each")
        cores = os.sched_getaffinity(0)
        for core in self.poller_cores:
            if core is not None and core not in cores:
                raise ConfigError(f"poller_core is {core}; this process may run on {sorted(cores)}")

    @property
    def poller_cores(self) -> tuple[int | None, ...]:
        """CPU of each polling thread; None: any."""
        if self.poller_core is None:
            return (None,) * self.pollers
        return (self.poller_core,) if isinstance(self.poller_core, int) else tuple(self.poller_core)
