"""Child processes that never outlive the demo, and plain objects sent to and from them."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import torch

GRACE_S = 3.0  # that a child gets to end by itself, and again to obey SIGTERM


@dataclass(frozen=True)
class Failure:
    """What ended a role. `texts` are "type of the error: its message", one for each error."""

    role: str
    texts: tuple[str, ...]


class DemoFailed(Exception):
    """A child failed, died, or the time ran out."""


class Channel:
    """A child's end of its pipe. Objects travel as plain pickles: tensors by value."""

    def __init__(self, role: str, pipe: Connection) -> None:
        self._role, self._pipe, self._failed = role, pipe, False

    def send(self, message: object) -> None:
        self._pipe.send_bytes(pickle.dumps(message))

    async def receive(self) -> Any:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._pipe.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._pipe.fileno())
        return pickle.loads(self._pipe.recv_bytes())

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the part of a role that SIGTERM may cut short, and tell the parent about an error at once.

        What the caller does afterwards, such as closing its messenger, is not cut short any more.
        """
        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with self.reporting():
            await task

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the parent about an error, once."""
        try:
            yield
        except Exception as error:
            if not self._failed:
                self._failed = True
                self.send(Failure(self._role, tuple(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))))
            raise


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside a group of errors, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


Role = Callable[[Channel, Any], Coroutine[Any, Any, None]]


@dataclass(frozen=True, eq=False)
class Child:
    """One process, our end of its pipe, and what it has sent that nobody asked for yet."""

    name: str
    process: BaseProcess
    pipe: Connection
    inbox: deque[object] = field(default_factory=deque)

    def take_in(self) -> bool:
        """Read one message; False when the child has ended in order and will send no more.

        Raises:
            DemoFailed: The message tells of a failure, or the child died.
        """
        try:
            message = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_S)
            if self.process.exitcode == 0:
                return False
            raise DemoFailed(f"the {self.name} process died (exit code {self.process.exitcode})") from None
        if isinstance(message, Failure):
            raise DemoFailed("\n".join(f"{message.role}: {text}" for text in message.texts))
        self.inbox.append(message)
        return True


class Children:
    """The processes of the demo. Leaving the `with` block ends them all, whatever happened.

    Args:
        time_limit_s: For everything together; a child that is stuck ends by itself shortly after.
        log_folder: Where each child's output goes; None: to our stderr.
    """

    def __init__(self, time_limit_s: float, log_folder: Path | None) -> None:
        self._deadline = time.monotonic() + time_limit_s
        self._time_limit_s, self._log_folder = time_limit_s, log_folder
        self._children: dict[str, Child] = {}
        self._talking: list[Child] = []

    def start(self, name: str, role: Role, options: object) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        log = self._log_folder / f"{name}.log" if self._log_folder else None
        arguments = (name, role, options, theirs, log, self._time_limit_s)
        process = context.Process(target=child_main, name=name, args=arguments)  # no daemon: it may have children
        process.start()
        theirs.close()
        self._children[name] = Child(name, process, ours)
        self._talking.append(self._children[name])

    def send(self, name: str, message: object) -> None:
        self._children[name].pipe.send_bytes(pickle.dumps(message))

    def receive(self, name: str) -> Any:
        """The next message of a child.

        Raises:
            DemoFailed: Any of the children failed or died, or the time limit passed.
        """
        inbox = self._children[name].inbox
        while not inbox:
            ready = wait([child.pipe for child in self._talking], self._deadline - time.monotonic())
            if not ready:
                raise DemoFailed(f"no answer from {name} within the time limit of {self._time_limit_s:g} s")
            for child in [child for child in self._talking if child.pipe in ready]:
                if not child.take_in():
                    self._talking.remove(child)
                    if child.name == name:
                        raise DemoFailed(f"the {name} process ended without an answer")
        return inbox.popleft()

    def idle(self, seconds: float, *files: IO[str]) -> None:
        """Wait until one of `files` can be read, a child says something or dies, or the time is over."""
        wait([*(child.pipe for child in self._talking), *(file.fileno() for file in files)], seconds)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        children = self._children.values()
        gently = [] if kind else [None]  # an error leaves no time to end by oneself
        for end in [*gently, BaseProcess.terminate, BaseProcess.kill]:
            for child in children:
                if end is not None:
                    end(child.process)
            deadline = time.monotonic() + GRACE_S
            for child in children:
                child.process.join(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.pipe.close()


def child_main(name: str, role: Role, options: object, pipe: Connection, log: Path | None, time_limit_s: float) -> None:
    """What runs in a child: one role, until it is done, it fails, its parent is gone, or the time is up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us in order
    threading.Thread(target=follow_parent, daemon=True).start()
    if log:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    os.dup2(2, 1)  # structlog prints to stdout; that belongs to the report
    faulthandler.dump_traceback_later(time_limit_s + 2 * GRACE_S, exit=True)
    torch.set_num_threads(1)
    channel = Channel(name, pipe)
    with channel.reporting():
        asyncio.run(role(channel, options))


def follow_parent() -> None:
    """End this process when its parent is gone, however that came about."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
