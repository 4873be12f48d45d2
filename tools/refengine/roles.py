"""What the two processes of the demo do, and what they tell the one that started them."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass

import torch

import kvmsgr
from kvmsgr.inspect import landed_rows

from .cache import Layout, PagedCache
from .decode import DecodeNode, Delivery
from .engine import Engine
from .loader import load
from .node import open_messenger
from .prefill import PrefillNode
from .processes import Channel


@dataclass(frozen=True)
class RoleOptions:
    """Options of one process. `num_pages` and `seed` differ between the two, the rest need not.

    `hold_s`: the longest that the prefiller stands still once, in the middle of a step; 0: it does not.
    """

    num_pages: int
    num_requests: int
    seed: int
    page_tokens: int
    layout: Layout
    fabric: str
    step_tokens: int
    new_tokens: int
    post_at_end: bool = False
    corrupt_write: int | None = None
    drop_write: int | None = None
    hold_s: float = 0.0


@dataclass(frozen=True)
class Ready:
    """A process has opened its messenger. `fabric` is the provider and why it was taken."""

    descriptor: kvmsgr.Descriptor
    fabric: str
    state_path: str
    pid: int


@dataclass(frozen=True)
class Serve:
    """To the prefiller: serve, and look into the decoder's state file to see how much has landed."""

    decoder_state_path: str


@dataclass(frozen=True)
class Generate:
    """To the decoder: answer these prompts (request id to token ids), prefilled there, all at the same time."""

    source: kvmsgr.Descriptor
    prompts: dict[str, list[int]]


@dataclass(frozen=True)
class Held:
    """From the prefiller: it stands still in the middle of a step."""

    num_signals: int
    num_layers: int
    num_alive: int


@dataclass(frozen=True)
class GoOn:
    """To the prefiller, when it is held."""


@dataclass(frozen=True)
class Stop:
    """To the prefiller: everything has been generated."""


@dataclass(frozen=True)
class Served:
    """The prefiller's account. `landed`: rows at the decoder just before a request's last layer was signalled."""

    landed: dict[str, int]
    outcomes: dict[str, kvmsgr.Outcome]
    num_writes: int
    num_bytes: int


def make_engine(options: RoleOptions) -> Engine:
    checkpoint = load()
    cache = PagedCache(checkpoint.config, options.num_pages, options.page_tokens, options.layout, options.seed)
    return Engine(checkpoint, cache)


def ready(messenger: kvmsgr.Messenger) -> Ready:
    assert messenger.state_path is not None
    fabric = f"{messenger.fabric.provider} ({messenger.fabric.why})"
    return Ready(messenger.descriptor, fabric, messenger.state_path, os.getpid())


async def prefill(channel: Channel, options: RoleOptions) -> None:
    """The prefill process."""
    engine = make_engine(options)
    hidden = torch.zeros(options.num_requests, engine.config.hidden)
    async with await open_messenger("prefill", engine, hidden, options.fabric, options.hold_s) as messenger:
        await channel.run(serve(channel, options, engine, messenger))


async def serve(channel: Channel, options: RoleOptions, engine: Engine, messenger: kvmsgr.Messenger) -> None:
    channel.send(ready(messenger))
    order: Serve = await channel.receive()
    landed: dict[str, int] = {}

    def look(request_id: str) -> None:
        landed[request_id] = landed_rows(order.decoder_state_path, request_id) or 0

    loop, go_on = asyncio.get_running_loop(), threading.Event()
    if not options.hold_s:
        go_on.set()

    def stand_still(num_signals: int) -> None:
        """Once, in the middle of the first step that finds several requests alive."""
        num_layers, num_alive = engine.config.num_layers, node.num_alive
        if not go_on.is_set() and num_signals == num_layers // 2 and num_alive >= min(2, options.num_requests):
            loop.call_soon_threadsafe(channel.send, Held(num_signals, num_layers, num_alive))
            go_on.wait(options.hold_s)
            go_on.set()

    for kind, nth in (("flip", options.corrupt_write), ("drop", options.drop_write)):
        if nth is not None:
            messenger.inject(kind, nth)
    node = PrefillNode(
        engine,
        messenger,
        step_tokens=options.step_tokens,
        post_at_end=options.post_at_end,
        before_last_signal=look,
        after_signal=stand_still,
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(node.run())
        try:
            while isinstance(await channel.receive(), GoOn):
                go_on.set()
        finally:
            go_on.set()  # else a held thread would keep us from ending early
        await node.drained()
        running.cancel()
    stats = messenger.stats()
    channel.send(Served(landed, node.outcomes, stats["posted_writes"], stats["posted_bytes"]))


async def decode(channel: Channel, options: RoleOptions) -> None:
    """The decode process."""
    engine = make_engine(options)
    hidden = torch.full((options.num_requests, engine.config.hidden), torch.nan)
    async with await open_messenger("decode", engine, hidden, options.fabric, options.hold_s) as messenger:
        await channel.run(generate(channel, options, engine, messenger))


async def generate(channel: Channel, options: RoleOptions, engine: Engine, messenger: kvmsgr.Messenger) -> None:
    channel.send(ready(messenger))
    order: Generate = await channel.receive()
    node = DecodeNode(engine, messenger, options.new_tokens)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(node.run())
        answers = [node.answer(order.source, *prompt) for prompt in order.prompts.items()]
        deliveries: list[Delivery] = await asyncio.gather(*answers)
        running.cancel()
    channel.send(dict(zip(order.prompts, deliveries, strict=True)))
