"""Prefill in one process, decode in another, kvmsgr between them; every logit compared with a run in one process."""

from __future__ import annotations

import argparse
import faulthandler
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from . import prompts as texts
from . import roles
from .cache import PagedCache
from .decode import Delivery
from .engine import Engine
from .loader import Checkpoint, load
from .model import MAX_POSITIONS
from .processes import Children, DemoFailed
from .reference import Answer, run_alone
from .report import PromptReport, Report
from .selftest import bitwise_difference, difference_of

LONGEST_HOLD_S = 3600
REFERENCE_STEP_TOKENS = 1024  # the reference computes each prompt by itself, in one chunk


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "tools/demo",
        description=__doc__,
        epilog="Exit codes: 0 every logit row is equal, 1 something differs or failed, 2 wrong usage, 130 interrupted.",
    )
    add = parser.add_argument
    add("--prompts", type=positive, default=8, metavar="N", help="number of built-in prompts (default: 8)")
    add("--prompt-file", type=Path, metavar="FILE", help="your own prompts instead, separated by blank lines")
    add("--new-tokens", type=positive, default=24, metavar="N", help="most tokens to generate a prompt (default: 24)")
    add("--chunk-tokens", type=positive, default=64, metavar="N", help="tokens a prefill step computes (default: 64)")
    add("--page-tokens", type=int, choices=(8, 16, 32, 64), default=16, help="tokens a page (default: 16)")
    add("--layout", choices=("hnd", "nhd"), default="hnd", help="order inside a page (default: hnd)")
    add("--provider", choices=("auto", "shm", "net", "tcp"), default="auto", help="libfabric provider (default: auto)")
    add("--seed", type=int, default=0, metavar="N", help="shuffles the pages (default: 0)")
    add("--post-at-end", action="store_true", help="send a prompt's pages only when all of it is computed")
    add("--corrupt-write", type=positive, metavar="N", help="flip a byte in the Nth write; the demo must notice")
    add("--drop-write", type=positive, metavar="N", help="lose the Nth write; the demo must notice")
    add(
        "--hold",
        type=positive,
        nargs="?",
        const=LONGEST_HOLD_S,
        default=0,
        metavar="S",
        help="stand still in the middle of the transfers for S seconds (or until Enter), to look at them",
    )
    add("--json", type=Path, metavar="FILE", help="write the report there too")
    add("--time-limit", type=positive, default=300, metavar="S", help="seconds for everything (default: 300)")
    add("-v", "--verbose", action="store_true", help="show the logs of both processes")
    options = parser.parse_args(arguments)
    if options.hold and options.post_at_end:
        parser.error("--hold shows transfers under way; --post-at-end has none while a step runs")
    return options


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended in order
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(
        2 * options.time_limit + options.hold, exit=True
    )  # should even the time limit be stuck
    if options.json and not os.access(options.json.parent, os.W_OK):
        print(f"tools/demo: cannot write {options.json}: no such folder, or not writable", file=sys.stderr)
        return 2
    try:
        questions = texts.from_file(options.prompt_file) if options.prompt_file else texts.built_in(options.prompts)
    except (OSError, ValueError) as error:
        print(f"tools/demo: {error}", file=sys.stderr)
        return 2
    log_folder = None if options.verbose else Path(tempfile.mkdtemp(prefix="kvmsgr-demo-"))
    keep_logs = False
    try:
        report = run(options, questions, log_folder)
        keep_logs = not report.ok
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    except DemoFailed as error:
        keep_logs = True
        print(f"demo FAILED\n{error}")
        return 1
    finally:
        if log_folder and keep_logs:
            print(f"logs: {log_folder}")
        elif log_folder:
            shutil.rmtree(log_folder)
    print(report.text())
    if options.json:
        report.write_json(options.json)
    return 0 if report.ok else 1


