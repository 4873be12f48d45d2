"""The prefill node of a deployment, in a process of its own: `python -m tests.ranks.prefill_process NAME FABRIC`.

Tells in lines of JSON: first where it is, and when it has served every prompt, what that took.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from dataclasses import asdict

import structlog

from kvmsgr._ext import native

from .deployments import DEPLOYMENTS, Deployment
from .sharded import node


async def serve(deployment: Deployment, fabric: str) -> None:
    async with node(
        "prefill", deployment.groups, deployment.source, fabric=fabric, context=deployment.context, seed=1
    ) as prefiller:
        at = prefiller.lead.descriptor
        print(json.dumps([at.address, at.incarnation, at.name]), flush=True)
        for number, prompt in enumerate(deployment.prompts):
            await prefiller.prefill(number, prompt.chunk)
        messenger = prefiller.lead
        took = {"stats": messenger.stats(), "spread": asdict(messenger.spread), "planning_s": prefiller.planning_s}
        print(json.dumps(took), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the decoder has all it wants


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    name, fabric = sys.argv[1:]
    [deployment] = [one for one in DEPLOYMENTS if one.name == name]
    asyncio.run(serve(deployment, fabric))
    gc.collect()
    left = {kind: num for kind, num in native.debug_counters().items() if num}
    if left:
        sys.exit(f"native objects are left: {left}")


if __name__ == "__main__":
    main()
