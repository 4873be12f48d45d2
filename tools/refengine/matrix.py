"""Every way in which two sides can differ, a line each: the demo over and over, bit by bit against one process."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .demo import check_lengths, compare, compute_alone, end_in_order, read_prompts, serve, start
from .loader import Checkpoint
from .models import load
from .options import make_plan, parse
from .processes import Children, DemoFailed
from .reference import Answer
from .report import Report
from .selftest import bitwise_difference

CELLS = (
    "",
    "--prefill-tp 3 --decode-tp 3",
    "--prefill-tp 1 --decode-tp 3",
    "--prefill-tp 3 --decode-tp 1",
    "--prefill-tp 3 --decode-tp 1 --counters rank",
    "--latent",
    "--latent --prefill-tp 3 --decode-tp 1",
    "--layout hnd:nhd",
    "--layout nhd:hnd",
    "--page-tokens 16:32",
    "--page-tokens 32:16",
    "--groups 2",
    "--groups 2 --page-tokens 16:32 --prefill-tp 3 --layout nhd:hnd",
    "--interfaces 2 --prefill-tp 3 --layout hnd:nhd --page-tokens 32:16",
    "--decoders 3",
    "--announce-ahead 1 --prefill-tp 3 --chunk-tokens 16",
    "--prefix-cache --repeat 2 --prefill-tp 3 --page-tokens 32:16",
)
EDGE_PROMPTS = "--prompt-tokens 1,15,16,17,48 --extra-page"  # about a page of 16 tokens
EDGE_CELLS = tuple(
    f"{EDGE_PROMPTS} --chunk-tokens {chunk_tokens}{more}"
    for more in ("", " --page-tokens 8:16", " --page-tokens 16:8 --layout nhd:hnd --prefix-cache --repeat 2")
    for chunk_tokens in (1, 8, 16, 24)
)
QUICK_CELLS = (
    *(cell.replace("-tp 3", "-tp 4") for cell in CELLS),
    "--prefill-tp 2 --decode-tp 8",
    "--prefill-tp 8 --decode-tp 2",
)
NUM_PROMPTS = 2
MAX_TOKENS = 330  # of a prompt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cells; returns 0 when every answer of every cell is equal."""
    reader = argparse.ArgumentParser("tools/matrix", description=__doc__)
    reader.add_argument("--quick", action="store_true", help="with the small random model, of eight KV heads")
    reader.add_argument("--edges", action="store_true", help="other cells: prompts and chunks about as long as a page")
    reader.add_argument("--provider", choices=("auto", "shm", "net", "tcp"), default="auto")
    reader.add_argument("--only", default="", metavar="TEXT", help="only the cells whose options contain this")
    reader.add_argument("--list", action="store_true", help="print the cells and run none")
    chosen = reader.parse_args(arguments)
    every = EDGE_CELLS if chosen.edges else QUICK_CELLS if chosen.quick else CELLS
    cells = [cell for cell in every if chosen.only in cell]
    if not cells:
        reader.error(f"no cell has the options {chosen.only!r}; --list prints those of all")
    if chosen.list:
        print("\n".join(cells))
        return 0
    end_in_order(120 * len(cells) + 120)
    model = "random8" if chosen.quick else "smollm2"
    matrix = Matrix(load(model), ["--model", model, "--provider", chosen.provider, "--prompts", str(NUM_PROMPTS)])
    return max(0 if matrix.run(cell) else 1 for cell in cells)


class Matrix:
    """Runs cells of one model, and computes once what they are compared with."""

    def __init__(self, checkpoint: Checkpoint, common: Sequence[str]) -> None:
        self._checkpoint, self._common = checkpoint, common
        self._expected: dict[tuple[int, ...], list[Answer]] = {}

    def run(self, cell: str) -> bool:
        """Run a cell and print its line."""
        options = parse([*self._common, *cell.split(), "--time-limit", "120"], "tools/matrix")
        logs = Path(tempfile.mkdtemp(prefix="kvmsgr-matrix-"))
        try:
            report = self._report(options, logs)
        except DemoFailed as error:
            print(f"{describe(options)}  FAILED: {error}\nlogs: {logs}", flush=True)
            return False
        verdict = f"{report.num_equal}/{len(report.prompts)} {'equal' if report.bitwise else 'equal tokens'}"
        print(
            f"{describe(options)}  {report.fabric.split()[0]:<4} {verdict}  {report.num_writes:>6} writes", flush=True
        )
        if report.ok:
            shutil.rmtree(logs)
        else:
            print(f"{report.text()}\nlogs: {logs}", flush=True)
        return report.ok

    def _report(self, options: argparse.Namespace, logs: Path) -> Report:
        prompts = [prompt[:MAX_TOKENS] for prompt in read_prompts(options, self._checkpoint)]
        plan = make_plan(options, self._checkpoint.config, prompts)
        check_lengths(prompts, options.new_tokens)
        same = (options.groups, *map(len, prompts))
        with Children(options.time_limit, logs) as children, contextlib.redirect_stdout(io.StringIO()):
            start(children, options, plan)
            if same not in self._expected:  # while the processes load their weights
                instability = bitwise_difference(self._checkpoint, options.groups)
                if instability:
                    raise DemoFailed(f"arithmetic is not bitwise stable on this machine: {instability}")
                self._expected[same] = compute_alone(options, self._checkpoint, prompts)
            transfer = serve(children, options, plan)
        return compare(self._checkpoint, plan, transfer, prompts, self._expected[same], bitwise=True)


def describe(options: argparse.Namespace) -> str:
    """A cell in words."""

    def both(values: tuple[object, object]) -> str:
        return ":".join(map(str, values))

    return (
        f"tp {options.prefill_tp}:{options.decode_tp}  {'latent' if options.latent else 'heads ':<6}  "
        f"{both(options.layout)}  pages {both(options.page_tokens)}  groups {options.groups}  "
        f"counters {options.counters}  interfaces {options.interfaces}  decoders {options.decoders}"
        f"{f'  chunks {options.chunk_tokens:>2}' if options.prompt_tokens else ''}"
        f"{'  prefix cache' if options.prefix_cache else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
