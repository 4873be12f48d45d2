"""Proves that the sanitizers are awake: two programs with a deliberate fault each must be caught."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tools.checks.native import plain_address_space
from tools.checks.shell import output_of, run

NATIVE = Path("ext/core")
PROGRAMS = {
    "ext/tests/seeded_race.c": ("thread", "ThreadSanitizer: data race"),
    "ext/tests/seeded_overflow.c": ("address", "AddressSanitizer: heap-buffer-overflow"),
}


def caught(source: str, sanitizer: str, finding: str) -> bool:
    """Build one program on the native layer's own code, run it, and look for the sanitizer's finding."""
    libfabric = output_of("pkg-config", "--cflags", "--libs", "libfabric").split()
    with tempfile.TemporaryDirectory(prefix="kvmsgr-seeded-") as folder:
        program = f"{folder}/program"
        flags = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", f"-fsanitize={sanitizer}", f"-I{NATIVE}", "-pthread"]
        run("cc", *flags, source, *sorted(NATIVE.glob("*.c")), "-o", program, *libfabric, "-lm")
        result = subprocess.run([*plain_address_space(), program], capture_output=True, text=True, timeout=60)
    output = result.stdout + result.stderr
    if result.returncode != 0 and finding in output:
        print(f"{source}: caught ({finding})")
        return True
    print(output)
    print(f"{source}: NOT caught. Expected a failure with {finding!r}, saw exit status {result.returncode}")
    return False


def main() -> None:
    outcomes = [caught(source, *expected) for source, expected in PROGRAMS.items()]
    sys.exit(not all(outcomes))


if __name__ == "__main__":
    main()
