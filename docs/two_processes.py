"""kvmsgr between two processes, with a toy model: python docs/two_processes.py

The parent decodes, its child prefills. The "model" fills each layer of the cache with numbers that can be checked.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import uvloop

import kvmsgr

LAYERS, PAGES, PLANES, HEADS, PAGE_TOKENS, HEAD_DIM, HIDDEN = 4, 64, 2, 2, 16, 32, 64
SLOTS = 4  # context slots: as many requests with context are under way at once
CHUNK = 24


async def open_messenger(name: str) -> tuple[kvmsgr.Messenger, npt.NDArray[np.float32]]:
    kv = np.full((LAYERS, PAGES, PLANES, HEADS, PAGE_TOKENS, HEAD_DIM), np.nan, np.float32)
    cache = kvmsgr.Cache([kvmsgr.CacheGroup.from_tensors([kv], "layer page plane head token dim")])
    context = [kvmsgr.ContextBuffer("hidden", np.zeros((SLOTS, HIDDEN), np.float32))]
    return await kvmsgr.Messenger.open(kvmsgr.Config(name=name, model="toy@1"), cache, context), kv


async def prefill(pipe: Connection) -> None:
    messenger, kv = await open_messenger("prefill")
    async with messenger:
        pipe.send(messenger.descriptor)  # plain data: in a real system a router hands it on
        free = iter(range(PAGES))
        async for request in messenger.requests():
            request.accept()
            serve(messenger, kv, request, free)
            if request.payload == b"last":
                await request.outcome()
                return


def serve(
    messenger: kvmsgr.Messenger, kv: npt.NDArray[np.float32], request: kvmsgr.PrefillRequest, free: Iterator[int]
) -> None:
    end = request.num_tokens - 1  # the decoder runs the last token
    pages = [next(free) for _ in range(-(-end // PAGE_TOKENS))]
    for start in range(0, end, CHUNK):
        stop = min(start + CHUNK, end)
        step = messenger.begin_step([kvmsgr.Chunk(request, start, stop, [kvmsgr.Span(0, 0, pages)])])
        step.signal.start()
        for layer in range(LAYERS):
            for position in range(start, stop):
                page, offset = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                kv[layer, page, :, :, offset] = request.tokens[position] + layer / 10
            step.signal.bump()  # this layer's pages go now
        if step.signals_context:
            request.context["hidden"].view(np.float32)[:] = request.tokens[end - 1]
            step.signal.bump()


async def decode(prefiller: kvmsgr.Descriptor) -> None:
    messenger, kv = await open_messenger("decode")
    async with messenger:
        for number in range(3):
            tokens = np.arange(100 * number, 100 * number + 50, dtype=np.uint32)
            pages = [7 * number + i for i in range(4)]
            fetch = messenger.fetch(
                f"request-{number}", [prefiller], tokens, [kvmsgr.Span(0, 0, pages)], payload=b"last" * (number == 2)
            )
            try:
                arrival = await fetch
            except kvmsgr.errors.BusyError as busy:
                print(f"come back in {busy.retry_after_s} s")
                continue
            except kvmsgr.errors.TransferError as error:
                print(f"failed: {error.reason}: {error}")
                continue
            for layer in range(LAYERS):
                got = kv[layer, pages].swapaxes(1, 3).reshape(-1, HEADS, PLANES, HEAD_DIM)[: arrival.num_tokens]
                assert (got == (tokens[:-1] + np.float32(layer / 10))[:, None, None, None].astype(np.float32)).all()
            assert (arrival.context["hidden"].view(np.float32) == tokens[-2]).all()
            arrival.release()  # the context slot may serve another request
            await fetch.released()  # and these pages too, once they have been decoded from
            print(f"request-{number}: {arrival.num_tokens} tokens arrived over {messenger.fabric.provider}, all right")


def child(pipe: Connection) -> None:
    uvloop.run(prefill(pipe))  # or asyncio.run


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    uvloop.run(decode(ours.recv()))
    process.join()
