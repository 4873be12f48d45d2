"""The written protocol is the coded one, and its checker notices every change."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvmsgr_protocol import Message
from kvmsgr_protocol.answer import answer
from tests.protocol.mutants import Mutant, Workshop, mutants
from tools.specification import bounds, facts, tables
from tools.specification.__main__ import FILES, ROOT

CHECKER = ROOT / "protocol" / "check_vectors.py"


def load_checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_vectors", CHECKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_vectors"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


checker = load_checker()


def run_checker(*arguments: str, path: Path | None = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    folder = str(path or ROOT / "protocol")
    return subprocess.run(
        [sys.executable, CHECKER, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"PYTHONPATH": folder},
    )


def starter(tmp_path: Path, folder: Path) -> Path:
    """A program that answers with the package in `folder`, even where an editable install comes before every path."""
    program = tmp_path / "start.py"
    program.write_text(
        "import runpy, sys\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'Mesonpy' not in type(finder).__name__]\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "runpy.run_module('kvmsgr_protocol.answer', run_name='__main__')\n"
    )
    return program


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES)
def test_what_is_written_is_what_is_coded(path: str) -> None:
    assert (ROOT / path).read_text() == FILES[path](), "run python -m tools.specification"


def test_every_message_is_described() -> None:
    assert set(facts.FACTS) == set(Message.__args__)
    assert all(f"### {kind.__name__}\n" in tables.render() for kind in facts.FACTS)


def test_every_field_is_probed() -> None:
    probed = {name.partition(":")[0] for name in (case.name for case in bounds.cases())}
    leaves = {mutant.field for mutant in mutants() if not mutant.field.startswith("_")}
    assert leaves <= probed


@pytest.mark.slow
def test_the_checker_knows_no_implementation() -> None:
    code = f"import runpy, sys; runpy.run_path({str(CHECKER)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not [name for name in done.stdout.split() if name.startswith(("kvmsgr", "msgspec"))]


# What the checker says


def folder_with(tmp_path: Path, **vectors: list[dict[str, Any]]) -> str:
    """A folder of few vectors."""
    (tmp_path / "vectors").mkdir()
    (tmp_path / "schema.json").write_text((ROOT / "protocol" / "schema.json").read_text())
    for name in checker.FILES:
        (tmp_path / "vectors" / f"{name}.json").write_text(json.dumps({"vectors": vectors.get(name, [])}))
    return str(tmp_path)


def first_vector(name: str) -> dict[str, Any]:
    text = (ROOT / "protocol" / "vectors" / f"{name}.json").read_text()
    vector: dict[str, Any] = json.loads(text)["vectors"][0]
    return vector


def findings(tmp_path: Path, **vectors: list[dict[str, Any]]) -> Any:
    *_, report = checker.check(answer, folder=Path(folder_with(tmp_path, **vectors)))
    return report


@pytest.mark.slow
def test_it_is_content_with_this_implementation(tmp_path: Path) -> None:
    """A vector of each kind; `tools/test` gives it all of them."""
    done = run_checker("--folder", folder_with(tmp_path, **{name: [first_vector(name)] for name in checker.FILES}))
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 contradictions, 0 differences" in done.stdout


@pytest.mark.slow
def test_it_says_which_vector_what_was_sent_seen_and_expected(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, immediates=[first_vector("immediates")])
    liar = f"{sys.executable} -c \"import sys\nfor line in sys.stdin: print('{{}}', flush=True)\""
    done = run_checker("--folder", folder, "--implementation", liar)
    assert done.returncode == 1
    assert 'sent     {"pack": [0, 0, 1]}\n  seen     {}\n  expected {"immediate": 0}' in done.stdout
    assert "schema: differs" in done.stdout
    done = run_checker("--folder", folder, "--implementation", liar, "--no-schema", "--show", "1")
    assert "schema: differs" not in done.stdout
    assert "... and 1 more differences" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", ["/no/such/program", "true", "echo 1", "echo x"])
def test_a_program_that_does_not_answer_is_named(tmp_path: Path, program: str) -> None:
    folder = folder_with(tmp_path, immediates=[first_vector("immediates")])
    done = run_checker("--folder", folder, "--implementation", program)
    assert done.returncode == 3
    assert program in done.stdout


BAD = {
    "hangs": ("sys.stdin.readline(); time.sleep(1000)", "nothing whole came within 1 s"),
    "does not read": ("time.sleep(1000)", "nothing whole came within 1 s"),
    "forks": ("sys.stdin.readline(); subprocess.Popen(['sleep', '1000'])", "nothing whole came within 1 s"),
    "never ends a line": ("while True: sys.stdout.write('x' * 65536)", "bytes came without an end"),
    "is too deep to read": ("for line in sys.stdin: print('[' * 100000 + ']' * 100000, flush=True)", "recursion"),
    "is deep": ("for line in sys.stdin: print('[' * 500 + ']' * 500, flush=True)", "more than 64 deep"),
    "is no UTF-8": ("for line in sys.stdin: os.write(1, b'\"\\xff\"\\n')", "codec can't decode"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("code", "why"), BAD.values(), ids=BAD)
def test_no_program_keeps_the_checker_or_outlives_it(tmp_path: Path, code: str, why: str) -> None:
    sample = first_vector("rows")
    long = {**sample, "facts": {**sample["facts"], "context": [0] * 100_000}}  # more than a pipe holds
    folder, program = folder_with(tmp_path, rows=[long]), tmp_path / "bad.py"
    program.write_text(f"import os, subprocess, sys, time\n{code}\n")
    command = f"{sys.executable} {program}"
    limit_s = "1" if "within 1 s" in why else "10"
    # What the program started has our stderr: while it lives, this does not return.
    done = run_checker("--folder", folder, "--timeout", limit_s, "--implementation", command, timeout_s=30)
    assert (done.returncode, done.stderr) == (3, "")
    assert f'{command} did not answer {{"rows": ' in done.stdout
    assert why in done.stdout


def test_the_wrong_time_limit_is_refused() -> None:
    for timeout_s in ("0", "-1", "nan", "inf", "1e9", "x"):
        assert run_checker("--timeout", timeout_s).returncode == 2


@pytest.mark.parametrize("more", [{"error": "protocol"}, {"messages": []}])
def test_an_answer_says_one_thing(tmp_path: Path, more: dict[str, Any]) -> None:
    vectors = {name: [first_vector(name)] for name in ("immediates", "rows", "versions", "messages")}
    folder = Path(folder_with(tmp_path, **vectors))
    *_, honest = checker.check(answer, folder=folder)
    assert not honest.differences
    *_, report = checker.check(lambda question: answer(question) | more, with_schema=False, folder=folder)
    assert len(report.differences) == report.num_checked == honest.num_checked


def test_a_schema_of_any_form_is_compared(tmp_path: Path) -> None:
    folder = Path(folder_with(tmp_path))
    schemas: list[Any] = [{"$defs": []}, {"$defs": {"\x1b[2J": {}}}, [], None]
    for wrong in schemas:
        *_, report = checker.check(lambda question, wrong=wrong: {"schema": wrong}, folder=folder)
        assert len(report.differences) == 1
        assert report.differences[0].isprintable()


def test_vectors_that_contradict_themselves_are_named(tmp_path: Path) -> None:
    sample = first_vector("messages")
    other = {**sample, "name": "other", "message": {**sample["message"], "name": "someone else"}}
    long = {**sample, "name": "long", "frame": "00000004" + "de0000c0"}
    report = findings(tmp_path, messages=[other, {**sample, "name": "cut", "frame": sample["frame"][:-2]}])
    assert [text.partition(":")[0] for text in report.contradictions] == ["other", "cut"]
    assert not checker.Schema(json.loads((tmp_path / "schema.json").read_text())).flaw({"t": "resume"})
    assert checker.Reader(bytes.fromhex("de0000")).whole() == {}
    with pytest.raises(checker.Malformed):
        checker.Reader(bytes.fromhex(long["frame"][8:])).whole()


def test_wrong_counts_and_immediates_are_contradictions(tmp_path: Path) -> None:
    rows, immediate, version = (first_vector(name) for name in ("rows", "immediates", "versions"))
    report = findings(
        tmp_path,
        rows=[{**rows, "rows": rows["rows"] + 1}],
        immediates=[{**immediate, "immediate": immediate["immediate"] + 1}],
        versions=[{**version, "version": 2}],
    )
    assert len(report.contradictions) == 3


# Every change is noticed

ONLY_IN_SCHEMA = {
    "ContextLayout.region: U32",
    "Dispatch.ranks: list[RankSpans]",
    "Dispatch.tokens: bytes",
    "GroupLayout.head_start: U32",
    "GroupLayout.total_heads: U31",
    "LayerEntry.plane: U32",
    "LayerEntry.region: U32",
    "RankAttach.region_bytes: list[U63]",
}
"""What no vector tells, because a rule between fields forbids such values anyway."""
SHORT = 100_000  # characters of a question


@dataclass(frozen=True)
class Asked:
    """A question of the checker, and the answer it is content with. `about` is the name of the vector."""

    about: str
    question: object
    right: dict[str, Any]

    def differs(self, seen: dict[str, Any]) -> bool:
        return any(not checker.same(seen.get(key), value) for key, value in self.right.items() if key != "detail")


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    """Every question, the short ones first."""
    asked: list[Asked] = []
    report, schema = checker.Report(), checker.Schema(json.loads((ROOT / "protocol" / "schema.json").read_text()))
    for name in checker.FILES:
        for vector in json.loads((ROOT / "protocol" / "vectors" / f"{name}.json").read_text())["vectors"]:

            def ask(question: object, about: str = vector.get("name", name)) -> dict[str, Any]:
                asked.append(Asked(about, question, answer(question)))
                return asked[-1].right

            checker.CHECKS[name](vector, schema, report, ask)
    assert not report.differences
    assert not report.contradictions
    return sorted(asked, key=lambda each: len(str(each.question)))


@pytest.mark.slow
def test_every_changed_field_is_noticed(tmp_path: Path, asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    workshop, right_schema = Workshop(tmp_path), answer({"schema": True})
    short = [each for each in asked if len(str(each.question)) <= SHORT]  # long ones are about one field each
    unseen, unseen_by_vectors, num_mutants = [], set(), 0
    for mutant in mutants():
        num_mutants += 1
        with workshop.imported(mutant) as module:
            about = [each for each in asked if mutant.probed_as in each.about]
            others = [] if str(mutant) in ONLY_IN_SCHEMA else short
            by_vectors = any(each.differs(module.answer(each.question)) for each in (*about, *others))
            by_schema = not checker.same(module.answer({"schema": True}), right_schema)
        if not by_vectors:
            unseen_by_vectors.add(str(mutant))
        if not (by_vectors or by_schema):
            unseen.append(str(mutant))
    assert num_mutants > 150
    assert not unseen
    assert unseen_by_vectors == ONLY_IN_SCHEMA


@pytest.mark.slow
@pytest.mark.parametrize("field", ["_Leg.attempt", "Dispatch.slot", "Region.key"])
def test_a_changed_implementation_fails_the_program(tmp_path: Path, field: str) -> None:
    mutant: Mutant = next(mutant for mutant in mutants() if mutant.field == field)
    workshop = Workshop(tmp_path)
    with workshop.holding(mutant):
        done = run_checker("--first", "--implementation", f"{sys.executable} {starter(tmp_path, workshop.folder)}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "seen" in done.stdout
