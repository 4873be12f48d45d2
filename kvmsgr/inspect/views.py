"""What can be seen of a messenger from outside, as plain values with a JSON Schema."""

from __future__ import annotations

from typing import Literal

import msgspec

ProcessState = Literal["running", "sleeping", "waiting", "stopped", "traced", "dead", "elsewhere"]


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all of them."""


class PagesView(View, frozen=True, kw_only=True):
    """Pages of one cache group.

    Args:
        group: Index of the group.
        name: As the engine named it.
        held: Pages that requests hold.
        total: Pages of the cache.
    """

    group: int
    name: str
    held: int
    total: int


class LegView(View, frozen=True, kw_only=True):
    """One request at one peer, seen from one side.

    Args:
        request_id: As the engines name it, at most 64 bytes of it.
        role: "fetch": we receive; "serve": we send.
        state: Of its state machine.
        peer: Name of the messenger at the other side.
        leg: Number of the leg on this side.
        attempt, slot, generation: Of the side that fetches; both sides show the same.
        age_s: Seconds since it began.
        in_state_s: Seconds since it came into this state.
        num_layers: Layers it moves.
        layers_seen: Layer signals of its newest step. 0 of a fetch: its peer knows.
        layers_sent: Layers of the chunk under way whose writes are all posted. 0 of a fetch.
        entries_posted, num_entries: The same in entries of the write plan: a layer, or a plane of one.
        rows_posted, writes_posted: Sent so far, over all its chunks.
        rows_expected: Rows of the whole leg.
        rows_landed: Rows that landed in its slot. None where it serves: its peer knows.
        attempt_rows_landed, attempt_rows_expected: Over all legs of the attempt; None as above, or once it is over.
        pages_held: Pages this leg keeps from being used again. "fetch": of all its ranks together, the same
            pages on each leg of the request; "serve": source pages, counted once, whatever the number of ranks.
        reason: Code of what ended it, "" while nothing did.
        why: The same in words, or why its pages are in quarantine; at most 36 bytes.
        torn: Its owner was stopped while it wrote this down: parts may be older than others.
    """

    request_id: str
    role: Literal["fetch", "serve"]
    state: str
    peer: str
    leg: int
    attempt: int
    slot: int
    generation: int
    age_s: float
    in_state_s: float
    num_layers: int
    layers_seen: int
    layers_sent: int
    entries_posted: int
    num_entries: int
    rows_posted: int
    writes_posted: int
    rows_expected: int
    rows_landed: int | None
    attempt_rows_landed: int | None
    attempt_rows_expected: int | None
    pages_held: int
    reason: str
    why: str
    torn: bool


class MessengerView(View, frozen=True, kw_only=True):
    """One messenger.

    Args:
        path: Its state file; a byte that is no UTF-8 as \\xff.
        name: As its engine named it.
        incarnation: 32 hex digits, new at each start.
        pid: Of its process.
        process: What /proc says of that. "elsewhere": alive, but not in our pid namespace.
        age_s: Seconds since it was opened.
        address: Of its control socket.
        provider: libfabric provider.
        libfabric: Version that is loaded there.
        software: Versions of the software around it.
        poller_seen_s: Seconds since its polling thread last looked at the clock; None: it has not started.
        pages: Of each cache group.
        quarantined: Pages that a lost peer may still write into.
        legs: Everything that is alive.
    """

    path: str
    name: str
    incarnation: str
    pid: int
    process: ProcessState
    age_s: float
    address: str
    provider: str
    libfabric: str
    software: str
    poller_seen_s: float | None
    pages: list[PagesView]
    quarantined: int
    legs: list[LegView]


class Unreadable(View, frozen=True, kw_only=True):
    """A state file that could not be read.

    Args:
        path: Where it is; a byte that is no UTF-8 as \\xff.
        error: Why.
    """

    path: str
    error: str


class HostView(View, frozen=True, kw_only=True):
    """The messengers of one host.

    Args:
        version: Of this format.
        messengers: Those whose state file could be read.
        unreadable: The others.
    """

    version: Literal[1]
    messengers: list[MessengerView]
    unreadable: list[Unreadable]
