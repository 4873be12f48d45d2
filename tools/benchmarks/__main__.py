"""Chooses the benchmark. Run by tools/bench."""

from __future__ import annotations

import argparse
import sys

from . import native, overlap, planning


def main() -> int:
    parser = argparse.ArgumentParser(
        "tools/bench", description="Measures kvmsgr beside the raw limits of the same run."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    native.add_arguments(
        benchmarks.add_parser("native", help="the native layer beside a bare loop of fi_writedata and a bare spin loop")
    )
    planning.add_arguments(benchmarks.add_parser("planning", help="what it costs the thread that calls begin_step"))
    overlap.add_arguments(benchmarks.add_parser("overlap", help="what travels while the rest is computed"))
    options = parser.parse_args()
    run = {"native": native.run, "planning": planning.run, "overlap": overlap.run}[options.benchmark]
    try:
        return 0 if run(options) else 1
    except (*native.ERRORS, *planning.ERRORS, *overlap.ERRORS) as error:
        print(f"tools/bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
