"""Builds the C tests of the native layer afresh, with one sanitizer or none, and runs them.

Usage: python -m tools.checks.native [address,undefined | thread]
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import sys
from pathlib import Path

from tools.checks.shell import output_of, run

BUILD = Path("build")
TSAN_MAX_RANDOM_BITS = 28  # GCC 12's ThreadSanitizer does not start in an address space that is randomised further


def plain_address_space() -> list[str]:
    """Prefix of a command that must run without address randomisation here; empty where none is needed."""
    bits = int(Path("/proc/sys/vm/mmap_rnd_bits").read_text())
    return ["setarch", platform.machine(), "-R"] if bits > TSAN_MAX_RANDOM_BITS else []


def main(sanitizer: str = "none") -> None:
    build = BUILD / f"c-{sanitizer.replace(',', '-')}"
    shutil.rmtree(build, ignore_errors=True)
    options = ["-Dbuildtype=debugoptimized", "-Dwerror=true", f"-Db_sanitize={sanitizer}", "-Db_lundef=false"]
    run("meson", "setup", *options, build)
    if not json.loads(output_of("meson", "introspect", "--tests", build)):
        sys.exit("no C tests are defined: expected them in ext/meson.build, from ext/tests")
    # Tests run one at a time: those with threads need the cores for themselves.
    wrapper = ["--wrapper", shlex.join(plain_address_space())] if plain_address_space() else []
    run("meson", "test", "-C", build, "--num-processes", "1", "--print-errorlogs", *wrapper)


if __name__ == "__main__":
    main(*sys.argv[1:])
