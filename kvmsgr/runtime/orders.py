"""What one native call arms: the transfers of some chunks and contexts, and the pages that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmsgr.layout import PageWrites, Template
from kvmsgr_protocol import immediate

if TYPE_CHECKING:
    from .serve import PrefillRequest

_NO_PAGES = np.empty((0, 2), dtype=np.int32)
_NO_EDGES = np.empty((0, 4), dtype=np.uint64)


class Orders:
    """Collects transfers; see `Poller.begin_step` for their columns."""

    def __init__(self) -> None:
        self._orders: list[tuple[int, ...]] = []
        self._pages = [_NO_PAGES]
        self._edges = [_NO_EDGES]
        self._num_pages = self._num_edges = 0

    def __len__(self) -> int:
        return len(self._orders)

    def add_positions(self, request: PrefillRequest, stop: int, ready: bool) -> None:
        """The pages of a request that are final when all positions below `stop` are computed: one transfer for each
        pair of ranks, template and rail. They share the list of pages.

        Args:
            ready: They are final already, and wait for no layer.

        Raises:
            LayoutError: A position has no source page.
        """
        routes = request.peer.routes
        assert routes is not None
        how = *_names(request), int(ready)
        for writes, templates in request.delivery.advance(stop):
            first, num = self._add_pages(writes.pairs), len(writes.pairs)
            for source, (template, rails) in templates:
                edges = _edges(template, writes)
                first_edge = self._add_edges(edges) if len(edges) else 0
                turn = request.node.turn()
                for place, (link, number) in enumerate(rails):  # each takes its share of the pages, one the edges
                    share = (place + turn) % len(rails)
                    start, end = first + num * share // len(rails), first + num * (share + 1) // len(rails)
                    last_edge = first_edge + len(edges) if share == len(rails) - 1 else first_edge
                    if start < end or first_edge < last_edge:
                        part = routes.part_of(source)
                        self._orders.append((part, link, number, *how, start, end, first_edge, last_edge))

    def add_context(self, request: PrefillRequest, ready: bool) -> None:
        """The context buffers of a request."""
        routes = request.peer.routes
        assert routes is not None
        how = *_names(request), int(ready)
        slot = self._add_pages(np.array([[request.context_slot, request.dispatch.context_slot]], dtype=np.int32))
        for source, (_, rails) in request.delivery.context():
            for link, number in rails:
                self._orders.append((routes.part_of(source), link, number, *how, slot, slot + 1, 0, 0))

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
        """Orders, pages and edges."""
        orders = np.array(self._orders, np.int64).reshape(-1, 10)
        return orders, np.concatenate(self._pages), np.concatenate(self._edges)

    def _add_pages(self, pairs: npt.NDArray[np.int32]) -> int:
        """Returns where they begin."""
        start = self._num_pages
        self._pages.append(pairs)
        self._num_pages += len(pairs)
        return start

    def _add_edges(self, edges: npt.NDArray[np.uint64]) -> int:
        start = self._num_edges
        self._edges.append(edges)
        self._num_edges += len(edges)
        return start


def _names(request: PrefillRequest) -> tuple[int, int]:
    """The immediate and the tag of all transfers of a request."""
    return immediate.base(request.dispatch.slot, request.dispatch.generation), request.tag


def _edges(template: Template, writes: PageWrites) -> npt.NDArray[np.uint64]:
    return np.concatenate([_NO_EDGES, *(template.edge_runs(*edge) for edge in writes.edges)])
