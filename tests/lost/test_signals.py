"""A process is killed, or stopped and woken after its lease, in the middle of transfers; a bystander goes on.

What must hold, whatever the victim was doing:

- The pages of its peer come back by the fence, within the lease and a second of the signal.
- They have a next owner the moment they come back, who writes all over them: nothing of that shows up at the victim,
  and nothing of the victim's changes it. The same holds for the pages of a victim that wakes up, and these come back
  within a second.
- Requests of a bystander end with every row counted and every byte right, all the time.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from .cluster import Child, Cluster, cluster, until

LEASE_S, HEARTBEAT_S = 2.0, 0.5
FENCE_S = 1.0  # from the end of the lease, or from waking up
MORE = 8  # requests that the bystander must still see through afterwards
WIDTH, PAGES = 4, (4, 32)  # requests under way in a stream, and their sizes
SEEDS = [int(seed) for seed in os.environ.get("KVMSGR_LOST_SEEDS", "1").split(",")]  # each another moment
SHAPES = {"one rank": (1, 1), "three ranks with two interfaces": (3, 2)}
FABRICS = [("net", "endpoint"), ("net", "rotation"), ("shm", "endpoint")]


def cells() -> list[tuple[str, str, str, str, int]]:
    """Any two of fabric, role and shape meet; a seed more gives the other half of all that there are."""
    return [
        (fabric, fence, role, list(SHAPES)[(row + column + seed) % 2], seed)
        for seed in SEEDS
        for row, (fabric, fence) in enumerate(FABRICS)
        for column, role in enumerate(["decoder", "prefiller"])
    ]


pytestmark = [pytest.mark.slow, pytest.mark.parametrize(("fabric", "fence", "role", "shape", "seed"), cells())]


@dataclass
class Scene:
    """`live` and `victim` have requests "victim-..." between them, `live` and `bystander` have "bystander-..."."""

    cluster: Cluster
    live: Child
    victim: Child
    bystander: Child

    def decoder_of(self, other: Child) -> Child:
        """Of what `live` and another have between them."""
        return self.live if self.live.role == "decoder" else other

    def prefiller_of(self, other: Child) -> Child:
        return other if self.live.role == "decoder" else self.live

    def stream(self, other: Child, name: str) -> None:
        source = self.prefiller_of(other).descriptor
        self.decoder_of(other).do("stream", name=name, source=source, width=WIDTH, pages=PAGES)

    async def stop_in_the_middle(self, seed: int) -> float:
        """Stop the victim at a moment when a request of it is half sent; the seed decides at which. Returns when.

        No more requests of it are asked for. Requests are short, and there may be none under way just then: since a
        process that is stopped for a moment notices nothing, it goes on until the next one is accepted.
        """
        prefiller, num = self.prefiller_of(self.victim), random.Random(seed).randint(5, 25)
        while True:
            num = max(num, len(await prefiller.requests(num, "accepted", "victim-")) + 1)
            stopped = self.victim.stop()
            if self.half_sent():
                self.decoder_of(self.victim).do("halt", name="victim")
                return stopped
            self.victim.wake()

    def half_sent(self) -> list[str]:
        """Requests of the victim that both sides hold pages of, and that are posted in part."""
        serves, fetches = self.prefiller_of(self.victim).legs(), self.decoder_of(self.victim).legs()
        return [
            id
            for id in serves.keys() & fetches.keys()
            if id.startswith("victim-") and 0 < serves[id].rows_posted < serves[id].rows_expected
        ]

    async def check_caught(self, side: Child, signalled: float, seconds: float) -> None:
        """Requests of the victim were under way when it was stopped or woken, and their pages on this side came back in
        time."""
        await side.until(lambda: side.all_released("victim-"), "all pages came back", seconds + 5)
        late = {id: event["t"] - signalled for id, event in side.of("released", "victim-").items()}
        late = {id: after for id, after in late.items() if after > 0}
        assert late, "nothing was under way at the signal"
        print(f"{len(late)} requests: pages of the {side.name} {side.role} came back within {max(late.values()):.3f} s")
        assert max(late.values()) <= seconds, f"too late: {late}"

    async def check_bystander(self) -> None:
        """It goes on, and nothing of its requests went wrong at any time."""
        decoder = self.decoder_of(self.bystander)
        before = len(decoder.of("arrived", "bystander-"))
        await decoder.until(
            lambda: decoder.of("failed", "bystander-") or len(decoder.of("arrived", "bystander-")) >= before + MORE,
            f"{MORE} more requests of the bystander arrived",
        )
        decoder.do("halt", name="bystander")
        await decoder.stream_over("bystander", WIDTH)
        failed = decoder.of("failed", "bystander-").values()
        assert not failed, f"{len(failed)} requests of the bystander failed: {next(iter(failed))}"

    async def check_end(self, *alive: Child) -> None:
        """Every byte in every cache, and that nothing is left."""
        for child in alive:
            await child.idle()
            audit = await child.ask("audit", "audit")
            child.check()
            assert not audit["legs"]
            assert not audit["held"]
            assert not audit["strays"]
            assert audit["unhealthy"] is None
        await self.cluster.close(*alive)


@asynccontextmanager
async def scene(folder: Path, role: str, shape: str, **config: object) -> AsyncIterator[Scene]:
    """Three processes, all of them busy; `role` is the victim's, `shape` is of all."""
    async with cluster(folder, *SHAPES[shape], lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, **config) as processes:
        [live] = await processes.add("prefiller" if role == "decoder" else "decoder", "live")
        victim, bystander = await processes.add(role, "victim", "bystander")
        made = Scene(processes, live, victim, bystander)
        made.stream(victim, "victim")
        made.stream(bystander, "bystander")
        yield made


async def test_a_killed_process_leaves_pages_and_others_unharmed(
    fabric: str, fence: str, role: str, shape: str, seed: int, tmp_path: Path
) -> None:
    async with scene(tmp_path, role, shape, fabric=fabric, fence=fence) as now:
        killed = await now.stop_in_the_middle(seed)
        now.victim.kill()
        await now.victim.ended()
        await now.check_caught(now.live, killed, LEASE_S + FENCE_S)
        await now.check_bystander()
        await now.check_end(now.live, now.bystander)


async def test_a_stopped_process_that_wakes_up_harms_nobody_and_is_a_new_peer(
    fabric: str, fence: str, role: str, shape: str, seed: int, tmp_path: Path
) -> None:
    async with scene(tmp_path, role, shape, fabric=fabric, fence=fence) as now:
        stopped = await now.stop_in_the_middle(seed)
        await until(stopped + LEASE_S + FENCE_S)  # the lease must run out while nothing happens
        await now.check_caught(now.live, stopped, LEASE_S + FENCE_S)
        if role == "prefiller":  # it was heard of last at least a heartbeat before, so that nothing proved more yet
            first = min(event["t"] for event in now.live.of("failed", "victim-").values())
            assert first >= stopped + LEASE_S - 2 * HEARTBEAT_S, f"lost {first - stopped:.3f} s after the signal"
        woken = now.victim.wake()
        await now.check_caught(now.victim, woken, FENCE_S)
        decoder, source = now.decoder_of(now.victim), now.prefiller_of(now.victim).descriptor
        for index in range(3):
            decoder.do("fetch", id=f"again-{index}", source=source, num_pages=12)
        await decoder.requests(3, "arrived", "again-")
        await now.check_bystander()
        await now.check_end(now.live, now.victim, now.bystander)
