"""A worker process's link to its lead. Plain blocking calls, no event loop, and no libfabric but for layer counters."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from kvmsgr.errors import ConfigError, LeadLostError, LocalProtocolError, WorkerRefusedError

from .cache import Cache, CacheGroup, ContextBuffer, Rank
from .handover import describe_rank
from .process import open_process, peer_of
from .shared import Exportable, SharedMemory
from .worker_messages import (
    ANSWERS,
    VERSION,
    Accepted,
    Join,
    PacketError,
    Publish,
    Refused,
    Welcome,
    counter_index,
    open_socket,
    received,
    send,
    unix_path,
)

if TYPE_CHECKING:
    from .counters import LayerCounter

_RETRY_S = 0.01
_NOT_YET = (FileNotFoundError, ConnectionRefusedError, BlockingIOError)
"""The lead does not listen yet, a dead one did, or others are before us."""
_A = TypeVar("_A", Welcome, Accepted)


class WorkerLink:
    """A worker's link to the lead process, for as long as it holds its rank: when the link ends, the lead takes the
    rank for lost. Make one with `join`. Its calls belong to one thread.

    A process that is forked from this one and keeps the link's descriptors does not keep the rank: the lead watches the
    process too.
    """

    def __init__(self, link: socket.socket, address: str, rank: int) -> None:
        self._link: socket.socket | None = link
        self._address = address
        self._lead: int | None = None
        self._counters: SharedMemory | None = None
        self._published = False
        self.rank = rank

    @classmethod
    def join(cls, address: str, rank: int, *, timeout_s: float = 60.0) -> WorkerLink:
        """Join the lead; it need not listen yet.

        Args:
            address: Where the lead listens, "unix:path".
            rank: Which of the messenger's ranks this process is.
            timeout_s: For the lead to be there and to answer.

        Raises:
            AddressError: The address is none of a Unix socket.
            LeadLostError: No lead of the same user answers there in time.
            WorkerRefusedError: The lead does not know this rank, or has it already.
        """
        deadline_s = time.monotonic() + timeout_s
        link = cls(_connect(address, deadline_s), address, rank)
        try:
            link._join(deadline_s)
        except BaseException:
            link.close()
            raise
        return link

    def _join(self, deadline_s: float) -> None:
        pid, uid = peer_of(self._socket)
        if uid != os.geteuid():
            raise LeadLostError(f"user {uid} listens at {self._address}; this process runs as user {os.geteuid()}")
        self._lead = open_process(pid)
        with self._asked(Join(VERSION, self.rank), (), Welcome, deadline_s) as (welcome, descriptors):
            self._welcome = welcome
            self._counters = SharedMemory.import_(descriptors[0], welcome.num_counters * welcome.counter_bytes)

    def publish(
        self,
        groups: Sequence[CacheGroup],
        context: Sequence[ContextBuffer] = (),
        *,
        memories: Sequence[Exportable],
        interfaces: Sequence[str | None] = (None,),
        timeout_s: float = 60.0,
    ) -> None:
        """Hand this rank's memory to the lead, once.

        Args:
            groups: The cache groups, in the order that all ranks have.
            context: Buffers that travel beside the cache.
            memories: What all of their arrays lie in.
            interfaces: Addresses of the rank's network interfaces; None: as the lead is configured.
            timeout_s: For the lead to answer.

        Raises:
            ConfigError: It is too much for one message.
            LayoutError: An array lies outside of the memories.
            LeadLostError: The lead has ended, or does not answer in time.
            LocalProtocolError: The memory has been published, or the link is closed.
            WorkerRefusedError: The lead cannot use it. The link is over.
        """
        if self._published:
            raise LocalProtocolError(f"rank {self.rank} has published its memory; it can do so once")
        message = describe_rank(Rank(Cache(groups), context, interfaces), memories)
        deadline_s = time.monotonic() + timeout_s
        with self._asked(message, [memory.export() for memory in memories], Accepted, deadline_s):
            self._published = True

    def counter(self, stream: int = 0) -> LayerCounter:
        """The layer counter this rank bumps for a stream of the engine; `start` it with the ticket of each step.

        Raises:
            LeadLostError: The lead has ended.
            LocalProtocolError: Rank 0 bumps for all ranks, there is no such stream, or the link is closed.
        """
        from .shared_counters import SharedCounters  # the native layer, which loads libfabric

        if self._counters is None:
            raise LocalProtocolError("the link is closed")
        if not self.lead_alive:
            raise LeadLostError(f"the lead at {self._address} has ended")
        welcome = self._welcome
        if welcome.layer_counters == "lead" and self.rank != 0:
            raise LocalProtocolError(
                f"rank {self.rank} bumps no layer counter: with layer_counters 'lead' rank 0 does it for all"
            )
        if not 0 <= stream < welcome.num_streams:
            raise LocalProtocolError(f"there is no stream {stream}; the lead has {welcome.num_streams}")
        index = counter_index(welcome.layer_counters, welcome.num_ranks, self.rank, stream)
        return SharedCounters.attach(self._counters, welcome.counter_bytes, index)

    @property
    def lead_alive(self) -> bool:
        """Whether the lead still runs and holds the link; False once this side has closed it."""
        return self._link is not None and not self.wait_for_lead_end(0)

    def wait_for_lead_end(self, timeout_s: float | None = None) -> bool:
        """Block until the lead has ended or ended the link, None: for as long as it takes. Returns whether it has.

        Raises:
            LocalProtocolError: The link is closed.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)  # it says nothing more, so that what can be read is the end
        if self._lead is not None:
            poll.register(self._lead, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """End the link: the lead takes the rank for lost. Counters and memory remain usable. May be called again."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._lead is not None:
            os.close(self._lead)
            self._lead = None
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def __enter__(self) -> WorkerLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _socket(self) -> socket.socket:
        if self._link is None:
            raise LocalProtocolError("the link is closed")
        return self._link

    @contextmanager
    def _asked(
        self, message: Join | Publish, descriptors: Sequence[int], expected: type[_A], deadline_s: float
    ) -> Iterator[tuple[_A, list[int]]]:
        """Say something and wait for the answer; the descriptors with it are closed at the end."""
        link = self._socket
        link.settimeout(max(deadline_s - time.monotonic(), _RETRY_S))
        try:
            _send(link, message, descriptors)
            with received(link, ANSWERS) as (answer, passed):
                if answer is None:
                    raise LeadLostError(f"the lead at {self._address} has ended, or has ended the link")
                if isinstance(answer, Refused):
                    raise WorkerRefusedError(self.rank, answer.why)
                if not isinstance(answer, expected) or len(passed) != expected.num_descriptors:
                    raise PacketError(f"{type(answer).__name__} with {len(passed)} descriptors")
                yield answer, passed
        except TimeoutError as error:
            raise LeadLostError(
                f"the lead at {self._address} took no {type(message).__name__}, or did not answer it, in time"
            ) from error
        except PacketError as error:
            raise LeadLostError(f"what answers at {self._address} is no lead of this version: {error}") from error


def _send(link: socket.socket, message: Join | Publish, descriptors: Sequence[int]) -> None:
    try:
        send(link, message, descriptors)
    except PacketError as error:
        raise ConfigError(f"{error}; hold more layers in one array") from error
    except ConnectionError:
        return  # the lead has ended the link; what it said before can still be read


def _connect(address: str, deadline_s: float) -> socket.socket:
    """Connect, and try again until the lead is there."""
    path = unix_path(address)
    while True:
        link = open_socket()
        try:
            link.settimeout(max(deadline_s - time.monotonic(), _RETRY_S))
            link.connect(path)
        except OSError as error:
            link.close()
            if time.monotonic() >= deadline_s or not isinstance(error, _NOT_YET):
                raise LeadLostError(f"no lead could be reached at {address}: {error}") from error
            time.sleep(_RETRY_S)
        else:
            return link
