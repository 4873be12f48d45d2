"""What callers ask of a step: its orders, checked, as transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvmsgr.fabric.interface import ORDER_FIELDS

from .links import Transfer
from .plan import Template, expand
from .steps import Stream

MAX_BUMPS = (1 << 24) - 1


def part_streams(streams: Sequence[Stream], parts: Sequence[tuple[int, int]]) -> list[Stream]:
    """The layer counters that the parts of a step name first.

    Raises:
        ValueError: There are no parts, or one names no counter, or two the same.
    """
    if not parts:
        raise ValueError("a step on 0 layer counters; want at least 1")
    for index, (counter, _) in enumerate(parts):
        if not 0 <= counter < len(streams):
            raise ValueError(f"layer counter {counter} of {len(streams)}")
        if counter in [earlier for earlier, _ in parts[:index]]:
            raise ValueError(f"layer counter {counter} has two parts of one step")
    return [streams[counter] for counter, _ in parts]


def read_orders(
    templates: Mapping[int, Template],
    num_bumps: Sequence[int],
    orders: npt.NDArray[np.int64],
    pages: npt.NDArray[np.int32],
    edges: npt.NDArray[np.uint64],
    max_write_bytes: int,
) -> list[list[Transfer]]:
    """The transfers of each part of a step, which shows so many bumps there.

    Raises:
        ValueError: An order makes no sense, or a write would leave its region.
    """
    if orders.shape[1:] != (len(ORDER_FIELDS),):
        raise ValueError(f"orders has {len(ORDER_FIELDS)} columns")
    transfers: list[list[Transfer]] = [[] for _ in num_bumps]
    for index, order in enumerate(orders.tolist()):
        try:
            transfer = _transfer(templates, num_bumps, order, pages, edges, max_write_bytes)
        except ValueError as error:
            raise ValueError(f"transfer {index}: {error}") from None
        transfers[order[0]].append(transfer)
    return transfers


def _transfer(
    templates: Mapping[int, Template],
    num_bumps: Sequence[int],
    order: list[int],
    pages: npt.NDArray[np.int32],
    edges: npt.NDArray[np.uint64],
    max_write_bytes: int,
) -> Transfer:
    part, link, number, immediate, tag, ready, page_start, page_stop, edge_start, edge_stop = order
    ranges = 0 <= page_start <= page_stop <= len(pages) and 0 <= edge_start <= edge_stop <= len(edges)
    if not ranges or not all(0 <= value < 1 << 32 for value in order[:5]) or ready not in (0, 1):
        raise ValueError(f"{order}: a number or a slice is out of range")
    if part >= len(num_bumps):
        raise ValueError(f"part {part} of a step of {len(num_bumps)}")
    template = templates.get(number)
    if template is None or template.link != link:
        raise ValueError(f"link {link} has no template {number}")
    if immediate & 0x3FFF:
        raise ValueError(f"immediate {immediate:#x} already carries rows")
    last = template.entries[-1].signal
    if not ready and last > num_bumps[part]:
        raise ValueError(f"it waits for signal {last} of a step with {num_bumps[part]} bumps")
    its_pages, its_edges = pages[page_start:page_stop].tolist(), edges[edge_start:edge_stop].tolist()
    return Transfer(template, expand(template, its_pages, its_edges, max_write_bytes), immediate, tag, bool(ready))
