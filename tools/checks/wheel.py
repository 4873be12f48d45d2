"""Packs kvmsgr the way a release does (sdist, wheel from it, empty environment) and looks at what came out."""

from __future__ import annotations

import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import mesonpy

from tools.checks.shell import output_of, run

PACKAGES = {"kvmsgr": Path("kvmsgr"), "kvmsgr_protocol": Path("protocol/kvmsgr_protocol")}
CONSTRAINTS = Path("tools/constraints.txt")

# Runs in the empty environment, away from the checkout.
PROBE = """
import importlib.metadata, importlib.util, sys
import kvmsgr, kvmsgr_protocol, kvmsgr._ext.native
for name in kvmsgr.__all__:  # some are loaded when they are first used
    getattr(kvmsgr, name)
assert not importlib.util.find_spec("torch"), "the environment is not empty: it has torch"
assert importlib.metadata.version("kvmsgr")
from kvmsgr.inspect.schema import generated, shipped
assert shipped() == generated()
print("imported", kvmsgr.__file__)
"""


def shipped_sources() -> set[str]:
    """Names, as a wheel spells them, of the committed files of the packages."""
    listed = output_of("git", "ls-tree", "-r", "--name-only", "HEAD", *PACKAGES.values()).split()
    return {name.removeprefix("protocol/") for name in listed}


def check_content(names: set[str]) -> None:
    """Check that a wheel holds the packages with their types and the extension, and nothing else."""
    sources = shipped_sources()
    typed = {f"{package}/py.typed" for package in PACKAGES}
    others = {name for name in names - sources if ".dist-info/" not in name}
    extensions = {name for name in others if name.startswith("kvmsgr/_ext/native.") and name.endswith(".so")}
    problems = {
        "missing from the wheel": (sources | typed | {"kvmsgr/_ext/native.pyi"}) - names,
        "in the wheel without reason": others - extensions,
    }
    for problem, found in problems.items():
        if found:
            sys.exit(f"{problem}: {', '.join(sorted(found))}")
    if len(extensions) != 1:
        sys.exit(f"the wheel holds {len(extensions)} builds of kvmsgr._ext.native, expected one: {sorted(extensions)}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvmsgr-wheel-") as folder:
        out = Path(folder)
        sdist = out / mesonpy.build_sdist(folder)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
        # With isolation, as a user's pip does: this proves that build-system.requires is complete.
        run(*pip, "wheel", "--quiet", "--no-deps", "-w", out, sdist, PIP_CONSTRAINT=str(CONSTRAINTS.absolute()))
        (wheel,) = out.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            check_content(set(archive.namelist()))
        venv.create(out / "venv")
        python = out / "venv" / "bin" / "python"
        run(*pip, "--python", python, "install", "--quiet", "-c", CONSTRAINTS, wheel)
        run(python, "-I", "-c", PROBE, cwd=out)
        run(python, "-I", python.with_name("kvmsgr-cli"), "--version", cwd=out)


if __name__ == "__main__":
    main()