def run(options: argparse.Namespace, questions: Sequence[str], log_folder: Path | None) -> Report:
    """Answer the questions over two processes and in one, and compare. Raises DemoFailed."""
    checkpoint = load()
    prompts = {f"prompt-{index}": checkpoint.encode_chat(text) for index, text in enumerate(questions)}
    for request_id, prompt in prompts.items():
        if len(prompt) + options.new_tokens > MAX_POSITIONS:
            raise DemoFailed(f"{request_id} has {len(prompt)} tokens; the model has room for {MAX_POSITIONS} in all")
    pages = [-(-(len(prompt) + options.new_tokens) // options.page_tokens) for prompt in prompts.values()]
    for_decode = roles.RoleOptions(
        num_pages=sum(pages),
        num_requests=len(prompts),
        seed=options.seed,
        page_tokens=options.page_tokens,
        layout=options.layout,
        fabric=options.provider,
        step_tokens=options.chunk_tokens,
        new_tokens=options.new_tokens,
        hold_s=options.hold,
    )
    for_prefill = replace(
        for_decode,
        num_pages=max(max(pages), sum(pages) // 2),  # too few for all: pages are used again while others travel
        seed=options.seed + 1,
        post_at_end=options.post_at_end,
        corrupt_write=options.corrupt_write,
        drop_write=options.drop_write,
    )
    with Children(options.time_limit + options.hold, log_folder) as children:
        children.start("prefill", roles.prefill, for_prefill)
        children.start("decode", roles.decode, for_decode)
        instability = bitwise_difference(checkpoint, options.seed)  # while the two load their weights
        if instability:
            print(f"WARNING: arithmetic is not bitwise stable here; only tokens are compared.\n{instability}")
        prefiller: roles.Ready = children.receive("prefill")
        decoder: roles.Ready = children.receive("decode")
        print(f"moving the KV of {len(prompts)} prompts over {prefiller.fabric}", flush=True)
        deliveries, served = serve(children, prefiller, decoder, prompts, options.hold)
    for fault, nth in (("corrupt", options.corrupt_write), ("drop", options.drop_write)):
        if nth is not None and nth > served.num_writes:
            raise DemoFailed(f"there was no write {nth} to {fault}: {served.num_writes} were posted in all")
    print("computing the same in one process", flush=True)
    cache = PagedCache(checkpoint.config, sum(pages), options.page_tokens, options.layout, options.seed + 2)
    expected = run_alone(Engine(checkpoint, cache), list(prompts.values()), options.new_tokens, REFERENCE_STEP_TOKENS)
    bitwise = instability is None
    return Report(
        prompts=[
            describe(checkpoint, request_id, prompts[request_id], answer, deliveries[request_id], served, bitwise)
            for request_id, answer in zip(prompts, expected, strict=True)
        ],
        fabric=prefiller.fabric,
        num_writes=served.num_writes,
        num_bytes=served.num_bytes,
        transfer_s=max(delivery.arrived_s for delivery in deliveries.values()),
        num_distinct_tokens=len({token for delivery in deliveries.values() for token in delivery.answer.tokens}),
        bitwise=bitwise,
    )


def serve(
    children: Children, prefiller: roles.Ready, decoder: roles.Ready, prompts: dict[str, list[int]], hold_s: int
) -> tuple[dict[str, Delivery], roles.Served]:
    """Let the decoder answer all prompts at once."""
    started = time.monotonic()
    try:
        children.send("prefill", roles.Serve(decoder.state_path))
        children.send("decode", roles.Generate(prefiller.descriptor, prompts))
        if hold_s:
            show_held(children, prefiller, decoder, hold_s)
        deliveries: dict[str, Delivery] = children.receive("decode")
        children.send("prefill", roles.Stop())
        served: roles.Served = children.receive("prefill")
    except DemoFailed as error:
        raise DemoFailed(f"{error}\n{time.monotonic() - started:.1f} s after the first request") from error
    return deliveries, served


def show_held(children: Children, prefiller: roles.Ready, decoder: roles.Ready, hold_s: int) -> None:
    """Say how to look at the transfers that stand still, and wait until they may go on."""
    held: roles.Held = children.receive("prefill")
    script = Path(sys.executable).with_name("kvmsgr-cli")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "kvmsgr.cli"]
    by_hand = hold_s == LONGEST_HOLD_S
    print(
        f"held: {held.num_signals} of {held.num_layers} layers of a step are signalled, {held.num_alive} requests are "
        f"alive; prefill is process {prefiller.pid}, decode {decoder.pid}. Look at both with\n"
        f"  {shlex.join([*command, 'inspect', prefiller.state_path, decoder.state_path])}\n"
        f"{'Enter goes on' if by_hand else f'going on in {hold_s} s, or at Ctrl-C'}",
        flush=True,
    )
    try:
        children.idle(hold_s, *([sys.stdin] if by_hand else []))
    except KeyboardInterrupt:
        print()
    children.send("prefill", roles.GoOn())


def describe(
    checkpoint: Checkpoint,
    request_id: str,
    prompt: list[int],
    expected: Answer,
    delivery: Delivery,
    served: roles.Served,
    bitwise: bool,
) -> PromptReport:
    found = delivery.answer
    difference = difference_of(expected, found)
    if not bitwise:
        difference = None if expected.tokens == found.tokens else "tokens differ"
    return PromptReport(
        request_id=request_id,
        num_tokens=len(prompt),
        text=checkpoint.tokenizer.decode(found.tokens),
        num_pages=delivery.num_pages,
        rows=delivery.rows,
        landed_early=served.landed.get(request_id, 0) / delivery.rows if delivery.rows else None,
        difference=difference,
    )
