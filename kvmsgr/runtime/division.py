"""What each of several sources brings to one request. Known when all of them are live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvmsgr.errors import LayoutMismatchError, MismatchError
from kvmsgr.layout import check_covered
from kvmsgr_protocol import Dispatch

if TYPE_CHECKING:
    from .node import Node
    from .peer import PeerDriver
    from .routes import Routes


class Division(NamedTuple):
    """Rows of each leg, and the peer that brings the context; None: it has none."""

    rows: dict[PeerDriver, int]
    context_from: PeerDriver | None


def divide_legs(node: Node, routes: Mapping[PeerDriver, Routes], dispatch: Dispatch) -> Division:
    """Divide a request among its sources.

    Args:
        node: Whose ranks are filled.
        routes: The plan with each source.
        dispatch: The request, with the rows of all legs together.

    Raises:
        MismatchError: Together the sources do not hold everything exactly once.
    """
    _check_covered(node, routes, dispatch)
    context_from = _with_context(node, routes, dispatch) if dispatch.context_slot >= 0 else None
    rows = {
        peer: node.outbox.rows_at(dispatch.ranks, dispatch.num_tokens, peer is context_from, route.landing)
        for peer, route in routes.items()
    }
    total = sum(rows.values())
    if total != dispatch.expected_rows:
        names = ", ".join(peer.name for peer in routes)
        raise LayoutMismatchError(
            "rows",
            dispatch.expected_rows,
            total,
            text=f"{dispatch.expected_rows} rows are wanted, and the sources {names} together would send {total}: "
            "some hold the same; name sources that hold different layers or heads",
        )
    return Division(rows, context_from)


def _check_covered(node: Node, routes: Mapping[PeerDriver, Routes], dispatch: Dispatch) -> None:
    """Every layer and head that is wanted is held by somebody. What one source holds by itself is looked at once."""
    for target in dispatch.ranks:
        for index in {span.group for span in target.spans}:
            if any((target.rank, index) in route.complete for route in routes.values()):
                continue
            held = [own for route in routes.values() for own in route.groups(index)]
            check_covered(held, node.memory.ranks[target.rank].groups[index], [peer.name for peer in routes])
            if len(routes) == 1:
                next(iter(routes.values())).complete.add((target.rank, index))


def _with_context(node: Node, routes: Mapping[PeerDriver, Routes], dispatch: Dispatch) -> PeerDriver:
    """The first peer that has all the context buffers that are wanted."""
    wanted = {layout.name for target in dispatch.ranks for layout in node.memory.ranks[target.rank].context}
    there = {
        peer: {layout.name for rank in route.ranks.values() for layout in rank.context}
        for peer, route in routes.items()
    }
    for peer, names in there.items():
        if wanted <= names:
            return peer
    raise MismatchError("context buffers", sorted(wanted), {peer.name: sorted(names) for peer, names in there.items()})
