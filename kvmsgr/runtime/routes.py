"""How the caches of our ranks are written into those of a peer's: who holds what, and by which links it goes.

A link is one network interface of ours towards all of a peer's. Two ranks are joined by *rails*, pairs of their
interfaces: as many as the one with more of them has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvmsgr.errors import LayoutError, LocalProtocolError, MismatchError
from kvmsgr.layout import (
    Share,
    Template,
    build_templates,
    check_bounds,
    check_contexts,
    check_groups,
    common_part,
    context_template,
    divide,
)
from kvmsgr_protocol import Beat, Endpoint, RankAttach, RankFabric, immediate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvmsgr.device.cache import Memory
    from kvmsgr.fabric.interface import Poller
    from kvmsgr_protocol import GroupLayout

Pair = tuple[int, int]
"""Rank of ours, rank of the peer's."""


class Armed(NamedTuple):
    """A template as the native layer has it: (link, number) on each rail."""

    template: Template
    rails: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Reach:
    """What a link is told of a peer's endpoints; `regions` and `beats` name them by their place in `targets`."""

    targets: list[bytes]
    regions: list[tuple[int, int, int, int]]
    beats: list[tuple[int, int, int, int]]


class Routes:
    """The plan between two messengers, made when they meet.

    Args:
        memory: Ours.
        ranks: The peer's, as its Attach describes them.
        provider: Of our fabric; the peer's must be the same.

    Attributes:
        ranks: The peer's ranks by number.
        shares: For each rank of the peer and each group, the parts of it that our ranks hold.
        complete: Rank and group of ours of which the peer's ranks hold everything, as far as somebody has looked.
        landing: For each rank of ours and each group, the rows of a position that the peer's ranks hold.

    Raises:
        MismatchError: Nothing can be moved correctly between the two; names the field and both values.
        LayoutError: The peer describes memory that it does not have.
    """

    def __init__(self, memory: Memory, ranks: Sequence[RankAttach], provider: str) -> None:
        self.ranks = {rank.rank: rank for rank in ranks}
        self._memory = memory
        self._ours = _numbered(len(rank.interfaces) for rank in memory.ranks)
        self._theirs = dict(zip(self.ranks, _numbered(len(rank.endpoints) for rank in ranks), strict=True))
        self._endpoints = [(rank, endpoint) for rank in ranks for endpoint in rank.endpoints]
        for rank in ranks:
            _check_rank(memory, rank, provider)
        groups = range(len(memory.groups))
        ours = [[rank.groups[index] for rank in memory.ranks] for index in groups]
        theirs = [[rank.groups[index] for rank in ranks] for index in groups]
        self.shares: dict[int, list[list[Share]]] = {
            rank.rank: [divide(ours[index], rank.groups[index]) for index in groups] for rank in ranks
        }
        self.complete: set[tuple[int, int]] = set()
        self.landing = [
            [_rows(divide(theirs[index], group)) for index, group in enumerate(rank.groups)] for rank in memory.ranks
        ]
        self._plans = self._plan_groups()
        self._context_plans = self._plan_context()
        self._targets, self._beats = self._plan_links()
        self._sharing = Counter(target for targets in self._targets for target in targets)
        self.templates: dict[tuple[int, int, int], list[Armed]] = {}
        self.context: dict[Pair, dict[str, Armed]] = {}
        self._unique_bytes: dict[tuple[int, frozenset[int]], int] = {}

    # Plans

    def _plan_groups(self) -> dict[tuple[int, int, int], tuple[Template, ...]]:
        """By rank of ours, rank of the peer's, and group."""
        return {
            (source, number, index): build_templates(
                self._memory.ranks[source].groups[index], self.ranks[number].groups[index]
            )
            for number, groups in self.shares.items()
            for index, shares in enumerate(groups)
            for share in shares
            for source in share.sources
        }

    def _plan_context(self) -> dict[Pair, dict[str, Template]]:
        plans: dict[Pair, dict[str, Template]] = {}
        for source, rank in enumerate(self._memory.ranks):
            signal = self._memory.num_signals[self.part_of(source)] + 1
            ours = {layout.name: layout for layout in rank.context}
            for number, remote in self.ranks.items():
                both = [theirs for theirs in remote.context if theirs.name in ours]
                check_contexts([ours[theirs.name] for theirs in both], both)
                if both:
                    plans[source, number] = {
                        theirs.name: context_template(ours[theirs.name], theirs, signal) for theirs in both
                    }
        return plans

    def _plan_links(self) -> tuple[list[list[int]], list[range]]:
        """For each interface of ours, the peer's endpoints that it meets, and those of them that it sends heartbeats
        to: each endpoint hears from one."""
        num_links, num_endpoints = sum(map(len, self._ours)), len(self._endpoints)
        beats = [range(link, num_endpoints, num_links) for link in range(num_links)]
        targets = [{*own, link % num_endpoints} for link, own in enumerate(beats)]  # the latter is whom it hears
        for pair in {(source, number) for source, number, _ in self._plans}.union(self._context_plans):
            for ours, theirs in self._rails(*pair):
                targets[ours].add(theirs)
        return [sorted(reached) for reached in targets], beats

    # What a request asks

    def part_of(self, source: int) -> int:
        """The layer counter, of those of a stream, that signals a rank of ours."""
        return source if len(self._memory.num_signals) > 1 else 0

    def groups(self, index: int) -> list[GroupLayout]:
        """A group on each rank of the peer's."""
        return [rank.groups[index] for rank in self.ranks.values()]

    def rows_of(self, number: int) -> list[int]:
        """Rows of a position, by group, of a rank of the peer's: what of it our ranks hold."""
        return [_rows(shares) for shares in self.shares[number]]

    def holders(self, name: str, number: int) -> tuple[int, ...]:
        """Our ranks that can fill a context buffer of a rank of the peer's."""
        return tuple(
            source for (source, other), plans in self._context_plans.items() if other == number and name in plans
        )

    def bytes_per_position(self, source: int, number: int, group: int) -> int:
        """What moves between two ranks."""
        return sum(plan.rows_per_position * plan.row_bytes for plan in self._plans[source, number, group])

    def unique_bytes_per_position(self, group: int, targets: frozenset[int]) -> int:
        """What moves to some ranks of the peer's, each row once however many of them want it. Remembered."""
        if (group, targets) not in self._unique_bytes:
            parts = [
                common_part(self._memory.ranks[share.sources[0]].groups[group], self.ranks[target].groups[group])
                for target in targets
                for share in self.shares[target][group]
            ]
            rows = {(layer, head) for part in parts if part for layer in part.layers for head in part.heads}
            row_bytes = sum(plane.row_bytes for plane in self._memory.groups[group].planes)
            self._unique_bytes[group, targets] = len(rows) * row_bytes
        return self._unique_bytes[group, targets]

    # Links

    def _rails(self, source: int, number: int) -> list[Pair]:
        """Pairs of interfaces, (ours, theirs)."""
        ours, theirs = self._ours[source], self._theirs[number]
        return [(ours[rail % len(ours)], theirs[rail % len(theirs)]) for rail in range(max(len(ours), len(theirs)))]

    def reach(self, interface: int, endpoints: Sequence[Endpoint] | None = None) -> Reach:
        """What the link on an interface of ours must be told. `endpoints`: those that the peer has now; None: those of
        its Attach."""
        known = [endpoint for _, endpoint in self._endpoints] if endpoints is None else endpoints
        targets = self._targets[interface]
        return Reach(
            targets=[known[target].address for target in targets],
            regions=[
                (region.base, num_bytes, region.key, place)
                for place, target in enumerate(targets)
                for region, num_bytes in zip(
                    known[target].regions, self._endpoints[target][0].region_bytes, strict=True
                )
            ],
            beats=[
                (place, *_beat_target(known[target].beat))
                for place, target in enumerate(targets)
                if target in self._beats[interface]
            ],
        )

    def window(self, interface: int, most: int) -> int:
        """Writes that the link on an interface of ours may have in flight: the peer's windows, shared by our links.

        Raises:
            MismatchError: A window is too small to be shared.
        """
        for target in self._targets[interface]:
            granted, sharing = self._endpoints[target][1].window, self._sharing[target]
            if granted < sharing:
                raise MismatchError("window", f"{sharing} links to an endpoint", granted, "each needs a write at least")
            most = min(most, granted // sharing)
        return most

    def connect(self, poller: Poller, links: Sequence[int], window: int) -> None:
        """Point our links, one an interface, at the peer's endpoints, and give them their templates.

        Raises:
            MismatchError: As `window`.
            ValueError, OverflowError: The peer's addresses or regions cannot be used.
        """
        for interface, link in enumerate(links):
            reach = self.reach(interface)
            poller.connect_link(link, reach.targets, reach.regions, self.window(interface, window), reach.beats)
        sources = _starts(len(rank.regions) for rank in self._memory.ranks)
        places = [
            dict(zip(targets, _starts(len(self._endpoints[target][0].region_bytes) for target in targets), strict=True))
            for targets in self._targets
        ]

        def arm(source: int, number: int, plan: Template, num_rails: int | None = None) -> Armed:
            rails = []
            for ours, theirs in self._rails(source, number)[:num_rails]:
                entries = plan.entries.copy()
                entries[:, 0] += sources[source]
                entries[:, 2] += places[ours][theirs]
                rails.append((links[ours], _add(poller, links[ours], plan, entries)))
            return Armed(plan, rails)

        for (source, number, group), plans in self._plans.items():
            self.templates[source, number, group] = [arm(source, number, plan) for plan in plans]
        for (source, number), named in self._context_plans.items():
            self.context[source, number] = {name: arm(source, number, plan, 1) for name, plan in named.items()}

    def moved(self, ranks: Sequence[RankFabric]) -> list[Endpoint]:
        """The endpoints of a peer that rotates.

        Raises:
            LocalProtocolError: They are others than it had.
        """
        new = [(rank.rank, endpoint.provider, len(endpoint.regions)) for rank in ranks for endpoint in rank.endpoints]
        old = [(rank.rank, endpoint.provider, len(endpoint.regions)) for rank, endpoint in self._endpoints]
        if new != old:
            raise LocalProtocolError("Rotate names other ranks, interfaces, regions or providers than Attach")
        return [endpoint for rank in ranks for endpoint in rank.endpoints]


def _rows(shares: Iterable[Share]) -> int:
    """Rows of a position."""
    return sum(share.rows_per_position for share in shares)


def _numbered(sizes: Iterable[int]) -> list[range]:
    """Ranges of these lengths, one after the other."""
    lengths = list(sizes)
    return [range(start, start + length) for start, length in zip(_starts(lengths), lengths, strict=True)]


def _starts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _beat_target(beat: Beat) -> tuple[int, int, int]:
    """Address, key and immediate of a heartbeat."""
    return beat.base, beat.key, immediate.base(beat.slot, beat.generation)


def _add(poller: Poller, link: int, plan: Template, entries: npt.NDArray[np.int64]) -> int:
    return poller.add_template(
        link,
        plan.runs,
        (plan.src_page_bytes, plan.src_units, plan.src_unit_bytes),
        (plan.dst_page_bytes, plan.dst_units, plan.dst_unit_bytes),
        entries,
        plan.row_bytes,
        plan.item_bytes,
    )


def _check_rank(memory: Memory, remote: RankAttach, provider: str) -> None:
    """Everything that does not fit is found before any page is given to a request."""
    for ours in memory.ranks:
        check_groups(ours.groups, remote.groups)
    check_bounds(remote.groups, remote.context, remote.region_bytes)
    if not remote.endpoints:
        raise LayoutError(f"rank {remote.rank} has no endpoint")
    for endpoint in remote.endpoints:
        if endpoint.provider != provider:
            advice = "set the same `fabric` on both sides"
            raise MismatchError("fabric provider", provider, endpoint.provider, advice)
