"""The demo with drafts and grammars: what travelled is worth what it should be, and changes no bit of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.refengine.test_demo import demo, report_of
from tools.refengine import demo as demo_module
from tools.refengine.models import RANDOM8
from tools.refengine.options import DEFAULT_NEW_TOKENS, make_plan, parse
from tools.refengine.report import Report
from tools.refengine.speculation import Acceptance, Speculation

SPECULATE = ["--speculate", "3"]


@pytest.mark.slow
def test_drafts_from_zeros_are_worse_and_answers_the_same(tmp_path: Path) -> None:
    report = report_of(tmp_path, "--docstrings", "30", "--zero-hidden", "--new-tokens", "2", *SPECULATE)
    drafts = report["speculation"]
    assert drafts["moved"]["num_proposed"] == drafts["alone"]["num_proposed"] == 30
    assert drafts["moved"]["num_accepted"] <= 0.7 * drafts["alone"]["num_accepted"]
    assert drafts["moved"] == drafts["moved_first"]  # there are no other drafts


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--model random8 --docstrings 4 --prefill-tp 2 --counters rank --groups 2 --layout nhd:hnd --grammar digits",
        "--model random8 --docstrings 4 --repeat 2 --prefix-cache --decode-preempt 2 --preempt 3",
    ],
)
def test_drafts_and_grammars_are_those_of_one_process(options: str, tmp_path: Path) -> None:
    report = report_of(tmp_path, *SPECULATE, *options.split())
    drafts = report["speculation"]
    assert drafts["moved"] == drafts["alone"]
    assert sum(prompt["drafts"]["num_proposed"] for prompt in report["prompts"]) == drafts["moved"]["num_proposed"] > 0
    if "grammar" in options:
        assert report["num_turned"] > 0
        assert {prompt["text"][0] for prompt in report["prompts"]} == {"["}


@pytest.mark.slow
def test_a_flipped_byte_of_the_draft_layer_is_found(tmp_path: Path) -> None:
    """What it stored is the last to go of a prompt in one chunk, but for the hidden state."""
    arguments = ["--model", "random8", "--docstrings", "1", *SPECULATE]
    written = report_of(tmp_path, *arguments)["num_writes"]
    found = demo(tmp_path, *arguments, "--corrupt-write", str(written - 1))
    assert found.returncode == 1, found.stdout + found.stderr
    assert "the states that the drafts of step 0" in found.stdout or "logits of a draft" in found.stdout, found.stdout


def test_a_draft_layer_is_one_more_group_on_both_sides() -> None:
    plan = make_plan(parse(["--model", "random8", "--groups", "2", *SPECULATE]), RANDOM8, [[5] * 33])
    for node in (plan.prefiller, plan.decoder):
        assert [group.name for group in node.spec.groups] == ["full", "window", "draft"]
        assert node.spec.groups[2].layers == (RANDOM8.num_layers,)
        assert node.num_drafts == 3
    assert not make_plan(parse(["--model", "random8"]), RANDOM8, [[5] * 33]).decoder.spec.has_draft


def test_how_many_tokens_are_generated_where_nobody_says() -> None:
    docstrings = ["--docstrings", "5"]
    assert parse([]).new_tokens == parse(SPECULATE).new_tokens == DEFAULT_NEW_TOKENS
    assert parse(docstrings).new_tokens == DEFAULT_NEW_TOKENS
    assert parse([*docstrings, *SPECULATE]).new_tokens == 4
    assert parse([*docstrings, *SPECULATE, "--zero-hidden"]).new_tokens == 2
    assert parse([*docstrings, *SPECULATE, "--zero-hidden", "--new-tokens", "7"]).new_tokens == 7


def test_options_about_drafts_that_mean_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, why in (
        (["--zero-hidden"], "it needs --speculate"),
        (["--docstrings", "5", "--prompt-file", "x"], "one of them"),
        (["--grammar", "haiku"], "invalid choice: 'haiku'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse(wrong)
        assert why in capsys.readouterr().err
    assert demo_module.main(["--model", "random8", "--docstrings", "5000"]) == 2
    assert "docstrings of 48 tokens, not 5000" in capsys.readouterr().err


def test_drafts_that_differ_are_a_failure_of_the_run() -> None:
    def text(num_moved: int) -> str:
        parts = [Acceptance(number, 9) for number in (num_moved, 4, num_moved, 4)]
        drafts = Speculation(3, False, *parts)
        return Report([], "shm", 1, 1, 1.0, 9, True, speculation=drafts).text()

    assert "DRAFTS DIFFER" in text(3)
    assert "DRAFTS DIFFER" not in text(4)
