"""Builds the C tests of the native layer afresh, with one sanitizer or none, and runs them.

Usage: python -m tools.checks.native [address,undefined | thread]
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

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
    subprocess.run(["meson", "setup", *options, str(build)], check=True)
    listed = subprocess.run(["meson", "introspect", "--tests", str(build)], check=True, capture_output=True).stdout
    if not json.loads(listed):
        sys.exit("no C tests are defined: expected them in ext/meson.build, from ext/tests")
    # Tests run one at a time: those with threads need the cores for themselves.
    test = ["meson", "test", "-C", str(build), "--num-processes", "1", "--print-errorlogs"]
    if wrapper := plain_address_space():
        test += ["--wrapper", " ".join(wrapper)]
    subprocess.run(test, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
