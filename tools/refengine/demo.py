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
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from . import prompts as texts
from . import roles
from .decode import Delivery
from .engine import local_engine
from .grammar import mask_of
from .loader import Checkpoint
from .model import MAX_POSITIONS
from .models import load
from .options import LONGEST_HOLD_S, Plan, make_plan, parse
from .processes import Children, DemoFailed
from .reference import Answer, run_alone
from .report import PromptReport, Report
from .selftest import bitwise_difference, difference_of, draft_difference
from .spec import CacheSpec, make_groups
from .speculation import acceptance, speculation

REFERENCE_STEP_TOKENS = 1024  # the reference computes each prompt by itself, in one chunk


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    options = parse(arguments, about=__doc__)
    if options.json and not os.access(options.json.parent, os.W_OK):
        print(f"tools/demo: cannot write {options.json}: no such folder, or not writable", file=sys.stderr)
        return 2
    try:
        checkpoint = load(options.model, draft=options.speculate > 0)
        prompts = read_prompts(options, checkpoint)
        check_lengths(prompts, options.new_tokens)
        plan = make_plan(options, checkpoint.config, prompts)
    except (OSError, ValueError) as error:
        print(f"tools/demo: {error}", file=sys.stderr)
        return 2
    end_in_order(2 * options.time_limit + options.hold)  # should even the time limit be stuck
    log_folder = None if options.verbose else Path(tempfile.mkdtemp(prefix="kvmsgr-demo-"))
    keep_logs = False
    try:
        report = run(options, plan, checkpoint, prompts, log_folder)
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


def read_prompts(options: argparse.Namespace, checkpoint: Checkpoint) -> list[list[int]]:
    """The prompts that the options name. Raises OSError or ValueError where a file of them cannot be read."""
    if options.docstrings:
        return texts.cut_docstrings(checkpoint, options.docstrings)
    if options.prompt_file:
        return [checkpoint.encode_chat(text) for text in texts.from_file(options.prompt_file)]
    lengths = options.prompt_tokens
    prompts = [checkpoint.encode_chat(text) for text in texts.built_in(len(lengths) if lengths else options.prompts)]
    if not lengths:
        return prompts
    return [texts.of_length(prompt, num_tokens) for prompt, num_tokens in zip(prompts, lengths, strict=True)]


