"""One worker process as its lead sees it: what it says, and that it ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Protocol

from kvmsgr.device.cache import Rank
from kvmsgr.device.process import how_it_ended, open_process, peer_of
from kvmsgr.device.worker_messages import REQUESTS, Answer, PacketError, Refused, Request, received, send

PATIENCE_S = 0.05
"""A process that dies closes its sockets shortly before it has ended and can be asked how."""


class Listener(Protocol):
    """Who hears what a worker does."""

    def worker_said(self, worker: WorkerProcess, message: Request, descriptors: Sequence[int]) -> None: ...
    def worker_babbled(self, worker: WorkerProcess, why: str) -> None: ...
    def worker_ended(self, worker: WorkerProcess, how: str) -> None: ...


class WorkerProcess:
    """A process that has connected to the lead. Its listener hears what it says and, once, that it ended; nothing after
    `close`.

    The process is watched beside its socket: a child it has forked may hold the socket open, and only the process says
    how it ended.
    """

    def __init__(self, link: socket.socket, listener: Listener) -> None:
        self.pid, self.user = peer_of(link)
        self.number: int | None = None  # of its rank, once it has joined
        self.rank: Rank | None = None  # once it has published its memory
        self._link = link
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._patience: asyncio.TimerHandle | None = None
        self._closed = False
        self._process = open_process(self.pid)
        link.setblocking(False)
        self._loop.add_reader(link.fileno(), self._readable)
        if self._process is not None:
            self._loop.add_reader(self._process, self._died)

    def send(self, answer: Answer, descriptors: Sequence[int] = ()) -> None:
        """Answer. One that ended meanwhile is not missed here: that it did is noticed anyway."""
        try:
            send(self._link, answer, descriptors)
        except OSError:
            return

    def refuse(self, why: str) -> None:
        """Say why, and end the link."""
        self.send(Refused(why))
        self.close()

    def close(self) -> None:
        """End the link; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self._patience is not None:
            self._patience.cancel()
        self._loop.remove_reader(self._link.fileno())
        self._link.close()
        if self._process is not None:
            self._loop.remove_reader(self._process)
            os.close(self._process)

    def _readable(self) -> None:
        try:
            with received(self._link, REQUESTS) as (message, descriptors):
                if message is not None:
                    self._listener.worker_said(self, message, descriptors)
                    return
        except BlockingIOError:
            return
        except PacketError as error:
            self._listener.worker_babbled(self, str(error))
            return
        self._hung_up()

    def _hung_up(self) -> None:
        self._loop.remove_reader(self._link.fileno())
        if self._process is None:
            self._end("it has closed its link; its process cannot be seen from here")
        else:
            self._patience = self._loop.call_later(
                PATIENCE_S, self._end, "it has closed its link, and its process runs on"
            )

    def _died(self) -> None:
        assert self._process is not None
        self._end(how_it_ended(self._process))

    def _end(self, how: str) -> None:
        self.close()
        self._listener.worker_ended(self, how)
