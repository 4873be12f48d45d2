"""Small grammars that say what an answer may look like. Only the decoder knows them: the prefiller never samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .loader import Checkpoint


@dataclass(frozen=True)
class Grammar:
    """A finite automaton over characters; it starts in place 0.

    Attributes:
        moves: For each place, where a character leads; one that is not there is not allowed. From every place an end
            can be reached.
        ends: Where the answer may end.
    """

    moves: Sequence[Mapping[str, int]]
    ends: frozenset[int]


def one_of(*words: str) -> Grammar:
    """Exactly one of these words."""
    moves: list[dict[str, int]] = [{}]
    ends = set()
    for word in words:
        place = 0
        for character in word:
            if character not in moves[place]:
                moves[place][character] = len(moves)
                moves.append({})
            place = moves[place][character]
        ends.add(place)
    return Grammar(moves, frozenset(ends))


DIGITS = "0123456789"
GRAMMARS = {
    "yes-no": one_of("yes", "no"),
    "digits": Grammar(  # [3, 1, 4]
        moves=({"[": 1}, dict.fromkeys(DIGITS, 2), {",": 3, "]": 4}, {" ": 1}, {}),
        ends=frozenset({4}),
    ),
}


class Mask:
    """A grammar in terms of a model's tokens.

    Args:
        grammar: What is allowed.
        checkpoint: The model. Its end token is allowed where the answer may end.
    """

    def __init__(self, grammar: Grammar, checkpoint: Checkpoint) -> None:
        self._grammar = grammar
        self._vocab, self._end_token = checkpoint.config.vocab, checkpoint.config.end_token
        every = [[token] for token in range(self._vocab)]
        texts = checkpoint.tokenizer.decode_batch(every, skip_special_tokens=False)
        alphabet = {character for moves in grammar.moves for character in moves}
        self._texts = {token: text for token, text in enumerate(texts) if text and alphabet.issuperset(text)}
        self._allowed: dict[int, Tensor] = {}

    def allowed(self, place: int) -> Tensor:
        """Which tokens may come next: [vocab], bool."""
        if place not in self._allowed:
            mask = torch.zeros(self._vocab, dtype=torch.bool)
            mask[[token for token, text in self._texts.items() if self._follow(place, text) is not None]] = True
            mask[self._end_token] = place in self._grammar.ends
            self._allowed[place] = mask
        return self._allowed[place]

    def after(self, place: int, token: int) -> int:
        """Where an allowed token leads."""
        found = place if token == self._end_token else self._follow(place, self._texts[token])
        assert found is not None, f"token {token} is not allowed in place {place}"
        return found

    def _follow(self, place: int, text: str) -> int | None:
        for character in text:
            following = self._grammar.moves[place].get(character)
            if following is None:
                return None
            place = following
        return place


def mask_of(name: str | None, checkpoint: Checkpoint) -> Mask | None:
    """The mask of a grammar by its name, one of `GRAMMARS`."""
    return None if name is None else Mask(GRAMMARS[name], checkpoint)
