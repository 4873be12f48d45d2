"""kvmsgr with worker processes: python docs/workers.py

The parent decodes, with one rank. A lead process prefills, with two: tensor parallelism, half of the heads on each.
Their caches lie in worker processes, which compute; the lead maps them and moves them.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import uvloop

import kvmsgr
from kvmsgr.workers import SharedMemory, WorkerGroup, WorkerLink

LAYERS, PAGES, PLANES, HEADS, PAGE_TOKENS, HEAD_DIM = 4, 64, 2, 4, 16, 32
DIMS = "layer page plane head token dim"
RANKS = 2
CHUNK = 24

spawn = multiprocessing.get_context("spawn")


def work(rank: int, address: str, pipe: Connection) -> None:
    """A worker: no event loop, no libfabric but for the layer counter."""
    shape = (LAYERS, PAGES, PLANES, HEADS // RANKS, PAGE_TOKENS, HEAD_DIM)
    memory = SharedMemory.allocate(math.prod(shape) * np.float32().nbytes)
    kv = memory.buffer.view(np.float32).reshape(shape)  # torch.frombuffer(memory.buffer, ...) does as well
    heads = range(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
    group = kvmsgr.CacheGroup.from_tensors([kv], DIMS, head_start=heads.start, total_heads=HEADS)
    with WorkerLink.join(address, rank) as link:
        link.publish([group], memories=[memory])
        counter = link.counter()  # in memory that the lead's polling thread watches
        while (order := pipe.recv()) is not None:  # in a real system: what the scheduler broadcasts
            ticket, start, tokens, pages = order
            counter.start(ticket)
            for layer in range(LAYERS):
                for position, token in enumerate(tokens, start):
                    page, offset = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                    for index, head in enumerate(heads):
                        kv[layer, page, :, index, offset] = value(token, layer, head)
                counter.bump()  # this rank's part of the layer goes now


def value(token: int, layer: int, head: int) -> float:
    return token + layer / 8 + head / 64


async def prefill(pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:  # nobody else can enter it
        address = f"unix:{folder}/workers"
        orders = [start_worker(rank, address) for rank in range(RANKS)]
        async with await WorkerGroup.listen(address, RANKS, layer_counters="rank") as workers:
            config = kvmsgr.Config(name="prefill", model="toy@1", layer_counters="rank")
            messenger = await kvmsgr.Messenger.open(config, ranks=workers.ranks, counters=workers.counters)
            workers.on_lost(lambda lost: messenger.rank_lost(lost.rank, f"pid {lost.pid}: {lost.how}"))
            async with messenger:
                pipe.send(messenger.descriptor)
                free = iter(range(PAGES))
                async for request in messenger.requests():
                    request.accept()
                    serve(messenger, request, orders, free)
                    if request.payload == b"last":
                        await request.outcome()
                        break
        for order in orders:
            order.send(None)


def start_worker(rank: int, address: str) -> Connection:
    ours, theirs = multiprocessing.Pipe()
    spawn.Process(target=work, args=(rank, address, theirs)).start()
    return ours


def serve(
    messenger: kvmsgr.Messenger, request: kvmsgr.PrefillRequest, orders: list[Connection], free: Iterator[int]
) -> None:
    end = request.num_tokens - 1  # the decoder runs the last token
    pages = [next(free) for _ in range(-(-end // PAGE_TOKENS))]
    for start in range(0, end, CHUNK):
        stop = min(start + CHUNK, end)
        step = messenger.begin_step([kvmsgr.Chunk(request, start, stop, [kvmsgr.Span(0, 0, pages)])])
        for order, signal in zip(orders, step.signals, strict=True):  # with layer_counters="lead": step.signal, rank 0
            order.send((signal.ticket, start, request.tokens[start:stop], pages))


async def decode(prefiller: kvmsgr.Descriptor) -> None:
    kv = np.full((LAYERS, PAGES, PLANES, HEADS, PAGE_TOKENS, HEAD_DIM), np.nan, np.float32)
    cache = kvmsgr.Cache([kvmsgr.CacheGroup.from_tensors([kv], DIMS)])
    async with await kvmsgr.Messenger.open(kvmsgr.Config(name="decode", model="toy@1"), cache) as messenger:
        for number in range(3):
            tokens = list(range(100 * number, 100 * number + 50))
            pages = [7 * number + i for i in range(4)]
            fetch = messenger.fetch(
                f"request-{number}", [prefiller], tokens, [kvmsgr.Span(0, 0, pages)], payload=b"last" * (number == 2)
            )
            arrival = await fetch
            for layer in range(LAYERS):
                for head in range(HEADS):
                    got = kv[layer, pages, :, head].swapaxes(1, 2).reshape(-1, PLANES, HEAD_DIM)[: arrival.num_tokens]
                    wanted = [value(token, layer, head) for token in tokens[:-1]]
                    assert (got == np.array(wanted, np.float32)[:, None, None]).all()
            arrival.release()
            await fetch.released()
            print(f"request-{number}: {arrival.num_tokens} tokens arrived from {RANKS} workers, all right")


def lead(pipe: Connection) -> None:
    uvloop.run(prefill(pipe))


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    process = spawn.Process(target=lead, args=(theirs,))
    process.start()
    uvloop.run(decode(ours.recv()))
    process.join()