def end_in_order(limit_s: float) -> None:
    """Let SIGTERM end the children as well, and this process when it is stuck. Torch gets one thread."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(limit_s, exit=True)


def check_lengths(prompts: Sequence[list[int]], new_tokens: int) -> None:
    """Raises ValueError where a prompt is too long for the model."""
    for index, prompt in enumerate(prompts):
        if len(prompt) + new_tokens > MAX_POSITIONS:
            raise ValueError(f"prompt-{index} has {len(prompt)} tokens; the model has room for {MAX_POSITIONS} in all")


def run(
    options: argparse.Namespace,
    plan: Plan,
    checkpoint: Checkpoint,
    prompts: Sequence[list[int]],
    log_folder: Path | None,
) -> Report:
    """Answer the prompts over several processes and in one, and compare. Raises DemoFailed."""
    with Children(options.time_limit + options.hold, log_folder) as children:
        start(children, options, plan)
        # while the others load their weights
        instability = bitwise_difference(checkpoint, options.groups, options.seed, options.speculate)
        if instability:
            print(f"WARNING: arithmetic is not bitwise stable here; only tokens are compared.\n{instability}")
        transfer = serve(children, options, plan)
    print("computing the same in one process", flush=True)
    expected = compute_alone(options, checkpoint, prompts)
    report = compare(checkpoint, plan, transfer, prompts, expected, bitwise=instability is None)
    answers = [delivery.answer for delivery in transfer.deliveries.values()]
    if options.grammar:
        report = replace(report, num_turned=sum(int(own.logits[0].argmax()) != own.tokens[0] for own in answers))
    if options.speculate:
        drafted = by_prompt(prompts, compute_alone(options, checkpoint, prompts, options.speculate))
        answers = [transfer.deliveries[request_id].answer for request_id in plan.asked]
        report = compare_drafts(options, report, answers, [drafted[tuple(own)] for own in plan.asked.values()])
    return report


@dataclass(frozen=True)
class Transfer:
    """What the processes of a demo did. `deliveries`: of all decoders, by request id."""

    fabric: str
    deliveries: dict[str, Delivery]
    served: roles.Served


def start(children: Children, options: argparse.Namespace, plan: Plan) -> None:
    """Start the prefiller and all decoders."""
    prefiller = roles.RoleOptions(
        plan.prefiller,
        options.new_tokens,
        options.post_at_end,
        options.corrupt_write,
        options.drop_write,
        preempt_every=options.preempt,
        announce_ahead=bool(options.announce_ahead),
    )
    children.start("prefill", roles.prefill, prefiller)
    decoder = roles.RoleOptions(
        plan.decoder,
        options.new_tokens,
        extra_page=options.extra_page,
        preempt_every=options.decode_preempt,
        grammar=options.grammar,
        zero_hidden=options.zero_hidden,
    )
    for name in plan.rounds:
        children.start(name, roles.decode, replace(decoder, node=replace(plan.decoder, name=name)))


def serve(children: Children, options: argparse.Namespace, plan: Plan) -> Transfer:
    """Let the decoders answer all prompts."""
    prefiller: roles.Ready = children.receive("prefill")
    decoders: dict[str, roles.Ready] = {name: children.receive(name) for name in plan.rounds}
    state_paths = {
        request: decoders[name].state_path for name, rounds in plan.rounds.items() for own in rounds for request in own
    }
    print(f"moving the KV of {len(state_paths)} prompts over {prefiller.fabric}", flush=True)
    started = time.monotonic()
    try:
        children.send("prefill", roles.Serve(state_paths))
        for name, rounds in plan.rounds.items():
            children.send(name, roles.Generate(prefiller.descriptor, rounds))
        if options.hold:
            show_held(children, prefiller, list(decoders.values()), options.hold)
        deliveries: dict[str, Delivery] = {}
        for name in plan.rounds:
            deliveries |= children.receive(name)
        children.send("prefill", roles.Stop())
        served: roles.Served = children.receive("prefill")
    except DemoFailed as error:
        raise DemoFailed(f"{error}\n{time.monotonic() - started:.1f} s after the first request") from error
    for fault, nth in (("corrupt", options.corrupt_write), ("drop", options.drop_write)):
        if nth is not None and nth > served.num_writes:
            raise DemoFailed(f"there was no write {nth} to {fault}: {served.num_writes} were posted in all")
    return Transfer(prefiller.fabric, deliveries, served)


def show_held(children: Children, prefiller: roles.Ready, decoders: Sequence[roles.Ready], hold_s: int) -> None:
    """Say how to look at the transfers that stand still, and wait until they may go on."""
    held: roles.Held = children.receive("prefill")
    script = Path(sys.executable).with_name("kvmsgr-cli")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "kvmsgr.cli"]
    by_hand = hold_s == LONGEST_HOLD_S
    print(
        f"held: {held.num_signals} of {held.num_layers} layers of a step are signalled, {held.num_alive} requests are "
        f"alive; prefill is process {prefiller.pid}, decode {', '.join(str(own.pid) for own in decoders)}. "
        "Look at all with\n"
        f"  {shlex.join([*command, 'inspect', prefiller.state_path, *(own.state_path for own in decoders)])}\n"
        f"{'Enter goes on' if by_hand else f'going on in {hold_s} s, or at Ctrl-C'}",
        flush=True,
    )
    try:
        children.idle(hold_s, *([sys.stdin] if by_hand else []))
    except KeyboardInterrupt:
        print()
    children.send("prefill", roles.GoOn())


def compute_alone(
    options: argparse.Namespace, checkpoint: Checkpoint, prompts: Sequence[list[int]], num_drafts: int = 0
) -> list[Answer]:
    """The oracle: all prompts in this process, over one rank. Without drafts it has no draft layer either."""
    groups = make_groups(checkpoint.config, options.page_tokens[1], options.groups, draft=num_drafts > 0)
    spec = CacheSpec(groups)
    num_pages = [
        sum(group.num_pages(0, len(prompt) + options.new_tokens) for prompt in prompts) for group in spec.groups
    ]
    engine = local_engine(checkpoint, spec, num_pages, options.seed + 2)
    mask = mask_of(options.grammar, checkpoint)
    return run_alone(engine, prompts, options.new_tokens, REFERENCE_STEP_TOKENS, num_drafts=num_drafts, mask=mask)


def by_prompt(prompts: Sequence[list[int]], answers: Sequence[Answer]) -> dict[tuple[int, ...], Answer]:
    return {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}


def compare(
    checkpoint: Checkpoint,
    plan: Plan,
    transfer: Transfer,
    prompts: Sequence[list[int]],
    expected: Sequence[Answer],
    *,
    bitwise: bool,
) -> Report:
    """Compare what each decoder answered, each time it was asked, with the oracle."""
    answers = by_prompt(prompts, expected)
    source_page, target_page = (node.spec.groups[0].page_tokens for node in (plan.prefiller, plan.decoder))
    served, lines = transfer.served, []
    for request_id, prompt in plan.asked.items():
        delivery, answer = transfer.deliveries[request_id], answers[tuple(prompt)]
        difference = difference_of(answer, delivery.answer)
        if not bitwise:
            difference = None if answer.tokens == delivery.answer.tokens else "tokens differ"
        landed = served.landed.get(request_id, 0)
        lines.append(
            PromptReport(
                request_id=request_id,
                num_tokens=len(prompt),
                text=checkpoint.tokenizer.decode(delivery.answer.tokens),
                num_pages=delivery.num_pages,
                rows=delivery.rows,
                landed_early=landed / delivery.rows if delivery.rows else None,
                difference=difference,
                prefill_hits=-(-served.cached_tokens.get(request_id, 0) // source_page),
                decode_hits=delivery.cached_tokens // target_page,
                num_restarts=delivery.num_restarts,
                preempted=delivery.preempted,
            )
        )
    return Report(
        prompts=lines,
        fabric=transfer.fabric,
        num_writes=transfer.served.num_writes,
        num_bytes=transfer.served.num_bytes,
        transfer_s=max(delivery.arrived_s for delivery in transfer.deliveries.values()),
        num_distinct_tokens=len({token for own in transfer.deliveries.values() for token in own.answer.tokens}),
        bitwise=bitwise,
    )


def compare_drafts(
    options: argparse.Namespace, report: Report, found: Sequence[Answer], expected: Sequence[Answer]
) -> Report:
    """Add to a report what became of the drafts over several processes, and in one. From zeros they may differ."""
    lines = []
    for line, own, other in zip(report.prompts, found, expected, strict=True):
        difference = line.difference
        if report.bitwise and not options.zero_hidden:
            difference = difference or draft_difference(other, own)
        lines.append(replace(line, drafts=acceptance(own.drafts), difference=difference))
    drafts = speculation(options.speculate, options.zero_hidden, found, expected)
    return replace(report, prompts=lines, speculation=drafts)
