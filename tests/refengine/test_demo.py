"""The demo end to end: real processes, real libfabric, real weights."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.refengine import demo as demo_module
from tools.refengine import matrix, prompts
from tools.refengine.models import RANDOM8, load
from tools.refengine.options import make_plan, parse
from tools.refengine.report import PromptReport, Report

ROOT = Path(__file__).parents[2]
ROWS_A_TOKEN = 30 * 2 * 3  # layers, planes, KV heads


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.refengine", "--new-tokens", "6", *arguments]
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


def report_of(folder: Path, *arguments: str) -> dict[str, Any]:
    done = demo(folder, "--json", str(folder / "report.json"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert done.stdout.splitlines()[-1] == f"bitwise equal: {len(report['prompts'])}/{len(report['prompts'])}"
    return report


@pytest.fixture
def two_questions(tmp_path: Path) -> str:
    file = tmp_path / "questions.txt"
    file.write_text("Say\nhello.\n\n\n\nWhat is 2 + 2?\n")
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "layout"), [("net", "hnd"), ("shm", "nhd")])
def test_every_logit_is_equal_and_most_rows_land_early(provider: str, layout: str, tmp_path: Path) -> None:
    report = report_of(tmp_path, "--prompts", "2", "--provider", provider, "--layout", layout)
    assert report["fabric"].startswith(provider)
    for prompt in report["prompts"]:
        assert prompt["rows"] == (prompt["num_tokens"] - 1) * ROWS_A_TOKEN + 1  # and one hidden state
    assert report["landed_early"] >= 0.8


@pytest.mark.slow
def test_posting_at_the_end_lands_nothing_early(tmp_path: Path, two_questions: str) -> None:
    report = report_of(tmp_path, "--prompt-file", two_questions, "--post-at-end", "--page-tokens", "32", "--seed", "5")
    assert [prompt["landed_early"] for prompt in report["prompts"]] == [0.0, 0.0]


@pytest.mark.slow
def test_a_flipped_byte_is_found_in_the_logits(tmp_path: Path, two_questions: str) -> None:
    done = demo(tmp_path, "--prompt-file", two_questions, "--provider", "net", "--corrupt-write", "40")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^prompt-[01] .* DIFFERS|'prompt-[01]': logits .* are not finite", done.stdout, re.MULTILINE)
    assert "bitwise equal: 2/2" not in done.stdout


@pytest.mark.slow
def test_a_lost_write_is_an_error_that_says_what_is_missing(tmp_path: Path, two_questions: str) -> None:
    done = demo(tmp_path, "--prompt-file", two_questions, "--provider", "shm", "--drop-write", "40")
    assert done.returncode == 1, done.stdout + done.stderr
    error = re.search(r"ShortCountError: request 'prompt-[01]': (\d+) of (\d+) rows landed", done.stdout)
    assert error, done.stdout
    assert int(error[1]) < int(error[2])


@pytest.mark.slow
@pytest.mark.parametrize("end", ["enter", "interrupt", "time"])
def test_a_held_demo_can_be_looked_at_and_goes_on(end: str, tmp_path: Path, two_questions: str) -> None:
    hold = ["--hold", "1"] if end == "time" else ["--hold"]
    command = [sys.executable, "-m", "tools.refengine", "--new-tokens", "4", "--prompt-file", two_questions, *hold]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    held = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert held.stdin is not None
        assert held.stdout is not None
        said = next(line for line in held.stdout if line.startswith("held: "))
        pids = [int(pid) for pid in re.findall(r"process (\d+), decode (\d+)", said)[0]]
        look = shlex.split(held.stdout.readline())
        seen = subprocess.run([*look, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        prefill, decode = json.loads(seen.stdout)["messengers"]
        assert [prefill["pid"], decode["pid"]] == pids
        check_legs(prefill["legs"], decode["legs"])
        if end == "enter":
            held.stdin.write("\n")
            held.stdin.flush()
        if end == "interrupt":
            held.send_signal(signal.SIGINT)
        rest = held.stdout.read()
        assert rest.splitlines()[-1] == "bitwise equal: 2/2", rest
        assert held.wait(60) == 0
    finally:
        held.kill()
        held.communicate()


def check_legs(serving: list[dict[str, Any]], fetching: list[dict[str, Any]]) -> None:
    """Several requests are alive on both sides, and half of the layers of one are signalled."""
    ours = {(leg["request_id"], leg["attempt"], leg["slot"], leg["generation"]) for leg in serving}
    theirs = {(leg["request_id"], leg["attempt"], leg["slot"], leg["generation"]) for leg in fetching}
    assert len(ours) >= 2
    assert ours <= theirs
    assert {leg["role"] for leg in serving} == {"serve"}
    assert {leg["role"] for leg in fetching} == {"fetch"}
    under_way = [leg for leg in serving if leg["layers_seen"]]
    assert under_way
    for leg in under_way:
        assert (leg["layers_seen"], leg["num_layers"]) == (15, 30)
        assert 0 < leg["rows_posted"] < leg["rows_expected"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--prefill-tp 3 --layout hnd:nhd --page-tokens 16:32 --groups 2",
        "--model random8 --prefill-tp 2 --decode-tp 4 --counters rank --interfaces 2 --page-tokens 32:8",
        "--model random8 --latent --prefill-tp 4 --decode-tp 2 --groups 2",
        "--model random8 --decoders 3 --layout nhd:hnd",
    ],
)
def test_two_sides_that_differ_give_the_same_bits(options: str, tmp_path: Path, two_questions: str) -> None:
    report = report_of(tmp_path, "--prompt-file", two_questions, *options.split())
    assert len(report["prompts"]) == (6 if "decoders" in options else 2)
    early = [prompt["landed_early"] for prompt in report["prompts"]]
    assert min(early) > 0.3  # the ranks of several processes too push layers while they compute


@pytest.mark.slow
def test_prompts_asked_again_move_what_is_missing_only(tmp_path: Path) -> None:
    options = "--model random8 --prompt-tokens 1,17,33,48 --chunk-tokens 24 --prefix-cache --repeat 2"
    unsettled = "--preempt 1 --decode-preempt 2 --extra-page --decode-tp 2"
    report = report_of(tmp_path, *options.split(), *unsettled.split())
    first, second = report["prompts"][:4], report["prompts"][:3:-1]
    a_token = 6 * 2 * 8  # layers, planes, KV heads
    assert [own["rows"] for own in first] == [0, *(num * a_token + 1 for num in (16, 32, 47))]
    assert [own["rows"] for own in second] == [0, 1, 1, 15 * a_token + 1]
    assert [own["decode_hits"] for own in second] == [0, 1, 2, 2]
    assert sum(own["preempted"] for own in report["prompts"]) == 4
    assert [own["num_restarts"] for own in first][-1] == 1
    assert max(own["prefill_hits"] for own in second) > 0


def test_each_side_has_its_own_pages_layout_and_ranks() -> None:
    arguments = "--model random8 --prefill-tp 4 --page-tokens 16:32 --layout nhd:hnd --groups 2 --decoders 2"
    options = parse([*arguments.split(), "--new-tokens", "9"])
    plan = make_plan(options, RANDOM8, [[5] * 201, [5] * 33])
    assert (plan.prefiller.spec.num_ranks, plan.decoder.spec.num_ranks) == (4, 1)
    assert (plan.prefiller.spec.layout, plan.decoder.spec.layout) == ("nhd", "hnd")
    assert [group.page_tokens for group in plan.prefiller.spec.groups] == [16, 8]
    assert [group.page_tokens for group in plan.decoder.spec.groups] == [32, 16]
    assert plan.prefiller.num_pages == (13, 26)  # of the longer prompt; both together have more
    assert plan.decoder.num_pages == (7 + 2, 14 - 8 + 3)  # of the window: positions 136 to 210, 0 to 42
    assert [list(own) for own in plan.rounds["decode-1"]] == [["prompt-0-decode-1", "prompt-1-decode-1"]]


def test_rounds_are_asked_in_turn_or_at_once() -> None:
    prompts = [[5] * 33, [6] * 49]
    in_turn = make_plan(parse(["--repeat", "3", "--prefix-cache", "decode"]), RANDOM8, prompts)
    assert [list(own) for own in in_turn.rounds["decode"]] == [
        ["prompt-0", "prompt-1"],
        ["prompt-1-again-1", "prompt-0-again-1"],
        ["prompt-0-again-2", "prompt-1-again-2"],
    ]
    assert (in_turn.prefiller.prefix_cache, in_turn.decoder.prefix_cache) == (False, True)
    at_once = make_plan(parse(["--repeat", "2", "--at-once"]), RANDOM8, prompts)
    assert [len(own) for own in at_once.rounds["decode"]] == [4]
    assert at_once.decoder.num_requests == 2 * in_turn.decoder.num_requests == 4
    assert at_once.decoder.num_pages[0] == 2 * in_turn.decoder.num_pages[0]


def test_a_decoder_has_pages_for_what_it_computes_again_and_for_extra_ones() -> None:
    def num_pages(*arguments: str) -> tuple[int, ...]:
        options = parse(["--groups", "2", "--new-tokens", "4", *arguments])
        return make_plan(options, RANDOM8, [[5] * 200]).decoder.num_pages

    assert num_pages() == (13, 26 - 16)  # the window begins at position 135
    assert num_pages("--decode-preempt", "1") == (13, 26)
    assert num_pages("--extra-page") == (14, 27 - 16)


def test_built_in_prompts_are_cut_or_repeated_to_a_length() -> None:
    assert prompts.of_length([1, 2, 3], 2) == [2, 3]
    assert prompts.of_length([1, 2, 3], 7) == [3, 1, 2, 3, 1, 2, 3]
    found = demo_module.read_prompts(parse(["--model", "random8", "--prompt-tokens", "1,15,900"]), load("random8"))
    assert [len(prompt) for prompt in found] == [1, 15, 900]


def test_options_that_do_not_fit_together_name_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_module.main(["--model", "random8", "--prefix-cache", "--groups", "2"]) == 2
    assert "--prefix-cache does not fit --groups 2: group 'window' has a window" in capsys.readouterr().err
    for alone in (["--at-once"], ["--prompt-tokens", "3", "--prompt-file", "some.txt"]):
        with pytest.raises(SystemExit, match="2"):
            parse(alone)
        assert alone[0] in capsys.readouterr().err
    assert demo_module.main(["--model", "random8", "--decode-tp", "3"]) == 2
    assert "--decode-tp 3 does not fit --model random8: 8 KV heads" in capsys.readouterr().err
    for wrong in (["--page-tokens", "16:24"], ["--layout", "hnd:nhd:hnd"], ["--layout", "dhn"]):
        with pytest.raises(SystemExit, match="2"):
            parse(wrong)
        assert f"'{wrong[1]}' is neither" in capsys.readouterr().err


def test_the_matrix_has_every_promised_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--list"]) == 0
    cells = [parse(line.split()) for line in capsys.readouterr().out.splitlines()]
    found = {(cell.prefill_tp, cell.decode_tp, cell.latent) for cell in cells}
    assert found >= {(1, 1, False), (3, 3, False), (1, 3, False), (3, 1, False), (1, 1, True), (3, 1, True)}
    assert {cell.layout for cell in cells} >= {("hnd", "nhd"), ("nhd", "hnd")}
    assert {cell.page_tokens for cell in cells} >= {(16, 32), (32, 16)}
    assert {2} <= {cell.groups for cell in cells}
    assert 3 in {cell.decoders for cell in cells}
    assert matrix.main(["--list", "--edges"]) == 0
    edges = [parse(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {cell.chunk_tokens for cell in edges} == {1, 8, 16, 24}
    assert {tuple(cell.prompt_tokens) for cell in edges} == {(1, 15, 16, 17, 48)}
    assert all(cell.extra_page for cell in edges)


def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["--prompts", "0"])
    assert "0 is not at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse(["--hold", "5", "--post-at-end"])
    assert "--hold shows transfers under way" in capsys.readouterr().err


def test_built_in_prompts_differ_and_repeat_with_a_number() -> None:
    texts = prompts.built_in(30)
    assert len(set(texts)) == 30
    assert prompts.built_in(3) == texts[:3]


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n\n \n\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        prompts.from_file(file)


def make_report(*differences: str | None, num_distinct_tokens: int = 9, bitwise: bool = True) -> Report:
    lines = [
        PromptReport(f"prompt-{index}", 300, "some text", 19, 1000, 0.9, difference)
        for index, difference in enumerate(differences)
    ]
    return Report(lines, "shm", 10, 1000, 2.0, num_distinct_tokens, bitwise)


def test_a_difference_is_never_shown_as_equal() -> None:
    report = make_report(None, "logits of new token 0 differ")
    assert not report.ok
    assert "prompt-1" in report.text()
    assert "DIFFERS (logits of new token 0 differ)" in report.text()
    assert report.text().endswith("bitwise equal: 1/2")


def test_one_token_everywhere_is_suspicious_not_equal() -> None:
    report = make_report(None, None, num_distinct_tokens=1)
    assert not report.ok
    assert "SUSPICIOUS" in report.text()


def test_comparing_tokens_only_is_said_loudly() -> None:
    text = make_report(None, bitwise=False).text()
    assert "bits were NOT compared" in text
    assert text.endswith("tokens equal: 1/1")
