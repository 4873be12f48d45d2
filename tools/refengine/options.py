"""The command line of the demo, and what it means for the nodes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .grammar import GRAMMARS
from .loader import ModelConfig
from .models import NAMES
from .prefix import check_groups
from .spec import CacheSpec, NodeOptions, check_ranks, make_groups

LONGEST_HOLD_S = 3600
DEFAULT_NEW_TOKENS = 24


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """The options of one transfer."""
    result = argparse.ArgumentParser(
        program,
        description=description,
        epilog="Exit codes: 0 every logit row is equal, 1 something differs or failed, 2 wrong usage, 130 interrupted.",
    )
    add = result.add_argument
    add("--model", choices=NAMES, default=NAMES[0], help=f"default: {NAMES[0]}; random8 is small and means nothing")
    add("--prompts", type=positive, default=8, metavar="N", help="number of built-in prompts (default: 8)")
    add("--prompt-file", type=Path, metavar="FILE", help="your own prompts instead, separated by blank lines")
    lengths = "N[,N...]"
    add("--prompt-tokens", type=token_counts, metavar=lengths, help="cut or repeat built-in prompts to these lengths")
    add(
        "--docstrings",
        type=positive,
        metavar="N",
        help="instead: N beginnings of docstrings of the standard library, which the model goes on with",
    )
    add(
        "--new-tokens",
        type=positive,
        metavar="N",
        help="most tokens to generate a prompt (default: 24; with --docstrings and --speculate K only K + 1; with "
        "--zero-hidden 2, because then all drafts are those of first verify steps, which alone need the state that "
        "travelled: with more tokens the later steps, which have states of their own, hide what it is worth)",
    )
    add("--speculate", type=positive, default=0, metavar="K", help="draft up to K tokens a step and verify them")
    add(
        "--zero-hidden",
        action="store_true",
        help="draft from zeros at first: at most 0.7 as many may be accepted",
    )
    add("--grammar", choices=GRAMMARS, help="what answers may look like; only the decoder knows it")
    add("--chunk-tokens", type=positive, default=64, metavar="N", help="tokens a prefill step computes (default: 64)")
    add("--prefill-tp", type=positive, default=1, metavar="N", help="ranks of the prefiller (default: 1)")
    add("--decode-tp", type=positive, default=1, metavar="N", help="ranks of a decoder (default: 1)")
    add("--decoders", type=positive, default=1, metavar="N", help="decoders; each answers all prompts (default: 1)")
    page_tokens = sides("8, 16, 32 or 64", {str(num): num for num in (8, 16, 32, 64)}.__getitem__)
    add("--page-tokens", type=page_tokens, default="16", metavar="P[:D]", help="tokens a page (default: 16)")
    layout = sides("hnd or nhd", {name: name for name in ("hnd", "nhd")}.__getitem__)
    add("--layout", type=layout, default="hnd", metavar="P[:D]", help="order inside a page: hnd, nhd (default: hnd)")
    add("--latent", action="store_true", help="cache one row a token for all heads, the same on every rank")
    add("--groups", type=int, choices=(1, 2), default=1, help="2: every other layer has a sliding window")
    add("--counters", choices=("lead", "rank"), default="lead", help="who signals layers: rank 0 for all, or each rank")
    add("--interfaces", type=positive, default=1, metavar="N", help="network interfaces a rank, all the same one")
    add("--provider", choices=("auto", "shm", "net", "tcp"), default="auto", help="libfabric provider (default: auto)")
    add("--seed", type=int, default=0, metavar="N", help="shuffles the pages (default: 0)")
    add("--repeat", type=positive, default=1, metavar="N", help="ask each prompt N times, one round after the other")
    add("--at-once", action="store_true", help="with --repeat: all rounds at the same time")
    sides_that_cache = ("both", "prefill", "decode")
    add("--prefix-cache", choices=sides_that_cache, nargs="?", const="both", help="keep pages for prompts alike")
    add("--extra-page", action="store_true", help="name a page too many to the messenger; nobody may write to it")
    add("--preempt", type=positive, default=0, metavar="N", help="every N steps prefill takes a running prompt's pages")
    add("--decode-preempt", type=positive, default=0, metavar="N", help="take every Nth prompt's pages away in decode")
    add("--announce-ahead", type=int, choices=(0, 1), default=0, metavar="N", help="1: announce a step before its turn")
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
    add("-v", "--verbose", action="store_true", help="show the logs of all processes")
    return result


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def token_counts(text: str) -> list[int]:
    """A type of argument: lengths of prompts."""
    return [positive(part) for part in text.split(",")]


def sides(known: str, value: Callable[[str], object]) -> Callable[[str], tuple[object, object]]:
    """A type of argument: one value for both sides, or two, "prefill:decode"."""

    def parse(text: str) -> tuple[object, object]:
        parts = text.split(":")
        try:
            first, second = [value(part) for part in (parts * 2 if len(parts) == 1 else parts)]
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r} is neither {known}, nor two of these as in P:D") from None
        return first, second

    return parse


def parse(arguments: Sequence[str] | None, program: str = "tools/demo", about: str | None = None) -> argparse.Namespace:
    """Read the command line; wrong usage ends the process with 2."""
    reader = parser(program, about)
    options = reader.parse_args(arguments)
    if options.hold and options.post_at_end:
        reader.error("--hold shows transfers under way; --post-at-end has none while a step runs")
    if options.announce_ahead and options.post_at_end:
        reader.error("--announce-ahead is about what goes while it is computed; with --post-at-end nothing does")
    if options.announce_ahead and options.prefix_cache in ("both", "prefill"):
        reader.error("--announce-ahead does not fit --prefix-cache at the prefiller: pages of a step count as computed")
    if options.at_once and options.repeat == 1:
        reader.error("--at-once says when prompts are repeated; --repeat says how often")
    if sum(map(bool, (options.prompt_tokens, options.prompt_file, options.docstrings))) > 1:
        reader.error("prompts come from --prompt-tokens, --prompt-file or --docstrings: one of them")
    if options.zero_hidden and not options.speculate:
        reader.error("--zero-hidden is about drafts; it needs --speculate K")
    if options.new_tokens is None:
        few = 2 if options.zero_hidden else options.speculate + 1
        options.new_tokens = few if options.docstrings and options.speculate else DEFAULT_NEW_TOKENS
    return options


@dataclass(frozen=True)
class Plan:
    """Who does what.

    Attributes:
        prefiller, decoder: Options of the nodes; all decoders have the same but for their name.
        rounds: Of each decoder, one after the other: prompts by request id, asked at the same time. All decoders answer
            the same.
    """

    prefiller: NodeOptions
    decoder: NodeOptions
    rounds: dict[str, list[dict[str, list[int]]]]

    @property
    def asked(self) -> dict[str, list[int]]:
        """All prompts by request id."""
        return {
            request: prompt for own in self.rounds.values() for prompts in own for request, prompt in prompts.items()
        }


def make_plan(options: argparse.Namespace, config: ModelConfig, prompts: Sequence[list[int]]) -> Plan:
    """What the options ask for, with pages for these prompts.

    Raises:
        ValueError: Options do not fit together or the model; names both values.
    """
    for option, num_ranks in (("--prefill-tp", options.prefill_tp), ("--decode-tp", options.decode_tp)):
        try:
            check_ranks(config, num_ranks)
        except ValueError as error:
            raise ValueError(f"{option} {num_ranks} does not fit --model {options.model}: {error}") from None
    names = ["decode"] if options.decoders == 1 else [f"decode-{index}" for index in range(options.decoders)]
    prefiller, decoder = (
        CacheSpec(
            make_groups(config, page_tokens, options.groups, draft=options.speculate > 0),
            layout,
            options.latent,
            num_ranks,
        )
        for page_tokens, layout, num_ranks in zip(
            options.page_tokens, options.layout, (options.prefill_tp, options.decode_tp), strict=True
        )
    )
    if options.prefix_cache:
        try:
            check_groups(prefiller.groups)
        except ValueError as error:
            raise ValueError(f"--prefix-cache does not fit --groups {options.groups}: {error}") from None
    num_at_once = options.repeat if options.at_once else 1
    room = max(options.new_tokens, *options.page_tokens) if options.extra_page else options.new_tokens
    # At the prefiller there are too few pages for all: they are used again while others travel.
    sources = [[group.num_pages(0, len(prompt)) for prompt in prompts] for group in prefiller.groups]
    targets = [
        num_at_once
        * sum(
            group.num_pages(0 if options.decode_preempt else len(prompt) - 1, len(prompt) + room) for prompt in prompts
        )
        for group in decoder.groups
    ]
    common = {
        "model": options.model,
        "step_tokens": options.chunk_tokens,
        "num_drafts": options.speculate,
        "fabric": options.provider,
        "num_interfaces": options.interfaces,
        "every_rank_bumps": options.counters == "rank",
        "hold_s": options.hold,
    }
    return Plan(
        prefiller=NodeOptions(
            name="prefill",
            spec=prefiller,
            num_pages=tuple(max(max(pages), sum(pages) // 2) for pages in sources),
            num_requests=len(prompts) * num_at_once * len(names),
            seed=options.seed + 1,
            prefix_cache=options.prefix_cache in ("both", "prefill"),
            **common,
        ),
        decoder=NodeOptions(
            name="decode",
            spec=decoder,
            num_pages=tuple(targets),
            num_requests=len(prompts) * num_at_once,
            seed=options.seed,
            prefix_cache=options.prefix_cache in ("both", "decode"),
            **common,
        ),
        rounds={name: make_rounds(prompts, options, f"-{name}" if len(names) > 1 else "") for name in names},
    )


def make_rounds(prompts: Sequence[list[int]], options: argparse.Namespace, suffix: str) -> list[dict[str, list[int]]]:
    """The prompts by request id, as often as they are asked. Every other round has them in reverse order, so that a
    prefix cache too small for all has the first of a round: they were the last of the one before."""
    rounds = []
    for turn in range(options.repeat):
        again = f"-again-{turn}" if turn else ""
        own = [(f"prompt-{index}{again}{suffix}", prompt) for index, prompt in enumerate(prompts)]
        rounds.append(dict(reversed(own) if turn % 2 else own))
    return [{request: prompt for own in rounds for request, prompt in own.items()}] if options.at_once else rounds
