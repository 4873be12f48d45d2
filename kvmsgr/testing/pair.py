"""Two sides, paired by one link."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Unpack

import numpy as np

from kvmsgr.fabric import records

from .fabrics import FabricUnderTest, Options
from .remote import open_far
from .side import IMMEDIATE, NUM_LAYERS, NUM_PAGES, WARM_ATTEMPT, WARM_IMMEDIATE, Pairs, Side

SCATTERED = [(page, (page * 7 + 3) % NUM_PAGES) for page in range(NUM_PAGES)]
"""Every page, and no two neighbours: nothing can be merged."""


class Pair:
    """`source` writes to `target`.

    Each network interface of a side has a link, connected to every endpoint of the other side. Of these, link e beats
    those whose number is e, modulo the number of its side's links.

    Args:
        window: Operations that each side grants the other, a link.
        nics: Network interfaces of the source, and of the target.
        closes_under_traffic: The target's link may be closed while it is written to. The target is then in another
            process where the fabric cannot bear that in one.
    """

    def __init__(
        self,
        fabric: FabricUnderTest,
        *,
        window: int = 64,
        nics: tuple[int, int] = (1, 1),
        closes_under_traffic: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self.fabric = fabric
        self.window = window
        self.far = closes_under_traffic and not fabric.closes_in_process
        self.nics = nics
        self.source = Side(fabric, nics[0], **options)
        self.source.fill()
        self.target = open_far(fabric.name, nics[1], **options) if self.far else Side(fabric, nics[1], **options)
        self.connect()

    def connect(self) -> None:
        """Pair the two by new links."""
        self.links = [self.source.open_link(nic) for nic in range(self.nics[0])]
        self.target_links = [self.target.open_link(nic) for nic in range(self.nics[1])]
        self.link, self.target_link = self.links[0], self.target_links[0]
        join(self.source, self.links, self.target, self.target_links, self.window)
        join(self.target, self.target_links, self.source, self.links, self.window)
        self.template = self.source.add_template(self.link)

    def begin(self, pairs: Pairs, *, tag: int = 1, ready: bool = False, num_bumps: int = NUM_LAYERS) -> int:
        """Arm one transfer of whole pages."""
        return self.source.begin([((self.link, self.template, IMMEDIATE, tag, ready), pairs)], num_bumps)

    def send(self, num_transfers: int, pairs: Pairs = SCATTERED) -> None:
        """Transfers that wait for nothing, tagged 0, 1, ..."""
        order = (self.link, self.template, IMMEDIATE)
        self.source.begin([((*order, tag, True), pairs) for tag in range(num_transfers)], num_bumps=0)

    def warm_up(self) -> None:
        """One write goes both ways, so that the connection is up; it is counted elsewhere and cleared away."""
        self.target.expect_warm()
        self.source.begin([((self.link, self.template, WARM_IMMEDIATE, 1 << 20, True), [(0, 0)])], num_bumps=0)
        self.source.wait(records.SENT, 1 << 20)
        self.target.wait(records.REACHED, WARM_ATTEMPT)
        self.target.clear()

    def assert_moved(self, pairs: Pairs) -> None:
        found, sent = self.target.copy(), self.source.pages
        for src, dst in pairs:
            np.testing.assert_array_equal(found[:, dst], sent[:, src])

    def settle(self) -> None:
        """Wait until nothing is in flight and the target has read all that was sent."""
        self.target.hold(False)

        def still() -> bool:
            before = self.source.stats()
            self.source.wait_rounds(3)
            self.target.wait_rounds(20)
            after = self.source.stats()
            quiet = all(before[stat] == after[stat] for stat in ("posted_writes", "again"))
            return quiet and after["posted_writes"] == after["completed_writes"]

        self.source.until(still, "nothing in flight")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.far and not self.fabric.closes_in_process and not self.source.poller.closed and kind is None:
            self.settle()
        self.source.close()
        self.target.close()


def join(side: Side, links: Sequence[int], peer: Side, peer_links: Sequence[int], window: int) -> None:
    """Connect all links of a side."""
    places = [peer.place(link) for link in peer_links]
    for index, link in enumerate(links):
        side.connect_all(link, places, window, range(index, len(places), len(links)))
