"""Ranks in worker processes: how a lead starts them and runs them in lockstep. `worker` is what each of them does.

The memory of a rank is allocated by its worker and mapped by the lead, which registers it (`kvmsgr.workers`). Commands
go over pipes; what the ranks add up together they exchange without the lead (`collective`).
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import pickle
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from torch import Tensor

from kvmsgr.workers import WorkerGroup

from .collective import RankLost, connect
from .engine import Pauses, Signal
from .loader import ModelConfig
from .model import Batch
from .spec import NodeOptions
from .worker import (
    JOIN_TIMEOUT_S,
    Done,
    Draft,
    Failed,
    Forward,
    GoOn,
    IsPoisoned,
    Paused,
    Poison,
    rank_timeout_s,
    work,
)

GRACE_S = 3.0  # that a worker gets to end by itself


class WorkerRanks:
    """All ranks of a node, as `engine.Ranks`. Start them with `start`; leaving the `async with` block ends them."""

    def __init__(self, options: NodeOptions, config: ModelConfig) -> None:
        self._options = options
        self._timeout_s = 2 * rank_timeout_s(options)  # the ranks notice first that one of them is late
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._lost: RankLost | None = None
        self._group: WorkerGroup | None = None
        context = multiprocessing.get_context("spawn")
        num_ranks = options.spec.num_ranks
        shared = context.RawArray(ctypes.c_float, 2 * config.num_kv_heads * options.max_rows * config.hidden)
        for rank, peers in enumerate(connect(num_ranks)):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(options, rank, theirs, peers, shared), daemon=True)
            process.start()
            theirs.close()  # these are the worker's: else nobody would see its end
            for peer in peers.values():
                peer.close()
            self._processes.append(process)
            self._pipes.append(ours)

    @classmethod
    async def start(cls, options: NodeOptions, config: ModelConfig) -> WorkerRanks:
        """Start all workers and map their memory.

        Raises:
            RankLost: A worker failed.
            kvmsgr.errors.WorkersError: They did not come together.
        """
        with tempfile.TemporaryDirectory(prefix="kvmsgr-ranks-") as folder:
            ranks = cls(options, config)
            try:
                await ranks._join(f"unix:{Path(folder, 'lead')}")
            except BaseException:
                ranks.close()
                raise
        return ranks

    async def _join(self, address: str) -> None:
        """Wait until all have joined. A worker says nothing before it is told to, unless it fails."""
        loop, options = asyncio.get_running_loop(), self._options
        early = asyncio.Event()
        for rank, pipe in enumerate(self._pipes):
            self._send(rank, address)
            loop.add_reader(pipe.fileno(), early.set)
        counters: Literal["lead", "rank"] = "rank" if options.every_rank_bumps else "lead"
        joining = asyncio.ensure_future(
            WorkerGroup.listen(address, options.spec.num_ranks, layer_counters=counters, timeout_s=JOIN_TIMEOUT_S)
        )
        failing = asyncio.ensure_future(early.wait())
        try:
            await asyncio.wait([joining, failing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (failing, joining):
                task.cancel()
            for pipe in self._pipes:
                loop.remove_reader(pipe.fileno())
        await asyncio.wait([joining])
        if not joining.cancelled() and joining.exception() is None:
            self._group = joining.result()
        if early.is_set():
            self._gather({})  # raises what it said
        await joining

    @property
    def group(self) -> WorkerGroup:
        """The workers as kvmsgr knows them: their memory and layer counters, for `Messenger.open`."""
        assert self._group is not None
        return self._group

    def forward(self, batches: Sequence[Batch], signals: Sequence[Signal], pauses: Pauses) -> Tensor:
        for signal in signals:
            signal.start()  # the layer counters are shared: the workers bump what is started here
        self._send_all(Forward(tuple(batches), bool(signals), tuple(pauses)))
        hidden = self._gather(pauses)[0]
        assert isinstance(hidden, Tensor)
        return hidden

    def draft(self, states: Tensor, batches: Sequence[Batch]) -> Tensor:
        self._send_all(Draft(states, tuple(batches)))
        expected = self._gather({})[0]
        assert isinstance(expected, Tensor)
        return expected

    def poison(self, group: int, pages: Sequence[int]) -> None:
        self._send_all(Poison(group, tuple(pages)))
        self._gather({})

    def is_poisoned(self, group: int, pages: Sequence[int]) -> bool:
        self._send_all(IsPoisoned(group, tuple(pages)))
        return all(self._gather({}))

    def _send_all(self, message: object) -> None:
        for rank in range(len(self._pipes)):
            self._send(rank, message)

    def _send(self, rank: int, message: object) -> None:
        if self._lost:
            raise self._lost
        try:
            self._pipes[rank].send_bytes(pickle.dumps(message))
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended(rank) from None

    def _gather(self, pauses: Pauses) -> list[Tensor | bool | None]:
        """Wait until every worker is done. Returns the result of each."""
        found: list[Tensor | bool | None] = [None] * len(self._pipes)
        busy = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while busy:
            ready = [pipe for pipe in self._pipes if pipe in wait(list(busy), self._timeout_s)]
            if not ready:
                late = sorted(busy.values())
                self._lost = RankLost(late[0], f"ranks {late} were not done within {self._timeout_s:g} s")
                raise self._lost
            for pipe in ready:
                answer = self._receive(busy[pipe])
                match answer:
                    case Paused(layer):
                        pauses[layer]()
                        self._send(busy[pipe], GoOn())
                    case Done(result):
                        found[busy.pop(pipe)] = result
        return found

    def _receive(self, rank: int) -> object:
        try:
            answer = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._ended(rank) from None
        if isinstance(answer, Failed):
            self._lost = RankLost(answer.rank, answer.why)
            raise self._lost
        return answer

    def _ended(self, rank: int) -> RankLost:
        process = self._processes[rank]
        process.join(GRACE_S)
        self._lost = RankLost(rank, f"its process {process.pid} ended (exit code {process.exitcode})")
        return self._lost

    def close(self) -> None:
        """End all workers."""
        if self._group:
            self._group.close()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE_S)
            process.kill()
            process.join()

    async def __aenter__(self) -> WorkerRanks:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
