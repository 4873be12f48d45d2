"""The lead's side of its worker processes: the ranks that they hold, and that one is lost."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import structlog

from kvmsgr.device.cache import Rank
from kvmsgr.device.handover import build_rank
from kvmsgr.device.shared import import_memory
from kvmsgr.device.shared_counters import SharedCounters
from kvmsgr.device.worker_messages import (
    VERSION,
    Accepted,
    Join,
    LayerCounters,
    Publish,
    Request,
    Welcome,
    num_counters,
    open_socket,
    unix_path,
)
from kvmsgr.errors import (
    AddressError,
    ConfigError,
    KvmsgrError,
    LayoutError,
    SharedMemoryError,
    WorkerLostError,
    WorkerRefusedError,
    WorkersMissingError,
)

from .worker_process import WorkerProcess

log = structlog.get_logger("kvmsgr")

_MAX_RANKS = 1024
_MAX_NAMELESS = 64  # processes that have connected and not said who they are
_MAX_NAMED = 8  # of those that were turned away, in a message


class WorkerGroup:
    """The worker processes that hold the ranks of one messenger, as their lead sees them. Make one with `listen`.

    A worker that dies is named to the callbacks of `on_lost`. Its memory stays mapped, so that what is being read of it
    or written to it does no harm: end the requests, and close the messenger and this group. A rank cannot come back; to
    start over, listen again.

    All calls belong to the event loop that listened.
    """

    def __init__(self, num_ranks: int, layer_counters: LayerCounters, num_streams: int, num_slots: int) -> None:
        if not 1 <= num_ranks <= _MAX_RANKS:
            raise ConfigError(f"num_ranks is {num_ranks}; it must be in 1..{_MAX_RANKS}")
        if layer_counters not in get_args(LayerCounters):
            raise ConfigError(f"layer_counters is {layer_counters!r}; known are {', '.join(get_args(LayerCounters))}")
        if num_streams < 1:
            raise ConfigError(f"num_streams is {num_streams}; an engine has at least one")
        self.counters = SharedCounters(num_counters(layer_counters, num_ranks, num_streams), num_slots)
        self._welcome = Welcome(layer_counters, num_ranks, num_streams, self.counters.counter_bytes)
        self._workers: dict[int, WorkerProcess] = {}
        self._nameless: set[WorkerProcess] = set()
        self._turned_away: list[str] = []
        self._losses: list[WorkerLostError] = []
        self._callbacks: list[Callable[[WorkerLostError], object]] = []
        self._loop = asyncio.get_running_loop()
        self._complete: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def listen(
        cls,
        address: str,
        num_ranks: int,
        *,
        layer_counters: LayerCounters = "lead",
        num_streams: int = 1,
        num_slots: int = 64,
        timeout_s: float = 60.0,
    ) -> WorkerGroup:
        """Wait until the process of every rank has joined and handed over its memory; nobody is let in afterwards.

        Args:
            address: Where they join, "unix:path". Only this user can connect; still, keep it in a folder of your own.
                (An abstract address would have no permissions at all.)
            num_ranks: How many.
            layer_counters: Who bumps them, as in `Config.layer_counters`.
            num_streams: Streams of the engine, each with its layer counter ("lead"), or one a rank ("rank").
            num_slots: Steps that may be outstanding at a time on each counter.
            timeout_s: For all of them.

        Raises:
            AddressError: The address is in use, or none of a Unix socket.
            ConfigError: A number is out of bounds.
            WorkersMissingError: Not all came in time.
            WorkerRefusedError: A rank handed over what cannot be used.
            WorkerLostError: The process of a rank ended meanwhile.
        """
        path = unix_path(address)
        group = cls(num_ranks, layer_counters, num_streams, num_slots)
        try:
            listener = _bind(path)
            group._loop.add_reader(listener.fileno(), group._accept, listener)
            try:
                async with asyncio.timeout(timeout_s):
                    await group._complete
            except TimeoutError:
                raise group._missing(timeout_s) from None
            finally:
                group._loop.remove_reader(listener.fileno())
                _unbind(listener, path)
        except BaseException:
            group.close()
            raise
        group._dismiss("all ranks have their process")
        log.info("workers joined", address=address, pids=group.pids)
        return group

    @property
    def ranks(self) -> list[Rank]:
        """The ranks by number, for `Messenger.open`; their addresses are of this process."""
        return [worker.rank for _, worker in sorted(self._workers.items()) if worker.rank is not None]

    @property
    def pids(self) -> list[int]:
        """Process of each rank; 0 where it cannot be seen from here."""
        return [worker.pid for _, worker in sorted(self._workers.items())]

    @property
    def losses(self) -> list[WorkerLostError]:
        """Ranks that are lost, in the order in which it was noticed."""
        return list(self._losses)

    def on_lost(self, callback: Callable[[WorkerLostError], object]) -> None:
        """Have `callback` called, in the event loop, for each rank that is lost, those that are already included."""
        self._callbacks.append(callback)
        for error in self._losses:
            self._loop.call_soon(callback, error)

    def close(self) -> None:
        """End the links to the workers, who take that for the lead's end. The ranks stay mapped as long as they are
        used. May be called again."""
        self._dismiss("the lead ends")
        for worker in self._workers.values():
            worker.close()
        self.counters.memory.close()

    async def __aenter__(self) -> WorkerGroup:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    # What workers do

    def worker_said(self, worker: WorkerProcess, message: Request, descriptors: Sequence[int]) -> None:
        match message:
            case Join():
                self._joined(worker, message)
            case Publish():
                self._published(worker, message, descriptors)

    def worker_babbled(self, worker: WorkerProcess, why: str) -> None:
        self._refuse(worker, why)

    def worker_ended(self, worker: WorkerProcess, how: str) -> None:
        if worker.number is None:
            self._nameless.discard(worker)
            self._turned_away.append(f"pid {worker.pid} named no rank: {how}")
        else:
            self._lost(WorkerLostError(worker.number, worker.pid, how))

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(AddressError(f"no worker can connect: {error}"))
            return
        worker = WorkerProcess(link, self)
        self._nameless.add(worker)
        if worker.user != os.geteuid():
            self._refuse(worker, f"it runs as user {worker.user}; the lead as user {os.geteuid()}")
        elif len(self._nameless) > _MAX_NAMELESS:
            self._refuse(worker, f"{_MAX_NAMELESS} others have connected and not said which rank they are")

    def _joined(self, worker: WorkerProcess, message: Join) -> None:
        rank, num_ranks = message.rank, self._welcome.num_ranks
        if message.version != VERSION:
            self._refuse(worker, f"it speaks version {message.version}, the lead {VERSION}; run one kvmsgr in both")
        elif worker.number is not None:
            self._refuse(worker, f"it joined as rank {worker.number}, and then as rank {rank}")
        elif not 0 <= rank < num_ranks:
            self._refuse(worker, f"it is rank {rank}; there are ranks 0 to {num_ranks - 1}")
        elif rank in self._workers:
            self._refuse(worker, f"it is rank {rank}, which pid {self._workers[rank].pid} has joined as")
        else:
            worker.number = rank
            self._workers[rank] = worker
            self._nameless.discard(worker)
            worker.send(self._welcome, [self.counters.memory.export()])

    def _published(self, worker: WorkerProcess, message: Publish, descriptors: Sequence[int]) -> None:
        if worker.number is None:
            self._refuse(worker, "it published memory before it said which rank it is")
        elif worker.rank is not None:
            self._refuse(worker, "it published memory a second time")
        else:
            try:
                worker.rank = _rank_of(message, descriptors)
            except (LayoutError, SharedMemoryError) as error:
                self._refuse(worker, str(error))
                return
            worker.send(Accepted())
            if len(self.ranks) == self._welcome.num_ranks and not self._complete.done():
                self._complete.set_result(None)

    def _refuse(self, worker: WorkerProcess, why: str) -> None:
        """One that is no rank is turned away, and another may come in its place. A rank is over."""
        worker.refuse(why)
        log.warning("worker refused", pid=worker.pid, rank=worker.number, why=why)
        if worker.number is None:
            self._nameless.discard(worker)
            self._turned_away.append(f"pid {worker.pid} was turned away: {why}")
        elif self._complete.done():
            self._lost(WorkerLostError(worker.number, worker.pid, f"it was turned away: {why}"))
        else:
            self._fail(WorkerRefusedError(worker.number, why))

    def _lost(self, error: WorkerLostError) -> None:
        if not self._complete.done():
            self._fail(error)
            return
        log.error("worker lost", rank=error.rank, pid=error.pid, how=error.how)
        self._losses.append(error)
        for callback in self._callbacks:
            self._loop.call_soon(callback, error)

    def _fail(self, error: KvmsgrError) -> None:
        if not self._complete.done():
            self._complete.set_exception(error)

    def _dismiss(self, why: str) -> None:
        for worker in self._nameless:
            worker.refuse(why)
        self._nameless.clear()

    def _missing(self, timeout_s: float) -> WorkersMissingError:
        missing = [
            number
            for number in range(self._welcome.num_ranks)
            if number not in self._workers or self._workers[number].rank is None
        ]
        silent = [
            f"rank {number} (pid {self._workers[number].pid}) has joined and published nothing"
            for number in missing
            if number in self._workers
        ]
        said = [f"not all came within {timeout_s:g} s", *silent, *self._turned_away[-_MAX_NAMED:]]
        return WorkersMissingError(tuple(missing), "; ".join(said))


def _rank_of(message: Publish, descriptors: Sequence[int]) -> Rank:
    if len(descriptors) != len(message.memories):
        raise SharedMemoryError(f"{len(message.memories)} memories were named, and {len(descriptors)} handed over")
    return build_rank(
        message,
        [
            import_memory(memory.kind, descriptor, memory.num_bytes)
            for memory, descriptor in zip(message.memories, descriptors, strict=True)
        ],
    )


def _bind(path: str) -> socket.socket:
    """A socket that only this user can connect to, from the first moment on. One of a dead process is replaced."""
    bound = open_socket()
    try:
        if Path(path).is_socket() and not _answers(path):
            Path(path).unlink(missing_ok=True)
        bound.bind(path)
        Path(path).chmod(0o600)  # before it listens, so nobody is early
        bound.listen(_MAX_RANKS)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise AddressError(f"workers cannot join at unix:{path}: {error}; choose another path") from error
    return bound


def _unbind(bound: socket.socket, path: str) -> None:
    bound.close()
    Path(path).unlink(missing_ok=True)


def _answers(path: str) -> bool:
    with open_socket() as probe:
        return probe.connect_ex(path) == 0
