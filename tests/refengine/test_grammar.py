"""Answers that follow a grammar, which only the decoder knows."""

from __future__ import annotations

import re

import pytest
import torch

from tools.refengine.engine import local_engine
from tools.refengine.grammar import GRAMMARS, Grammar, Mask, mask_of, one_of
from tools.refengine.loader import Checkpoint
from tools.refengine.models import RANDOM8, byte_tokenizer, random_checkpoint
from tools.refengine.reference import Answer, run_alone
from tools.refengine.spec import CacheSpec, make_groups

TEXTS = ("A first question?", "And a second one.", "x")


@pytest.fixture(scope="module")
def random8() -> Checkpoint:
    return random_checkpoint("random8", RANDOM8, byte_tokenizer())


def spell(mask: Mask, checkpoint: Checkpoint, text: str) -> bool | None:
    """Whether an answer of these characters may end there; None where one of them is not allowed."""
    place = 0
    for token in checkpoint.tokenizer.encode(text).ids:
        if not mask.allowed(place)[token]:
            return None
        place = mask.after(place, token)
    end = checkpoint.config.end_token
    assert mask.after(place, end) == place
    return bool(mask.allowed(place)[end])


@pytest.mark.parametrize(
    ("name", "text", "ends"),
    [
        ("yes-no", "", False),
        ("yes-no", "yes", True),
        ("yes-no", "no", True),
        ("yes-no", "ye", False),
        ("yes-no", "yesno", None),
        ("yes-no", "Yes", None),
        ("digits", "[3, 1, 4]", True),
        ("digits", "[3]", True),
        ("digits", "[]", None),
        ("digits", "[3, 1", False),
        ("digits", "[31]", None),
        ("digits", "3", None),
    ],
)
def test_a_grammar_allows_what_it_says(name: str, text: str, ends: bool | None, random8: Checkpoint) -> None:
    assert spell(Mask(GRAMMARS[name], random8), random8, text) is ends


def test_words_may_begin_alike() -> None:
    grammar = one_of("an", "and", "or")
    assert len(grammar.moves) == 6
    assert len(grammar.ends) == 3


def test_a_place_that_leads_nowhere_is_the_end(random8: Checkpoint) -> None:
    mask = Mask(Grammar(({"a": 1}, {}), frozenset({1})), random8)
    assert mask.allowed(1).nonzero().flatten().tolist() == [RANDOM8.end_token]
    assert mask_of(None, random8) is None


@pytest.mark.parametrize(("name", "pattern"), [("yes-no", "yes|no"), ("digits", r"\[[0-9](, [0-9])*\]?,? ?")])
def test_answers_follow_the_grammar_whatever_the_model_wants(name: str, pattern: str, random8: Checkpoint) -> None:
    free, bound = answers(random8, None), answers(random8, name)
    for own, other in zip(bound, free, strict=True):
        assert re.fullmatch(pattern, random8.tokenizer.decode([token for token in own.tokens if token < 256]))
        assert own.tokens[0] != other.tokens[0]
        assert torch.equal(own.logits[0], other.logits[0])  # those of the model, not what the mask leaves of them


def answers(checkpoint: Checkpoint, grammar: str | None) -> list[Answer]:
    engine = local_engine(checkpoint, CacheSpec(make_groups(RANDOM8, 16)), [40], 0)
    prompts = [checkpoint.encode_chat(text) for text in TEXTS]
    return run_alone(engine, prompts, 10, step_tokens=64, mask=mask_of(grammar, checkpoint))
