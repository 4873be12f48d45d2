"""How many drafts were accepted, over two processes and in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .generation import Draft
from .reference import Answer

WORTH = 0.7  # without the state that travels, at most this share of the acceptance may remain


@dataclass(frozen=True)
class Acceptance:
    """Of drafts."""

    num_accepted: int
    num_proposed: int

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    def __str__(self) -> str:
        return f"{self.num_accepted}/{self.num_proposed} ({self.rate:.1%})"


def acceptance(drafts: Iterable[Draft]) -> Acceptance:
    """Of the drafts of several steps."""
    known = list(drafts)
    return Acceptance(sum(own.num_accepted for own in known), sum(len(own.tokens) for own in known))


@dataclass(frozen=True)
class Speculation:
    """The drafts of a whole run.

    Attributes:
        num_drafts: Most a step.
        zero_hidden: Whether the decoder drafted from zeros instead of the state that had travelled.
        moved, alone: Of all drafts over two processes, and in one.
        moved_first, alone_first: Of the first verify step of each prompt, whose drafts come from that state.
    """

    num_drafts: int
    zero_hidden: bool
    moved: Acceptance
    alone: Acceptance
    moved_first: Acceptance
    alone_first: Acceptance

    @property
    def ratio(self) -> float | None:
        """Of the acceptance over two processes to that in one; None where that is nothing."""
        return self.moved.rate / self.alone.rate if self.alone.rate else None

    @property
    def ok(self) -> bool:
        """Whether the drafts are what they should be: equal, or with zeros clearly worse. (That each prompt's are
        equal is told by its difference.)"""
        if self.zero_hidden:
            return self.ratio is not None and self.ratio <= WORTH
        return self.moved == self.alone and self.moved.num_proposed > 0

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"drafts        {self.num_drafts} a step; accepted: {self.moved} over two processes, {self.alone} in one",
            f"              of them in first verify steps: {self.moved_first} and {self.alone_first}",
        ]
        if self.zero_hidden:
            ratio = "none" if self.ratio is None else f"{self.ratio:.2f}"
            lines += [
                f"zero hidden   ratio {ratio}, which {'is' if self.ok else 'IS NOT'} at most {WORTH}",
                "              (the state that travels serves first verify steps alone: with more new tokens that",
                "              hides among the drafts of later ones, and the ratio tends to 1)",
            ]
        elif not self.ok:
            lines.append("DRAFTS DIFFER" if self.alone.num_proposed else "NOTHING WAS DRAFTED")
        return lines


def speculation(num_drafts: int, zero_hidden: bool, moved: Sequence[Answer], alone: Sequence[Answer]) -> Speculation:
    """Compare the drafts of answers to the same prompts."""

    def every(answers: Sequence[Answer]) -> Acceptance:
        return acceptance(draft for answer in answers for draft in answer.drafts)

    def first(answers: Sequence[Answer]) -> Acceptance:
        return acceptance(draft for answer in answers for draft in answer.drafts[:1])

    return Speculation(num_drafts, zero_hidden, every(moved), every(alone), first(moved), first(alone))
