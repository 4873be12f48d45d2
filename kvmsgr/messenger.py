"""The face an engine sees."""

from __future__ import annotations

import asyncio
import operator
import secrets
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from .address import Tcp, Unix, parse
from .config import Config
from .device.cache import Cache, ContextBuffer, Memory, Rank
from .device.counters import LayerCounter
from .errors import ConfigError
from .fabric.choice import FabricChoice
from .fabric.libfabric import Fabric, FabricSettings, open_fabric
from .runtime import steps
from .runtime.connection import listen, release
from .runtime.fetch import Fetch
from .runtime.node import Node
from .runtime.peer import SOFTWARE
from .runtime.serve import PrefillRequest
from .runtime.steps import Chunk, Step
from .types import Descriptor, Span, Spread

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = structlog.get_logger("kvmsgr")
MAX_COUNTERS = 64  # that a polling thread watches


def _close_unwanted(opening: asyncio.Future[Fabric]) -> None:
    """Whoever waited for it was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _describe(config: Config, cache: Cache | None, context: Sequence[ContextBuffer], ranks: Sequence[Rank]) -> Memory:
    if (cache is None) == (not ranks):
        raise ConfigError("give either a cache, for one rank, or ranks")
    if cache is not None:
        ranks = [Rank(cache, context)]
    elif context:
        raise ConfigError("context buffers belong to ranks where ranks are given")
    return Memory.describe(ranks, shared_counter=config.layer_counters == "lead")


def _deal(config: Config, memory: Memory) -> list[tuple[int, int | None]]:
    """Of each polling thread, the network interfaces that it serves, and its CPU: neighbouring ranks share a thread."""
    num, num_ranks = config.pollers, len(memory.ranks)
    if num > num_ranks:
        raise ConfigError(f"pollers is {num}, and there are {num_ranks} ranks; each polling thread serves at least one")
    sizes = [0] * num
    for rank, _ in memory.interfaces:
        sizes[rank * num // num_ranks] += 1
    return list(zip(sizes, config.poller_cores, strict=True))


class Messenger:
    """Moves the KV of requests between engines. Both roles in one object: `fetch` is the decoder's side, `requests`
    and `begin_step` are the prefiller's. Open one with `Messenger.open`.

    All calls belong to the event loop that opened it, but for `begin_step` and what it returns.
    """

    def __init__(self, node: Node, server: asyncio.Server, address: Tcp | Unix, descriptor: Descriptor) -> None:
        self._node = node
        self._server = server
        self._closing: asyncio.Future[None] | None = None
        self._address = address
        self.descriptor = descriptor

    @classmethod
    async def open(
        cls,
        config: Config,
        cache: Cache | None = None,
        context: Sequence[ContextBuffer] = (),
        *,
        ranks: Sequence[Rank] = (),
        counters: Sequence[LayerCounter] = (),
    ) -> Messenger:
        """Register the memory, test the fabric, and listen.

        Args:
            config: Settings.
            cache: The KV cache, where there is one rank.
            context: Buffers that travel beside it, by name; the same on both sides.
            ranks: The ranks, instead of `cache` and `context`.
            counters: Layer counters that other processes bump: one, or one a rank where `Config.layer_counters` is
                "rank"; empty: they are made here.

        Raises:
            LayoutError: The cache or a buffer cannot be described.
            ConfigError: Neither or both of `cache` and `ranks` are given, too few counters, or one that a messenger
                has used before, or more polling threads than ranks.
            FabricUnavailableError: No provider passed the self-test.
            AddressError: The control socket cannot be listened on.
        """
        memory, address = _describe(config, cache, context, ranks), parse(config.listen)
        num_counters = config.num_streams * len(memory.num_signals)
        counters = list(counters) or [LayerCounter() for _ in range(num_counters)]
        if not len(counters) == num_counters <= MAX_COUNTERS:
            needed = f"{config.num_streams} streams with layer_counters {config.layer_counters!r} need {num_counters}"
            raise ConfigError(f"{len(counters)} layer counters are given; {needed}, and {MAX_COUNTERS} is the most")
        host = address.host if isinstance(address, Tcp) else "127.0.0.1"
        incarnation = secrets.token_hex(16)
        settings = FabricSettings(
            fabric=config.fabric,
            local=address.is_local,
            nics=[name or config.fabric_address or config.advertise or host for _, name in memory.interfaces],
            incarnation=incarnation,
            cq_entries=config.cq_entries,
            heartbeat_s=config.heartbeat_s,
            lease_s=config.lease_s,
            connect_timeout_s=config.connect_timeout_s,
            fence=config.fence,
            pollers=_deal(config, memory),
            poller_spins=config.poller_spins,
            state_dir=config.state_dir,
        )
        regions = [
            (region.address, region.num_bytes, memory.interfaces_of(number))
            for number, rank in enumerate(memory.ranks)
            for region in rank.regions
        ]
        opening = asyncio.get_running_loop().run_in_executor(None, open_fabric, settings, regions, memory)
        try:
            fabric = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        try:
            node = Node(config, memory, counters, fabric, incarnation)
        except ValueError as error:
            fabric.close()
            raise ConfigError(f"a layer counter cannot be used: {error}") from error
        try:
            server, bound = await listen(address, node.connection_accepted)
        except BaseException:
            await node.close()
            raise
        if isinstance(bound, Tcp) and config.advertise is not None:
            bound = Tcp(config.advertise, bound.port)
        node.fabric.state.set_info(
            name=config.name, address=str(bound), provider=fabric.choice.provider, software=SOFTWARE
        )
        log.info("messenger open", name=config.name, address=str(bound), fabric=fabric.choice.why)
        if not address.is_local:
            log.warning("the control connection is not encrypted: whoever reaches it can write into the cache")
        return cls(node, server, address, Descriptor(str(bound), incarnation, config.name))

    @property
    def fabric(self) -> FabricChoice:
        """The libfabric provider in use, and why."""
        return self._node.fabric.choice

    @property
    def state_path(self) -> str | None:
        """The file in which slots and counters live; `kvmsgr.inspect` reads it."""
        return self._node.fabric.state.path

    @property
    def unhealthy(self) -> str | None:
        """Why this messenger should get no more requests: its polling thread is stuck, or too many of its pages are in
        quarantine (`Config.quarantine_limit`). None while it is well."""
        if self._node.stuck:
            return "the polling thread is stuck inside libfabric"
        return self._node.ledger.unhealthy

    # The decoder's side

    def fetch(
        self,
        request_id: str,
        sources: Sequence[Descriptor],
        tokens: Sequence[int] | npt.NDArray[np.uint32],
        spans: Sequence[Span],
        *,
        ranks: Sequence[int] | None = None,
        context: bool = True,
        payload: bytes = b"",
        trace: Mapping[str, str] | None = None,
        time_allowed_s: float | None = None,
    ) -> Fetch:
        """Ask a prefiller for the KV of a prompt.

        Args:
            request_id: Name of the request, at most 256 characters; one is alive at a time.
            sources: The messengers that hold the source caches, all needed together: one that hosts all ranks of its
                node, or one a rank. Each holds other layers or heads than the others.
            tokens: The prompt. Its last token is not prefilled: the caller runs it as its first decode step.
            spans: Destination pages, the same on each of the ranks, which must stay allocated until `released()`.
            ranks: The ranks of this messenger to fill; None: all.
            context: Whether the context buffers are wanted, where there are any. If not, no slot of them is taken.
            payload: For the prefiller's engine, opaque, at most 1 MiB.
            trace: Trace context, handed to the prefiller's engine as it is.
            time_allowed_s: Until the request fails; None: as configured.

        Returns:
            The request: `await` it for its arrival.

        Raises:
            LayoutError: The spans do not describe pages of this cache, or a page is in use.
            ConfigError: The request cannot be sent: a token, the payload or the time allowed is out of bounds.
            RefusedError: A request of this name is alive.
            BusyError: No immediate or context slot is free.
        """
        if isinstance(sources, Descriptor):
            raise ConfigError(f"sources is one descriptor, {sources.name!r}; it must be a list of them")
        if not sources:
            raise ConfigError(f"request {request_id!r} names no source")
        for source in sources:
            if not isinstance(source, Descriptor):
                raise ConfigError(f"a source is {source!r}; it must be the `descriptor` of the prefiller's messenger")
        if len(tokens) == 0:
            raise ConfigError(f"request {request_id!r} has no tokens; a prompt has at least one")
        ids = [operator.index(token) for token in tokens]
        return self._node.outbox.fetch(
            request_id, sources, ids, spans, ranks, context, payload, dict(trace or {}), time_allowed_s
        )

    # The prefiller's side

    async def requests(self) -> AsyncIterator[PrefillRequest]:
        """Requests from decoders, each once, until the messenger is closed. Answer each: accept, refuse or busy. One
        that has failed before it was taken here is not given."""
        while (request := await self._node.inbox.next_request()) is not None:
            yield request

    def begin_step(self, chunks: Sequence[Chunk], counter: int = 0) -> Step:
        """Announce a forward pass before it is launched: its writes are armed, and go layer by layer as it signals.

        May be called from any thread, and takes microseconds. An empty list stands for a forward that moves nothing
        (decode only, warm-up): its signals are the same calls and publish nothing.

        Args:
            chunks: What the pass computes, at most one chunk a request.
            counter: Index of its stream: of the layer counter, or of the set of them where each rank has its own.

        Raises:
            LayoutError: A chunk does not follow its request's last one, or its pages are not known.
            LocalProtocolError: A request was not accepted, or came to another messenger; or `context_later` or `ready`
                make no sense, or the step that `ready` names has failed.
            ConfigError: There is no such stream.
            MessengerClosedError: The messenger is closed.
            StepLimitError: More steps are announced than the layer counter has slots for. Nothing was armed.
        """
        return steps.begin_step(self._node, chunks, counter)

    @property
    def spread(self) -> Spread:
        """How much each rank was given to send, of all requests that were accepted, and how often a byte travels."""
        balance = self._node.balance
        return Spread(tuple(balance.given_bytes), balance.unique_bytes)

    def rank_lost(self, rank: int, why: str) -> None:
        """Say that a process of the engine which holds a rank has died. What needs that rank fails on both sides, now
        and later; the pages are given back by the same proofs as ever. Its memory must stay mapped here.

        Args:
            rank: Its number.
            why: For people, e.g. which process and how it ended.
        """
        self._node.rank_lost(rank, why)

    def inject(self, kind: str, nth: int) -> None:
        """Spoil the `nth` write from now on, to see a fault found: "drop", "flip" a byte of it, or "fail". With several
        polling threads it is the first one's nth."""
        self._node.fabric.poller.inject(kind, nth)

    def stats(self) -> dict[str, int]:
        """Totals of the native layer: writes, bytes and rows posted and landed, errors."""
        return self._node.fabric.poller.stats()

    # The end

    async def close(self) -> None:
        """Fail what is alive, tell the peers, close every endpoint. Afterwards all pages are free.

        It may be called again and awaited by several; it goes on when one of them is cancelled.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._server.close()
        try:
            await self._node.close()
        finally:
            await self._server.wait_closed()
            release(self._address)

    def __del__(self) -> None:
        if self._closing is None:
            warnings.warn(
                f"messenger {self.descriptor.name!r} was never closed", ResourceWarning, stacklevel=2, source=self
            )

    async def __aenter__(self) -> Messenger:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
