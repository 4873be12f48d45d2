"""T07: a decoder dies in each state of a request. Its prefiller gets all source pages back, in time and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import Child, cluster

LEASE_S, HEARTBEAT_S = 2.0, 0.5
FENCE_S = 1.0
UNFINISHED = ["accepted", "allocated", "first layer sent", "last chunk sent"]  # nothing but the loss can end these
STATES = ["context sent", *UNFINISHED, "ready"]  # the first is held while nothing rotates: it could not be moved
QUEUED_S, QUEUED_LEASE_S, QUEUED_HEARTBEAT_S = 5.0, 0.5, 0.1
BLOCKED_S = 3 * QUEUED_LEASE_S


async def die(prefiller: Child, decoder: Child, state: str) -> None:
    """Bring a request into a state, and kill its decoder there."""
    num_pages = 24
    if state == "context sent":  # all of it, which shm takes from a few KiB a write, and the decoder sees nothing land
        await decoder.ask("hold", "held", held=True)
        num_pages = 1
    hold = {} if state == "ready" else {"hold": state}
    decoder.do("fetch", id=state, source=prefiller.descriptor, num_pages=num_pages, **hold)
    if state == "ready":
        await decoder.event("arrived", id=state)
    else:
        await prefiller.event("held", id=state, point=state)
    killed = decoder.kill()
    released = await prefiller.event("released", id=state)
    after = released["t"] - killed
    print(f"{state}: source pages free {after:.3f} s after the decoder died")
    assert after <= LEASE_S + FENCE_S
    if state in UNFINISHED:
        assert after > 0, "pages came back while the request was alive"
    outcome = await prefiller.event("outcome", id=state)
    assert (outcome["ok"], outcome["reason"]) == ((True, "None") if state == "ready" else (False, "peer_lost"))


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "fence"), [("net", "endpoint"), ("net", "rotation"), ("shm", "endpoint")])
async def test_t07_a_decoder_that_dies_in_any_state_strands_no_source_page(
    fabric: str, fence: str, tmp_path: Path
) -> None:
    """T07: killed when its request is accepted, allocated, has its first layer sent, its last chunk, its context, or is
    ready: all source pages are free within the lease and a second, and others are served on."""
    async with cluster(tmp_path, fabric=fabric, fence=fence, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S) as processes:
        [prefiller] = await processes.add("prefiller", "prefiller")
        *decoders, bystander = await processes.add("decoder", *(state.replace(" ", "-") for state in STATES), "other")
        for decoder in (*decoders, bystander):
            decoder.do("fetch", id=f"hello-{decoder.name}", source=prefiller.descriptor, num_pages=4)
            await decoder.event("released", id=f"hello-{decoder.name}")
        bystander.do("stream", name="other", source=prefiller.descriptor, width=2, pages=(4, 32))
        for decoder, state in zip(decoders, STATES, strict=True):
            await die(prefiller, decoder, state)
        bystander.do("halt", name="other")
        await bystander.stream_over("other", 2)
        assert not bystander.told("failed")
        await prefiller.idle()
        audit = await prefiller.ask("audit", "audit")
        assert audit["legs"] == []
        assert (await bystander.ask("audit", "audit"))["strays"] == 0
        await processes.close(prefiller, bystander)


@pytest.mark.slow
async def test_t07_a_live_decoder_is_never_expired(tmp_path: Path) -> None:
    """T07: a request that waits in the prefiller's queue for ten leases arrives, even if both engines keep their
    interpreters busy for several leases meanwhile: the polling threads tell of each other."""
    async with cluster(tmp_path, lease_s=QUEUED_LEASE_S, heartbeat_s=QUEUED_HEARTBEAT_S) as processes:
        pairs = []
        for fabric in ("net", "shm"):
            prefiller, decoder = [
                await processes.open(await processes.start(role, f"{role}-{fabric}"), fabric=fabric)
                for role in ("prefiller", "decoder")
            ]
            pairs.append((prefiller, decoder))
        for prefiller, decoder in pairs:
            decoder.do("fetch", id="queued", source=prefiller.descriptor, num_pages=24, queue_s=QUEUED_S)
        for prefiller, decoder in pairs:
            await prefiller.event("accepted", id="queued")
            prefiller.do("block", seconds=BLOCKED_S)
            decoder.do("block", seconds=BLOCKED_S)
        for prefiller, decoder in pairs:
            unblocked = [await child.event("unblocked") for child in (prefiller, decoder)]
            [accepted], arrived = prefiller.told("accepted", id="queued"), await decoder.event("arrived", id="queued")
            assert arrived["t"] - accepted["t"] >= QUEUED_S
            assert all(accepted["t"] + BLOCKED_S < event["t"] < arrived["t"] for event in unblocked)
            assert (await prefiller.event("outcome", id="queued"))["ok"]
            await decoder.event("released", id="queued")
            await processes.close(prefiller, decoder)
