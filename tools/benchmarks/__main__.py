"""Chooses the benchmark. Run by tools/bench."""

from __future__ import annotations

import argparse
import sys

from . import native


def main() -> int:
    parser = argparse.ArgumentParser(
        "tools/bench", description="Measures kvmsgr beside the raw limits of the same run."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    native.add_arguments(
        benchmarks.add_parser("native", help="the native layer beside a bare loop of fi_writedata and a bare spin loop")
    )
    options = parser.parse_args()
    try:
        return 0 if native.run(options) else 1
    except native.ERRORS as error:
        print(f"tools/bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
