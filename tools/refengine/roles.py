"""What the two processes of the demo do, and what they tell the one that started them."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass

import kvmsgr
from kvmsgr.inspect import landed_rows

from .decode import DecodeNode, Delivery
from .grammar import mask_of
from .opening import Node, open_node
from .prefill import PrefillNode
from .processes import Channel
from .spec import NodeOptions


@dataclass(frozen=True)
class RoleOptions:
    """Options of one process. `post_at_end` and the faults are the prefiller's, which also stands still once, in the
    middle of a step, where its node may be held; `extra_page`, `grammar` and `zero_hidden` are a decoder's.
    `preempt_every` counts the steps of a prefiller, the requests of a decoder."""

    node: NodeOptions
    new_tokens: int
    post_at_end: bool = False
    corrupt_write: int | None = None
    drop_write: int | None = None
    extra_page: bool = False
    preempt_every: int = 0
    announce_ahead: bool = False
    grammar: str | None = None
    zero_hidden: bool = False


@dataclass(frozen=True)
class Ready:
    """A process has opened its messenger. `fabric` is the provider and why it was taken; `workers` are the processes of
    its ranks, where they have their own."""

    descriptor: kvmsgr.Descriptor
    fabric: str
    state_path: str
    pid: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Serve:
    """To the prefiller: serve, and look into the decoders' state files, by request id, to see how much has landed."""

    decoder_state_paths: dict[str, str]


@dataclass(frozen=True)
class Generate:
    """To the decoder: answer these prompts (request id to token ids), prefilled there: round after round, those of a
    round at the same time."""

    source: kvmsgr.Descriptor
    rounds: list[dict[str, list[int]]]


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
    """The prefiller's account. `landed`: rows at the decoder just before a request's last layer was signalled;
    `cached_tokens`: positions of a request that were found in its prefix cache."""

    landed: dict[str, int]
    cached_tokens: dict[str, int]
    outcomes: dict[str, kvmsgr.Outcome]
    num_writes: int
    num_bytes: int


def ready(node: Node) -> Ready:
    messenger = node.messenger
    assert messenger.state_path is not None
    fabric = f"{messenger.fabric.provider} ({messenger.fabric.why})"
    workers = tuple(node.workers.pids) if node.workers else ()
    return Ready(messenger.descriptor, fabric, messenger.state_path, os.getpid(), workers)


async def prefill(channel: Channel, options: RoleOptions) -> None:
    """The prefill process."""
    async with open_node(options.node) as node:
        await channel.run(serve(channel, options, node))


async def serve(channel: Channel, options: RoleOptions, node: Node) -> None:
    channel.send(ready(node))
    order: Serve = await channel.receive()
    landed: dict[str, int] = {}

    def look(request_id: str) -> None:
        landed[request_id] = landed_rows(order.decoder_state_paths[request_id], request_id) or 0

    for kind, nth in (("flip", options.corrupt_write), ("drop", options.drop_write)):
        if nth is not None:
            node.messenger.inject(kind, nth)
    hold = Hold(channel, options.node)
    prefiller = PrefillNode(
        node.engine,
        node.messenger,
        node.workers,
        step_tokens=options.node.step_tokens,
        post_at_end=options.post_at_end,
        preempt_every=options.preempt_every,
        announce_ahead=options.announce_ahead,
        before_last_signal=look,
        half_way=lambda: hold.stand_still(node.engine.spec.num_layers, prefiller.num_alive),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(prefiller.run())
        try:
            while isinstance(await channel.receive(), GoOn):
                hold.go_on.set()
        finally:
            hold.go_on.set()  # else a held thread would keep us from ending early
        await prefiller.drained()
        running.cancel()
    stats = node.messenger.stats()
    channel.send(
        Served(landed, dict(prefiller.cached_tokens), prefiller.outcomes, stats["posted_writes"], stats["posted_bytes"])
    )


class Hold:
    """Stands still once, in the middle of the first step that finds several requests alive."""

    def __init__(self, channel: Channel, options: NodeOptions) -> None:
        self._channel, self._options = channel, options
        self._loop = asyncio.get_running_loop()
        self.go_on = threading.Event()
        if not options.hold_s:
            self.go_on.set()

    def stand_still(self, num_layers: int, num_alive: int) -> None:
        """In the model's thread, half-way through a step."""
        if not self.go_on.is_set() and num_alive >= min(2, self._options.num_requests):
            self._loop.call_soon_threadsafe(self._channel.send, Held(num_layers // 2, num_layers, num_alive))
            self.go_on.wait(self._options.hold_s)
            self.go_on.set()


async def decode(channel: Channel, options: RoleOptions) -> None:
    """The decode process."""
    async with open_node(options.node) as node:
        await channel.run(generate(channel, options, node))


async def generate(channel: Channel, options: RoleOptions, node: Node) -> None:
    channel.send(ready(node))
    order: Generate = await channel.receive()
    decoder = DecodeNode(
        node.engine,
        node.messenger,
        options.new_tokens,
        node.workers,
        extra_page=options.extra_page,
        preempt_every=options.preempt_every,
        step_tokens=options.node.step_tokens,
        num_drafts=options.node.num_drafts,
        mask=mask_of(options.grammar, node.engine.checkpoint),
        zero_hidden=options.zero_hidden,
    )
    deliveries: dict[str, Delivery] = {}
    async with asyncio.TaskGroup() as group:
        running = group.create_task(decoder.run())
        for prompts in order.rounds:
            answers = [decoder.answer(order.source, *prompt) for prompt in prompts.items()]
            deliveries |= zip(prompts, await asyncio.gather(*answers), strict=True)
            await decoder.quiet()
        running.cancel()
    channel.send(deliveries)
