"""The caches of a messenger's ranks as their engine describes them: tensors and the names of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from kvmsgr.errors import LayoutError
from kvmsgr.layout import RegionRange, describe_cache, describe_context, describe_group, number_signals
from kvmsgr.types import RawArray
from kvmsgr_protocol import ContextLayout, GroupLayout

from .arrays import ArrayLike, raw_array


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share page geometry. Make one with `from_tensors`."""

    name: str
    parts: tuple[tuple[RawArray, ...], ...]
    dims: str
    keep_alive: tuple[object, ...] = field(default=(), repr=False)
    head_start: int = 0
    total_heads: int | None = None
    layers: tuple[int, ...] | None = None
    recurrent: bool = False

    @classmethod
    def from_tensors(
        cls,
        parts: Sequence[ArrayLike | Sequence[ArrayLike]],
        dims: str,
        *,
        name: str = "kv",
        head_start: int = 0,
        total_heads: int | None = None,
        layers: Sequence[int] | None = None,
        recurrent: bool = False,
    ) -> CacheGroup:
        """Describe a group by its tensors.

        Args:
            parts: One part, or two where K and V lie in separate tensors. A part is one array with a `layer` axis,
                or a sequence of arrays, one a layer.
            dims: Names of the axes of each array, in order, separated by spaces: `layer`, `page`, `plane` (K and V
                in one tensor), `head`, `token`, `dim`. HND is "page plane head token dim", NHD is
                "page plane token head dim". The layout has no default.
            name: Name of the group; the same on both sides.
            head_start: Which of the model's KV heads is the first of these.
            total_heads: KV heads of the model; None: there are no others. Must be given where a messenger has several
                ranks and `dims` has a head axis.
            layers: Which of the model's layers these are, in the order of the arrays; None: 0, 1, ...
            recurrent: The arrays hold a state that each token replaces, not one row a token: a request has one page,
                which is moved after its last chunk. There is no `token` axis then.

        Raises:
            LayoutError: An array is of an unknown kind, or `parts` is no list.
        """
        if not isinstance(parts, (list, tuple)):
            raise LayoutError(f"parts is a {type(parts).__name__}; it must be a list of parts, as in [kv] or [k, v]")
        listed = [list(part) if isinstance(part, (list, tuple)) else [part] for part in parts]
        return cls(
            name=name,
            parts=tuple(tuple(raw_array(array) for array in part) for part in listed),
            dims=dims,
            keep_alive=tuple(array for part in listed for array in part),
            head_start=head_start,
            total_heads=total_heads,
            layers=None if layers is None else tuple(layers),
            recurrent=recurrent,
        )


@dataclass(frozen=True, slots=True)
class Cache:
    """All cache groups of one rank."""

    groups: Sequence[CacheGroup]


@dataclass(frozen=True, slots=True)
class ContextBuffer:
    """A preallocated buffer that travels beside the KV, one slot a request: hidden states, logits, any bytes.

    Args:
        name: The same on both sides.
        array: Shape (num_slots, ...), slots contiguous.
    """

    name: str
    array: ArrayLike


