"""The decoder of these tests: streams of requests, each checked to the byte."""

from __future__ import annotations

import json
import random

from kvmsgr import Descriptor, Span
from kvmsgr.errors import KvmsgrError, TransferError

from .cache import DESTINATION_OWNER, PAGE_TOKENS, SOURCE_OWNER
from .role import Role, tell


class Decoder(Role):
    """Tells of each request "asked", then "arrived" or "failed", then "released": the pages have come back."""

    next_owner, foreign_owner = DESTINATION_OWNER, SOURCE_OWNER

    def __init__(self) -> None:
        super().__init__()
        self._streaming: set[str] = set()
        self._num_tags = 0

    async def do_stream(self, name: str, source: list[str], width: int, pages: tuple[int, int]) -> None:
        """Have `width` requests of a source under way, until one fails or `halt`."""
        self._streaming.add(name)
        for index in range(width):
            self.spawn(self._stream(name, index, Descriptor(*source), pages))

    async def _stream(self, name: str, index: int, source: Descriptor, pages: tuple[int, int]) -> None:
        sizes, count, fine = random.Random(f"{name} {index}"), 0, True
        while fine and name in self._streaming:
            fine = await self._one(source, f"{name}-{index}-{count}", sizes.randint(*pages), {"hit": bool(count % 2)})
            count += 1
        tell("stream over", name=name, index=index)

    async def do_halt(self, name: str) -> None:
        """Let a stream end with what is under way."""
        self._streaming.discard(name)

    async def do_fetch(self, id: str, source: list[str], num_pages: int, **hints: object) -> None:
        """One request. `hints` are for its prefiller."""
        self.spawn(self._one_alone(Descriptor(*source), id, num_pages, hints))

    async def _one_alone(self, source: Descriptor, id: str, num_pages: int, hints: dict[str, object]) -> None:
        await self._one(source, id, num_pages, hints)

    async def do_hold(self, held: bool) -> None:
        """See nothing land."""
        self.messenger._node.fabric.poller.hold(held)
        tell("held", held=held)

    async def _one(self, source: Descriptor, id: str, num_pages: int, hints: dict[str, object]) -> bool:
        """Returns whether it arrived."""
        self._num_tags += 1
        tag = self.number << 14 | self._num_tags
        pages = self.cache.take(num_pages)
        num_positions = (num_pages - 1) * PAGE_TOKENS + 1 + tag % PAGE_TOKENS
        self.cache.clear(pages)
        payload = json.dumps({"tag": tag, **hints}).encode()
        try:
            fetch = self.messenger.fetch(id, [source], range(num_positions + 1), [Span(0, 0, pages)], payload=payload)
        except KvmsgrError as error:
            self.problem(f"{id} could not be asked for: {error}")
            return False
        tell("asked", id=id)
        flaw, arrived = None, False
        try:
            arrival = await fetch
        except TransferError as error:
            tell("failed", id=id, reason=str(error.reason), detail=str(error), rows=fetch.rows_landed)
        else:
            arrived = True
            flaw = self.cache.flaw(tag, pages, num_positions)
            if arrival.rows != self.cache.num_rows(num_positions):
                flaw = f"{arrival.rows} rows arrived, it has {self.cache.num_rows(num_positions)}"
            for rank, views in arrival.contexts.items():
                if (views["hidden"] != tag & 0x7F).any():
                    flaw = f"its context on rank {rank} is {views['hidden']}, and not {tag & 0x7F} in each byte"
            arrival.release()
            tell("arrived", id=id, rows=arrival.rows)
        await fetch.released()
        before = self.cache.came_back(pages)
        tell("released", id=id, arrived=arrived)
        if arrived:
            self.cache.give(pages)
        else:
            self.cache.keep(pages)
            flaw = self.cache.flaw_of_failed(before, tag, num_positions)
        if flaw:
            self.problem(f"{id}: {flaw}")
        return arrived
