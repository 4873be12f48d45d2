"""T08: a prefiller is killed and started anew on the same address, again and again, under one decoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import Child, cluster

LEASE_S, HEARTBEAT_S = 2.0, 0.5
ROUNDS, WIDTH, NUM_PAGES = 20, 8, 12
WARM_UP = 8  # rounds until what is allocated once has been allocated
GROWTH_BYTES = 1 << 20
ABANDONED_BYTES = (
    4 << 20
)  # a shm domain, kept for good where a peer died with a lock of it: its completion queue, mainly
POINTS = ["first layer sent", "last chunk sent", "allocated"]


def fetch(decoder: Child, prefiller: Child, prefix: str, point: str | None) -> None:
    """Ask for eight requests; at `point` of the first one the engine stands still."""
    for index in range(WIDTH):
        hold = {"hold": point} if point and index == 0 else {}
        decoder.do("fetch", id=f"{prefix}-{index}", source=prefiller.descriptor, num_pages=NUM_PAGES, **hold)


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "fence"), [("net", "endpoint"), ("shm", "endpoint")])
async def test_t08_a_prefiller_restarts_on_the_same_address(fabric: str, fence: str, tmp_path: Path) -> None:
    """T08: 20 times: of 8 requests in flight each fails once, because the peer is lost; 8 more succeed at the new one.
    No row of the old epoch is counted, and the decoder's memory and pages stay what they were."""
    async with cluster(tmp_path, fabric=fabric, fence=fence, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S) as processes:
        [decoder], [prefiller] = await processes.add("decoder", "decoder"), await processes.add("prefiller", "first")
        listen, audits = prefiller.descriptor[0], []
        for number in range(ROUNDS):
            following = await processes.start("prefiller", f"after-{number}")
            old, new, point = f"old-{number}", f"new-{number}", POINTS[number % len(POINTS)]
            fetch(decoder, prefiller, old, point)
            await prefiller.requests(WIDTH, "accepted", f"{old}-")
            await prefiller.event("held", id=f"{old}-0", point=point)
            prefiller.kill()
            await prefiller.ended()

            await processes.open(following, listen=listen)
            assert following.descriptor[0] == listen
            fetch(decoder, following, new, None)
            failed = await decoder.requests(WIDTH, "failed", f"{old}-")
            assert [event["reason"] for event in failed.values()] == ["peer_lost"] * WIDTH
            await decoder.requests(WIDTH, "arrived", f"{new}-")
            await decoder.requests(WIDTH, "released", f"{old}-")
            await decoder.requests(WIDTH, "released", f"{new}-")
            audits.append(await decoder.ask("audit", "audit", give_kept=True))
            decoder.check()
            prefiller = following
        assert len(decoder.told("failed")) == ROUNDS * WIDTH  # each once
        for audit in audits:
            assert (audit["held"], audit["legs"], audit["strays"], audit["unhealthy"]) == (0, [], 0, None)
        first, last = audits[WARM_UP], audits[-1]
        grown = last["resident_bytes"] - first["resident_bytes"]
        abandoned = last["abandoned"] - first["abandoned"]
        print(f"resident: {grown:+} bytes in {ROUNDS - WARM_UP} rounds, {abandoned} domains abandoned")
        print(f"files: {first['files']}, {last['files']}")
        assert grown <= GROWTH_BYTES + abandoned * ABANDONED_BYTES
        assert last["files"] <= first["files"]
        assert last["peers"] <= first["peers"]
        await processes.close(decoder, prefiller)
