"""What the worker process of a rank does: allocate the rank's memory, hand it over, and compute when it is told to."""

from __future__ import annotations

import ctypes
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

import kvmsgr
from kvmsgr.workers import SharedMemory, WorkerLink

from .cache import PagedCache, num_elements
from .collective import Collective, RankLost
from .model import Batch, Shard
from .models import load
from .node import describe
from .processes import follow_parent
from .spec import NodeOptions

JOIN_TIMEOUT_S = 60.0
RANK_TIMEOUT_S = 20.0  # that a rank may be late for a meeting


@dataclass(frozen=True)
class Forward:
    """To a worker: run a forward pass. `signalled`: layer counters are started; `pauses`: layers before whose signal
    rank 0 asks first."""

    batches: tuple[Batch, ...]
    signalled: bool
    pauses: tuple[int, ...]


@dataclass(frozen=True)
class Draft:
    """To a worker: run the draft layer alone."""

    states: Tensor
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class Poison:
    """To a worker: fill pages of a group with NaN."""

    group: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class IsPoisoned:
    """To a worker: are pages of a group still NaN?"""

    group: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class GoOn:
    """To rank 0, which is paused."""


@dataclass(frozen=True)
class Paused:
    """From rank 0: it is about to signal a layer."""

    layer: int


@dataclass(frozen=True)
class Done:
    """From a worker: the command is done. `result`: the hidden states that rank 0 computed, or an answer."""

    result: Tensor | bool | None


@dataclass(frozen=True)
class Failed:
    """From a worker: it cannot go on, because of itself or of another rank."""

    rank: int
    why: str


def rank_timeout_s(options: NodeOptions) -> float:
    """How long the others wait for a rank."""
    return RANK_TIMEOUT_S + options.hold_s


def work(
    options: NodeOptions,
    rank: int,
    pipe: Connection,
    peers: Mapping[int, socket.socket],
    terms: ctypes.Array[ctypes.c_float],
) -> None:
    """The life of a worker process: until the lead closes the pipe.

    Args:
        options: The node's.
        rank: Which one this is.
        pipe: To the lead; the address where it listens comes first, then commands.
        peers: To each other rank.
        terms: Shared memory of the `Collective`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the lead ends us in order
    threading.Thread(target=follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    with ExitStack() as until_the_end:
        try:
            serve(options, rank, pipe, peers, torch.frombuffer(terms, dtype=torch.float32), until_the_end)
        except EOFError:
            return  # the lead is done with us
        except RankLost as lost:
            failed = Failed(lost.rank, lost.why)
        except Exception as error:  # noqa: BLE001 - whatever it is, the lead must know
            traceback.print_exc()
            failed = Failed(rank, f"{type(error).__name__}: {error}")
        try:
            pipe.send_bytes(pickle.dumps(failed))
            pipe.poll(None)  # so that the lead hears of whoever was lost first, not of us
        except BrokenPipeError:
            return


def serve(
    options: NodeOptions,
    rank: int,
    pipe: Connection,
    peers: Mapping[int, socket.socket],
    terms: Tensor,
    until_the_end: ExitStack,
) -> None:
    address = pickle.loads(pipe.recv_bytes())
    spec = options.spec
    checkpoint = load(options.model, draft=spec.has_draft)
    config = checkpoint.config
    memories: list[SharedMemory] = []

    def shared(num_floats: int) -> Tensor:
        memories.append(SharedMemory.allocate(4 * num_floats))
        return torch.frombuffer(memories[-1].buffer, dtype=torch.float32)

    caches = [
        PagedCache(config, spec, group, num_pages, rank, shared(num_elements(config, spec, group, num_pages)))
        for group, num_pages in zip(spec.groups, options.num_pages, strict=True)
    ]
    context = []
    if rank == 0:  # all ranks have the same hidden states; one of them is enough
        states = shared(options.num_requests * config.hidden).fill_(torch.nan)
        context.append(kvmsgr.ContextBuffer("hidden", states.view(options.num_requests, config.hidden)))

    link = until_the_end.enter_context(WorkerLink.join(address, rank, timeout_s=JOIN_TIMEOUT_S))
    groups, interfaces = describe(config, spec, caches), (None,) * options.num_interfaces
    link.publish(groups, context, memories=memories, interfaces=interfaces)
    counter = link.counter() if options.every_rank_bumps or rank == 0 else None
    collective = Collective(rank, peers, terms.view(2, config.num_kv_heads, -1), rank_timeout_s(options))
    shard = Shard(checkpoint, spec, rank, caches)

    def forward(command: Forward) -> Tensor:
        def after_layer(layer: int) -> None:
            if rank == 0 and layer in command.pauses:
                pipe.send_bytes(pickle.dumps(Paused(layer)))
                pipe.recv_bytes()  # GoOn
            if counter and command.signalled:
                counter.bump()

        return shard.forward(command.batches, collective.exchange, after_layer)

    while True:
        command: Forward | Draft | Poison | IsPoisoned = pickle.loads(pipe.recv_bytes())
        result: Tensor | bool | None = None
        match command:
            case Forward():
                hidden = forward(command)
                result = hidden if rank == 0 else None
            case Draft(states, batches):
                hidden = shard.draft(states, batches, collective.exchange)
                result = hidden if rank == 0 else None
            case Poison(group, pages):
                caches[group].poison(pages)
            case IsPoisoned(group, pages):
                result = caches[group].is_poisoned(pages)
        pipe.send_bytes(pickle.dumps(Done(result)))
