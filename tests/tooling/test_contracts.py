"""Each import contract is broken on purpose, in a copy of the sources, to see that it bites."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from tools.checks.contracts import PACKAGES, lint_imports

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}

SEEDS = [
    ("layers", "kvmsgr.types", "kvmsgr.layout"),
    ("layers", "kvmsgr.layout", "kvmsgr.core"),
    ("layers", "kvmsgr.core", "kvmsgr.runtime"),
    ("layers", "kvmsgr.core", "kvmsgr.fabric"),
    ("layers", "kvmsgr.fabric", "kvmsgr.core"),
    ("layers", "kvmsgr.device", "kvmsgr.core"),
    ("layers", "kvmsgr.fabric", "kvmsgr.runtime"),
    ("layers", "kvmsgr.runtime", "kvmsgr.messenger"),
    *(("pure", package, module) for package in ("kvmsgr.core", "kvmsgr.layout") for module in ("asyncio", "time")),
    ("native", "kvmsgr.runtime", "kvmsgr._ext"),
    ("native", "kvmsgr.messenger", "kvmsgr._ext.native"),
    ("native", "kvmsgr.layout", "kvmsgr._ext.native"),
    ("layers", "kvmsgr.inspect", "kvmsgr.cli"),
    ("layers", "kvmsgr.runtime", "kvmsgr.inspect"),
    ("terminal", "kvmsgr.inspect", "click"),
    ("terminal", "kvmsgr.runtime", "rich"),
    ("outside", "kvmsgr.cli", "kvmsgr.fabric"),
    ("outside", "kvmsgr.cli", "kvmsgr.messenger"),
    ("protocol", "kvmsgr_protocol", "kvmsgr.types"),
]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what the contracts are about."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def seed(sources: Path, importer: str, *imported: str) -> None:
    """Add imports to a module of the copy."""
    folder = sources / ("protocol" if importer.startswith("kvmsgr_protocol") else "")
    module = folder / importer.replace(".", "/")
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    file.write_text(file.read_text() + "".join(f"\nimport {name}\n" for name in imported))


@pytest.mark.slow
@pytest.mark.parametrize(("contract", "importer", "imported"), SEEDS)
def test_a_forbidden_import_breaks_its_contract(sources: Path, contract: str, importer: str, imported: str) -> None:
    seed(sources, importer, imported)
    result = lint_imports(sources)
    assert result.returncode != 0
    assert f"{CONTRACTS[contract]['name']} BROKEN" in result.stdout
    assert f"{importer} -> {imported}" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("package", CONTRACTS["pure"]["source_modules"])
def test_every_impure_module_is_noticed(sources: Path, package: str) -> None:
    forbidden = CONTRACTS["pure"]["forbidden_modules"]
    seed(sources, package, *forbidden)
    result = lint_imports(sources)
    missed = [name for name in forbidden if f"{package} is not allowed to import {name}:" not in result.stdout]
    assert not missed, result.stdout
