"""What both roles share: opening a Messenger over an engine's cache, and the thread that runs the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import kvmsgr

from .cache import DIMS
from .engine import Engine

STALL_S = 0.5  # without a row landing, once all is posted: on one machine this is long
STEP_TIMEOUT_S = 60.0
TIME_ALLOWED_S = 240.0  # a prompt may wait for all others to be prefilled first


async def open_messenger(
    name: str, engine: Engine, hidden: Tensor, fabric: str, hold_s: float = 0.0
) -> kvmsgr.Messenger:
    """Open a Messenger that moves the pages of an engine's cache and, a request, one hidden state.

    Args:
        name: Name in logs.
        engine: Its cache and the fingerprint of its weights are announced to peers.
        hidden: Shape [num_slots, hidden]: context slots for the state of the last prefilled token.
        fabric: As in `kvmsgr.Config`.
        hold_s: A step may stand still that long; no time runs out meanwhile.
    """
    group = kvmsgr.CacheGroup.from_tensors([engine.cache.tensor], dims=DIMS[engine.cache.layout], name="kv")
    config = kvmsgr.Config(
        name=name,
        fabric=fabric,
        model=f"smollm2-135m@{engine.checkpoint.fingerprint}",
        stall_s=STALL_S,
        time_allowed_s=TIME_ALLOWED_S + hold_s,
        step_timeout_s=STEP_TIMEOUT_S + hold_s,
    )
    context = [kvmsgr.ContextBuffer("hidden", hidden)]
    return await kvmsgr.Messenger.open(config, kvmsgr.Cache(groups=[group]), context)


def model_thread() -> ThreadPoolExecutor:
    """One thread that runs the forward passes one after the other, beside the event loop."""
    return ThreadPoolExecutor(1, "model", initializer=torch.set_num_threads, initargs=(1,))
