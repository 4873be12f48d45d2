"""The published deployments, two processes each: every byte arrives, and no more is moved than needed."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvmsgr
from kvmsgr.fabric import leftovers

from .deployments import DEPLOYMENTS, Deployment
from .sharded import node, within

PATIENCE_S = 60.0


@asynccontextmanager
async def prefill_process(
    deployment: Deployment, fabric: str, log: Path
) -> AsyncIterator[tuple[kvmsgr.Descriptor, asyncio.StreamReader]]:
    """Its prefill node, and what it goes on to tell. Its log is shown when the test fails."""
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.ranks.prefill_process", deployment.name, fabric),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield kvmsgr.Descriptor(*await told(process.stdout)), process.stdout
        process.stdin.close()
        assert await within(process.wait()) == 0
    except BaseException:
        print(log.read_text()[-4000:])
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
            leftovers.sweep(leftovers.state_folder())


async def told(lines: asyncio.StreamReader) -> Any:
    line = await within(lines.readline(), PATIENCE_S)
    assert line, "the prefill process has ended"
    return json.loads(line)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "shm"])
@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment.name)
async def test_every_byte_arrives(
    deployment: Deployment, fabric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        prefill_process(deployment, fabric, tmp_path / "prefill.log") as (source, lines),
        node(
            "decode", deployment.groups, deployment.target, fabric=fabric, context=deployment.context, seed=2
        ) as decoder,
    ):
        for number, prompt in enumerate(deployment.prompts):
            receiving = decoder.receive([source], number, prompt.num_tokens, prompt.ranks)
            [arrival] = await within(receiving, PATIENCE_S)
            if deployment.context:
                assert sorted(arrival.contexts) == list(deployment.ranks(prompt))
                assert all((views["hidden"] == number).all() for views in arrival.contexts.values())
            arrival.release()
        served = await told(lines)
    stats, spread = served["stats"], kvmsgr.Spread(**served["spread"])
    writes, num_bytes, every = stats["posted_writes"], stats["posted_bytes"], deployment.prompts
    planned_ms = statistics.median(served["planning_s"]) * 1e3
    with capsys.disabled():
        print(
            f"\n{deployment.name:<24} {fabric}  writes {writes:<6} bytes {num_bytes:<10} bytes a write "
            f"{num_bytes // writes:<7} redundancy {spread.redundancy:g}  planned in {planned_ms:.2f} ms "
            f"({len(served['planning_s'])} steps)"
        )
    assert 0 < writes <= sum(map(deployment.most_writes, every))
    assert sum(map(deployment.least_bytes, every)) <= num_bytes <= sum(map(deployment.most_bytes, every))
    assert sum(spread.given_bytes) == sum(map(deployment.least_bytes, every))
    assert spread.unique_bytes == sum(map(deployment.unique_bytes, every))
