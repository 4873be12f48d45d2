"""The rows of one page on both sides, and the runs they form.

A row is one element of the index space (plane, head, token) of a page. Both layouts give each row an offset; rows that
follow each other on both sides become one run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Offsets of a page's rows on both sides, int64 of shape (num_rows,), ascending at the source."""

    src_offsets: npt.NDArray[np.int64]
    dst_offsets: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    row_bytes: int
    num_tokens: int

    @classmethod
    def build(
        cls,
        src_offsets: npt.NDArray[np.int64],
        dst_offsets: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        row_bytes: int,
    ) -> RowTable:
        """Put the rows into the order of the source."""
        order = np.argsort(src_offsets)
        return cls(src_offsets[order], dst_offsets[order], tokens[order], row_bytes, int(tokens.max()) + 1)

    def runs(self, start: int, stop: int, counted_stop: int) -> npt.NDArray[np.uint64]:
        """Return the longest runs over the tokens [start, stop): src_offset, dst_offset, bytes, rows; uint64 (n, 4).

        Tokens from `counted_stop` on do not count as rows. A run ends with a row that counts; one without is left out.
        """
        chosen = (self.tokens >= start) & (self.tokens < stop)
        src, dst, tokens = self.src_offsets[chosen], self.dst_offsets[chosen], self.tokens[chosen]
        joined = (np.diff(src) == self.row_bytes) & (np.diff(dst) == self.row_bytes)
        heads = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        counted = tokens < counted_stop
        rows = np.add.reduceat(counted, heads, dtype=np.int64)
        ends = np.maximum.reduceat(np.where(counted, np.arange(len(src)) + 1, 0), heads)
        runs = np.column_stack((src[heads], dst[heads], (ends - heads) * self.row_bytes, rows))
        return runs[rows > 0].astype(np.uint64)

    def all_runs(self) -> npt.NDArray[np.uint64]:
        """Return the runs of the whole page."""
        return self.runs(0, self.num_tokens, self.num_tokens)
