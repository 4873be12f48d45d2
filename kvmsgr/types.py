"""Plain values that travel between an engine and its messenger: picklable, and without the native layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Span:
    """Which positions a list of pages holds.

    Args:
        group: Index of the cache group.
        first_token: First position the span covers. It may lie inside a page: the first page of the list is then
            the one that holds it.
        pages: Page indices in order of position.
    """

    group: int
    first_token: int
    pages: Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RawArray:
    """An array by its address, for memory that is no tensor.

    Args:
        address: Address of element [0, 0, ...].
        shape: Elements along each axis.
        strides_bytes: Distance between neighbours along each axis, in bytes.
        dtype: Element type by name, as both sides spell it, e.g. "bfloat16".
        item_bytes: Bytes of one element.
    """

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How the bytes of a prefiller's requests were spread over its ranks.

    Args:
        given_bytes: For each rank, KV that it was given to send.
        unique_bytes: The same KV, without what was given twice because several of a decoder's ranks want copies.
    """

    given_bytes: tuple[int, ...]
    unique_bytes: int

    @property
    def redundancy(self) -> float:
        """How often each byte travels; 1 when nothing does."""
        return sum(self.given_bytes) / self.unique_bytes if self.unique_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Descriptor:
    """How to reach one messenger. Plain and picklable: it may travel through a router.

    Args:
        address: "tcp://host:port" or "unix:path" of its control socket.
        incarnation: 32 hex digits, new at each start; a restarted messenger is another peer.
        name: Its name in logs.
    """

    address: str
    incarnation: str
    name: str = field(default="", compare=False)
