"""What the demo found, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .speculation import Acceptance, Speculation

LONG_TOKENS = 256  # prompts of at least this many tokens count for the overall landed share


@dataclass(frozen=True)
class PromptReport:
    """One prompt. `landed_early` is the share of its rows that were at the decoder before the last layer of its last
    chunk was signalled; None when it has no rows. `difference` is None when every bit is equal. `prefill_hits` and
    `decode_hits` are pages that were found in the prefix cache of that side. `num_restarts` counts how often the
    prefiller took its pages back and began again; `preempted` tells whether the decoder did, and went on by itself.
    `drafts` is None where there were none."""

    request_id: str
    num_tokens: int
    text: str
    num_pages: int
    rows: int
    landed_early: float | None
    difference: str | None
    prefill_hits: int = 0
    decode_hits: int = 0
    num_restarts: int = 0
    preempted: bool = False
    drafts: Acceptance | None = None


@dataclass(frozen=True)
class Report:
    """A whole run. `bitwise` tells whether bits were compared or, on a machine that cannot, tokens. `num_turned` counts
    the prompts whose first token a grammar made another one; None without a grammar."""

    prompts: list[PromptReport]
    fabric: str
    num_writes: int
    num_bytes: int
    transfer_s: float
    num_distinct_tokens: int
    bitwise: bool
    speculation: Speculation | None = None
    num_turned: int | None = None

    @property
    def num_equal(self) -> int:
        return sum(prompt.difference is None for prompt in self.prompts)

    @property
    def ok(self) -> bool:
        drafts_ok = self.speculation is None or self.speculation.ok
        return self.num_equal == len(self.prompts) > 0 and self.num_distinct_tokens > 1 and drafts_ok

    @property
    def landed_early(self) -> float | None:
        """Over all rows of the prompts of at least `LONG_TOKENS` tokens; None without such prompts."""
        long = [own for own in self.prompts if own.num_tokens >= LONG_TOKENS and own.landed_early is not None]
        rows = sum(own.rows for own in long)
        return sum((own.landed_early or 0.0) * own.rows for own in long) / rows if rows else None

    def text(self) -> str:
        """For people: a line a prompt, then the totals."""
        pages, rows = (sum(getattr(own, name) for own in self.prompts) for name in ("num_pages", "rows"))
        rate = self.num_bytes / self.transfer_s / 1e6
        lines = [
            *(prompt_line(prompt) for prompt in self.prompts),
            f"\nfabric        {self.fabric}",
            f"moved         {pages} pages, {rows} rows, {self.num_bytes} bytes in {self.num_writes} writes",
            f"rate          {rate:.1f} MB/s over {self.transfer_s:.1f} s (the prefill sets the pace)",
        ]
        lines += self._notes()
        if self.landed_early is not None:
            lines += [
                f"landed early  {percent(self.landed_early)} of the rows of prompts of >= {LONG_TOKENS} tokens (*)",
                "              (*) at the decoder before the last layer of the prompt's last chunk was signalled",
            ]
        if self.speculation is not None:
            lines += self.speculation.lines()
        if self.num_turned is not None:
            lines.append(
                f"grammar       {self.num_turned} of {len(self.prompts)} first tokens would have been others, had the "
                "prefiller sampled them"
            )
        if self.num_distinct_tokens < 2:
            lines.append("SUSPICIOUS: all prompts together generated no two different tokens")
        if not self.bitwise:
            lines.append("TOKENS ONLY: this machine's arithmetic is not bitwise stable, so bits were NOT compared")
        lines.append(f"{'bitwise' if self.bitwise else 'tokens'} equal: {self.num_equal}/{len(self.prompts)}")
        return "\n".join(lines)

    def _notes(self) -> list[str]:
        prefill_hits, decode_hits, num_restarts, preempted = (
            sum(getattr(own, name) for own in self.prompts)
            for name in ("prefill_hits", "decode_hits", "num_restarts", "preempted")
        )
        notes = []
        if prefill_hits or decode_hits:
            notes.append(f"prefix hits   {prefill_hits} pages at the prefiller, {decode_hits} at the decoder")
        if num_restarts:
            notes.append(f"restarted     {num_restarts} times by the prefiller, which took the pages back")
        if preempted:
            notes.append(f"preempted     {preempted} prompts in decode, computed again there")
        return notes

    def write_json(self, path: Path) -> None:
        summary = asdict(self) | {
            "landed_early": self.landed_early,
            "num_equal": self.num_equal,
            "rows": sum(own.rows for own in self.prompts),
            "num_pages": sum(own.num_pages for own in self.prompts),
            "ok": self.ok,
        }
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def prompt_line(prompt: PromptReport) -> str:
    text = " ".join(prompt.text.split())
    shown = text if len(text) <= 56 else text[:55] + "…"
    hits = f" hit {prompt.prefill_hits}:{prompt.decode_hits}" if prompt.prefill_hits or prompt.decode_hits else ""
    verdict = "equal" if prompt.difference is None else f"DIFFERS ({prompt.difference})"
    drafts = "" if prompt.drafts is None else f"drafts {prompt.drafts.num_accepted}/{prompt.drafts.num_proposed}  "
    return (
        f"{prompt.request_id:<10} {prompt.num_tokens:>5} tokens {prompt.num_pages:>4} pages "
        f"{prompt.rows:>7} rows{hits}  landed early {percent(prompt.landed_early):>7}  {drafts}{verdict}  {shown!r}"
    )


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