@dataclass(frozen=True, slots=True)
class Rank:
    """One device of a messenger's node, with its shard of the cache.

    Args:
        cache: Its cache groups; the same names in the same order on all ranks.
        context: Its context buffers.
        interfaces: Address of each of its network interfaces; None: `Config.fabric_address`. What moves is spread over
            them.
    """

    cache: Cache
    context: Sequence[ContextBuffer] = ()
    interfaces: Sequence[str | None] = (None,)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Everything of one rank that is registered: where it lies and what it means."""

    groups: tuple[GroupLayout, ...]
    context: tuple[ContextLayout, ...]
    regions: tuple[RegionRange, ...]
    interfaces: tuple[str | None, ...]
    keep_alive: tuple[object, ...]

    @classmethod
    def describe(cls, rank: Rank) -> RankMemory:
        """Work out regions and layouts.

        Raises:
            LayoutError: A group or a context buffer cannot be described.
        """
        if not rank.cache.groups:
            raise LayoutError("a cache needs at least one group")
        if not rank.interfaces:
            raise LayoutError("a rank needs at least one network interface; None stands for the configured one")
        groups, regions = describe_cache(
            [
                describe_group(
                    group.parts,
                    group.dims,
                    name=group.name,
                    head_start=group.head_start,
                    total_heads=group.total_heads,
                    layers=group.layers,
                    recurrent=group.recurrent,
                )
                for group in rank.cache.groups
            ]
        )
        ranges, layouts = list(regions), []
        for buffer in rank.context:
            layout, region = describe_context(buffer.name, raw_array(buffer.array), len(ranges))
            layouts.append(layout)
            ranges.append(region)
        _check_names([*(group.name for group in groups), *(buffer.name for buffer in rank.context)])
        _check_apart(ranges, len(regions))
        _check_sendable([*groups, *layouts])
        return cls(
            groups=tuple(groups),
            context=tuple(layouts),
            regions=tuple(ranges),
            interfaces=tuple(rank.interfaces),
            keep_alive=(*(g.keep_alive for g in rank.cache.groups), *(b.array for b in rank.context)),
        )

    def context_views(self, slot: int) -> dict[str, npt.NDArray[np.uint8]]:
        """The bytes of one slot of each context buffer, by name, shape (slot bytes,), writable."""
        return {layout.name: self._context_view(layout, slot) for layout in self.context}

    def _context_view(self, layout: ContextLayout, slot: int) -> npt.NDArray[np.uint8]:
        address = self.regions[layout.region].address + layout.offset_bytes + slot * layout.slot_stride_bytes
        return bytes_at(address, layout.unit_bytes * layout.num_units, self.keep_alive)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of all ranks of a messenger.

    Args:
        ranks: By number.
        num_signals: Bumps of a whole forward pass, context not counted, on each layer counter of a stream: one that all
            ranks share, or one a rank.
    """

    ranks: tuple[RankMemory, ...]
    num_signals: tuple[int, ...]

    @classmethod
    def describe(cls, ranks: Sequence[Rank], *, shared_counter: bool) -> Memory:
        """Work out regions and layouts of all ranks.

        Raises:
            LayoutError: A rank cannot be described, or two of them do not belong together.
        """
        if not ranks:
            raise LayoutError("a messenger needs at least one rank")
        described = [_described(number, rank) for number, rank in enumerate(ranks)]
        if len(ranks) > 1:
            _check_heads(ranks)
        _check_alike(described)
        if shared_counter:
            numbered = number_signals([rank.groups for rank in described])
            described = [replace(rank, groups=tuple(groups)) for rank, groups in zip(described, numbered, strict=True)]
        signals = [max(entry.signal for group in rank.groups for entry in group.entries) for rank in described]
        return cls(tuple(described), (max(signals),) if shared_counter else tuple(signals))

    @property
    def groups(self) -> tuple[GroupLayout, ...]:
        """The groups of the first rank: names and page size are those of all."""
        return self.ranks[0].groups

    @property
    def interfaces(self) -> list[tuple[int, str | None]]:
        """(rank, address) of each network interface, in the order of their numbers."""
        return [(number, address) for number, rank in enumerate(self.ranks) for address in rank.interfaces]

    def interfaces_of(self, rank: int) -> list[int]:
        """Numbers of a rank's network interfaces."""
        return [number for number, (owner, _) in enumerate(self.interfaces) if owner == rank]

    def interfaces_of_counter(self, counter: int) -> list[int]:
        """Numbers of the network interfaces of the ranks whose layers a layer counter signals."""
        num = len(self.num_signals)
        return self.interfaces_of(counter % num) if num > 1 else list(range(len(self.interfaces)))

    @property
    def num_context_slots(self) -> int:
        """Slots that every context buffer has; 0 without one."""
        return min((layout.num_slots for rank in self.ranks for layout in rank.context), default=0)


def _check_heads(ranks: Sequence[Rank]) -> None:
    """Ranks that do not say which heads they hold would all pass for copies of one another."""
    for number, rank in enumerate(ranks):
        for group in rank.cache.groups:
            if "head" in group.dims.split() and group.total_heads is None:
                raise LayoutError(
                    f"rank {number}: group {group.name!r} does not say which heads it holds, and there are "
                    f"{len(ranks)} ranks; give head_start= and total_heads= (copies have the same head_start)"
                )


def _described(number: int, rank: Rank) -> RankMemory:
    try:
        return RankMemory.describe(rank)
    except LayoutError as error:
        raise LayoutError(f"rank {number}: {error}") from error


def _check_alike(ranks: Sequence[RankMemory]) -> None:
    """A page index names the same positions on all ranks, so all have the same groups and page sizes."""
    first = ranks[0]
    for number, rank in enumerate(ranks):
        for what, values in (
            ("groups", [[group.name for group in one.groups] for one in (first, rank)]),
            ("page_tokens", [[group.page_tokens for group in one.groups] for one in (first, rank)]),
        ):
            if values[0] != values[1]:
                raise LayoutError(f"{what} of rank {number} are {values[1]}, those of rank 0 {values[0]}")


class _At:
    """Memory by its address; `owner` lives as long as any view of it."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (num_bytes,), "typestr": "|u1"}


def bytes_at(address: int, num_bytes: int, owner: object) -> npt.NDArray[np.uint8]:
    """View memory by its address; `owner` is what keeps it there."""
    return np.asarray(_At(address, num_bytes, owner))


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise LayoutError(f"two cache groups or context buffers are named {name!r}; names tell them apart")


def _check_sendable(layouts: Sequence[GroupLayout | ContextLayout]) -> None:
    """A description whose numbers or names are out of bounds would end every connection, one after the other."""
    for layout in layouts:
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=type(layout))
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise LayoutError(f"{layout.name!r} cannot be told to a peer: {error}") from error


def _check_apart(ranges: Sequence[RegionRange], num_cache_regions: int) -> None:
    """A context buffer shares no memory with another one, or with the cache."""
    for index in range(num_cache_regions, len(ranges)):
        for other in range(index):
            if ranges[index].address < ranges[other].end and ranges[other].address < ranges[index].end:
                raise LayoutError(
                    f"context buffer {index - num_cache_regions} shares memory with "
                    + ("the cache" if other < num_cache_regions else f"buffer {other - num_cache_regions}")
                )
