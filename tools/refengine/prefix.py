"""A prefix cache: which pages hold which tokens, so that a prompt that begins like an earlier one finds them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from .spec import Group


@dataclass(eq=False)
class CachedPage:
    """What all groups hold of `page_tokens` positions.

    Attributes:
        key: Stands for its tokens and all before them.
        pages: A group each: the page's index.
        step: Number of the step that computes it, or did.
        num_holders: Jobs that hold it. Nobody writes to it, whoever holds it.
    """

    key: bytes
    pages: tuple[int, ...]
    step: int
    num_holders: int = 1


def check_groups(groups: Sequence[Group]) -> None:
    """Raises ValueError where pages of these groups cannot be cached alike."""
    for group in groups:
        if group.window is not None:
            raise ValueError(
                f"group {group.name!r} has a window of {group.window} tokens and gives up the pages behind it, so a "
                "prefix cannot be found again in all groups alike"
            )
    if len({group.page_tokens for group in groups}) > 1:
        sizes = ", ".join(f"{group.page_tokens} in group {group.name!r}" for group in groups)
        raise ValueError(f"all groups must have pages of one size to be cached alike; there are {sizes}")


class PrefixCache:
    """Full pages by the tokens in them and before them.

    A page that nobody holds any more stays, with all it contains, until its memory is needed: then the one that was
    unused for the longest goes first, and of one prompt the last page, because without those before it it is useless.

    Args:
        page_tokens: Tokens a page, in all groups.
        num_ahead: Tokens after its own position that a position's KV depends on: 1 where a draft layer sees the next.
    """

    def __init__(self, page_tokens: int, num_ahead: int = 0) -> None:
        self.page_tokens, self._num_ahead = page_tokens, num_ahead
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}  # of the first group
        self._idle: dict[bytes, CachedPage] = {}  # nobody holds them; longest unused first

    @property
    def num_idle(self) -> int:
        """Pages of each group that are cached and held by nobody."""
        return len(self._idle)

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """A key for each full page of a prompt; its last token is not prefilled and counts only as one ahead."""
        keys, key, tokens = [], b"", np.asarray(prompt, "<u4")
        for stop in range(self.page_tokens, len(prompt), self.page_tokens):
            seen = tokens[stop - self.page_tokens : stop + self._num_ahead]
            key = blake2b(key + seen.tobytes(), digest_size=16).digest()
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[CachedPage]:
        """The longest run of pages that are cached, from the first key on."""
        found = []
        for key in keys:
            if key not in self._by_key:
                break
            found.append(self._by_key[key])
        return found

    def hold(self, cached: CachedPage) -> None:
        """One more job holds it."""
        cached.num_holders += 1
        self._idle.pop(cached.key, None)

    def keep(self, key: bytes, pages: tuple[int, ...], step: int) -> None:
        """Cache a page that a job holds. If another holds the same tokens, that one stays and this one is nobody's."""
        if key not in self._by_key:
            self._by_key[key] = self._by_page[pages[0]] = CachedPage(key, pages, step)

    def leave(self, pages: tuple[int, ...]) -> bool:
        """A job holds a page no more. Returns whether it is cached; else its memory is free."""
        cached = self._by_page.get(pages[0])
        if cached is None:
            return False
        cached.num_holders -= 1
        if not cached.num_holders:
            self._idle[cached.key] = cached
        return True

    def evict(self) -> tuple[int, ...]:
        """Forget the page that was unused for the longest; its memory is free."""
        cached = self._idle.pop(next(iter(self._idle)))
        del self._by_key[cached.key], self._by_page[cached.pages[0]]
        return cached.pages
