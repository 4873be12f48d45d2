"""Why something failed: one reason code and one sentence, the same on both sides."""

from __future__ import annotations

from dataclasses import dataclass

from kvmsgr_protocol import Reason


@dataclass(frozen=True, slots=True)
class Failure:
    """Args:
    reason: The code that both sides count and raise.
    detail: What was tried, seen and expected.
    rows: Rows that had landed (decoder) or been posted (prefiller).
    rows_expected: Rows of the whole attempt.
    """

    reason: Reason
    detail: str
    rows: int = 0
    rows_expected: int = 0
    retry_after_s: float | None = None
