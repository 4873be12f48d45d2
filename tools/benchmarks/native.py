"""`tools/bench native`: the native layer beside what libfabric and the machine allow."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvmsgr._ext import native

from . import latency, throughput
from .bare import BareError
from .machine import Cores, MachineError, choose_cores, facts, raised_priority
from .report import Report
from .target import TargetError

ERRORS = (BareError, MachineError, TargetError, native.NativeError)
BUILTIN = ("net", "shm")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", default="all", choices=[*BUILTIN, "all"])
    parser.add_argument(
        "--pairs",
        type=positive,
        metavar="N",
        default=31,
        help="interleaved pairs of measurements (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument(
        "--corrupt-write", type=positive, metavar="N", help="flip a byte of the Nth write; must be found"
    )


def run(options: argparse.Namespace) -> bool:
    """Measure and print. True when every figure is as wanted."""
    with raised_priority() as raised:
        cores = choose_cores()
        report = Report(facts(cores, raised))
        for name, value in report.machine.items():
            print(f"{name:<18}{value}")
        measure(report, cores, options)
    if options.json:
        report.write(options.json)
    print()
    return report.conclude()


def measure(report: Report, cores: Cores, options: argparse.Namespace) -> None:
    providers = BUILTIN if options.provider == "all" else [options.provider]
    print(throughput.HEADER)
    for provider in providers:
        throughput.run(report, provider, cores, options.pairs, options.corrupt_write)
    print(latency.HEADER)
    for provider in providers:
        latency.run(report, provider, cores, options.pairs)
