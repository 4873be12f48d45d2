"""The control messages. Each is a msgpack map whose key "t" names the message; unknown keys are skipped.

A connection starts with Hello and Attach in both directions. Then a decoder sends Dispatch and Cancel and ends each leg
with Finished or Failed; a prefiller answers with the rest. A leg is (request id, attempt) on this connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from .bounds import (
    MAX_ENDPOINTS,
    MAX_PAYLOAD_BYTES,
    MAX_RANKS,
    MAX_TEXT,
    MAX_TOKENS,
    U31,
    U63,
    ContextSlot,
    Generation,
    Incarnation,
    Label,
    Name,
    RequestId,
    Seconds,
    Slot,
    Text,
)
from .codes import Reason
from .immediate import NUM_SLOTS
from .layouts import Endpoint, RankAttach
from .packing import ITEM_BYTES


class _Message(Struct, frozen=True, tag_field="t"):
    """Base of the messages."""


def _clip_reason(message: Struct, reason: str) -> None:
    """Cut a text for people where it is longer than may travel, so that it never costs the connection."""
    if len(reason) > MAX_TEXT:
        force_setattr(message, "reason", reason[: MAX_TEXT - 3] + "...")


def _check_once(ranks: Sequence[RankAttach | RankSpans | RankFabric]) -> None:
    numbers = [rank.rank for rank in ranks]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"a rank is named twice in {numbers}")


class _Leg(_Message, frozen=True):
    """Base of the messages about one leg."""

    request_id: RequestId
    attempt: U63


class _LegReason(_Leg, frozen=True):
    """Base of the messages that end a leg: why, as a code and as a text for people."""

    code: Reason
    reason: Text

    def __post_init__(self) -> None:
        _clip_reason(self, self.reason)


class Identity(Struct, frozen=True):
    """What an engine serves.

    Args:
        model: The model and its weights, by a fingerprint; compared as text.
        roles: "prefiller", "decoder" or both.
    """

    model: Label
    roles: Annotated[list[Name], Meta(max_length=8)]


class Hello(_Message, frozen=True, tag="hello"):
    """The first message in each direction.

    Args:
        versions: Lowest and highest protocol version spoken.
        capabilities: Optional features by name.
        incarnation: 32 hex digits, new at each start of a messenger.
        name: Name for logs.
        software: Implementation and its version, for logs.
        identity: What is served; both sides must fit.
    """

    versions: tuple[U31, U31]
    capabilities: Annotated[list[Name], Meta(max_length=256)]
    incarnation: Incarnation
    name: Label
    software: Label
    identity: Identity


class Attach(_Message, frozen=True, tag="attach"):
    """Layouts, memory and addresses, after both Hellos fit.

    Args:
        ranks: The ranks this messenger hosts.
        heartbeat_s: The sender's heartbeats are at most this far apart.
        lease_s: A peer from which no heartbeat has landed for this long is lost to the sender of this message.
    """

    ranks: Annotated[list[RankAttach], Meta(min_length=1, max_length=MAX_RANKS)]
    heartbeat_s: Seconds
    lease_s: Seconds

    def __post_init__(self) -> None:
        _check_once(self.ranks)


class Span(Struct, frozen=True):
    """Positions a list of pages holds: from `first_token`, which may lie inside the first page, to the last page's end.

    Args:
        group: Index into the rank's cache groups.
        first_token: First position covered.
        pages: Page indices in order of position, int32 little-endian.
    """

    group: U31
    first_token: U31
    pages: Annotated[bytes, Meta(max_length=ITEM_BYTES * MAX_TOKENS)]

    def __post_init__(self) -> None:
        if len(self.pages) % ITEM_BYTES:
            raise ValueError(f"pages has {len(self.pages)} bytes, needed is a multiple of {ITEM_BYTES}")

    @property
    def num_pages(self) -> int:
        """Pages of the span."""
        return len(self.pages) // ITEM_BYTES


class RankSpans(Struct, frozen=True):
    """The destination pages of one rank."""

    rank: U31
    spans: Annotated[list[Span], Meta(max_length=4096)]


class Dispatch(_Leg, frozen=True, kw_only=True, tag="dispatch"):
    """Decoder to prefiller: prefill this prompt and write its KV here.

    Args:
        num_tokens: Length of the prompt. Its last position is never written.
        tokens: The prompt, uint32 little-endian; empty where the prefiller knows it already.
        slot, generation: What the leg's writes carry in their immediate, whichever rank they go to.
        ranks: Destination pages, for each destination rank.
        context_slot: Slot to fill in each context buffer of these ranks; -1: no context is wanted from this leg.
        expected_rows: Rows of this leg on all of these ranks, as the decoder counts them: those of the layers and heads
            that the prefiller's ranks hold.
        time_allowed_s: Time from the receipt of this message.
        payload: For the engine, opaque.
        trace: Trace context, as text pairs.
    """

    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    tokens: Annotated[bytes, Meta(max_length=ITEM_BYTES * MAX_TOKENS)]
    slot: Slot
    generation: Generation
    ranks: Annotated[list[RankSpans], Meta(max_length=MAX_RANKS)]
    context_slot: ContextSlot
    expected_rows: U63
    time_allowed_s: Seconds
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)] = b""
    trace: Annotated[dict[Name, Annotated[str, Meta(max_length=1024)]], Meta(max_length=32)] = {}

    def __post_init__(self) -> None:
        if len(self.tokens) not in (0, ITEM_BYTES * self.num_tokens):
            raise ValueError(
                f"tokens has {len(self.tokens)} bytes, needed are 0 or {ITEM_BYTES * self.num_tokens} "
                f"for {self.num_tokens} tokens"
            )
        _check_once(self.ranks)


class Accept(_Leg, frozen=True, tag="accept"):
    """Prefiller: the leg is admitted; writes may come."""


class Busy(_Leg, frozen=True, tag="busy"):
    """Prefiller: not now; nothing was and will be written. `retry_after_s` is advice, None: no advice."""

    reason: Text
    retry_after_s: Seconds | None = None

    def __post_init__(self) -> None:
        _clip_reason(self, self.reason)


class Refuse(_LegReason, frozen=True, tag="refuse"):
    """Prefiller: not at all; nothing was and will be written."""


class Sent(_Leg, frozen=True, tag="sent"):
    """Prefiller: every write of the leg is locally complete. It says nothing about what has landed."""

    rows_posted: U63


class Cancel(_LegReason, frozen=True, tag="cancel"):
    """Decoder: stop. The pages are in use until Drained and the count agree."""


class Drained(_Leg, frozen=True, tag="drained"):
    """Prefiller: nothing more will be posted. The pages are free once exactly `rows_posted` rows were counted."""

    rows_posted: U63


class Finished(_Leg, frozen=True, tag="finished"):
    """Decoder: all rows landed, of this leg and of the other legs of its attempt."""

    rows: U63


class Failed(_LegReason, frozen=True, tag="failed"):
    """Either side: the leg failed. `rows` were counted (decoder) or posted (prefiller), of `expected_rows`."""

    rows: U63
    expected_rows: U63


class RankFabric(Struct, frozen=True):
    """New addresses and keys of one rank; as many endpoints and regions as in its Attach, in the same order."""

    rank: U31
    endpoints: Annotated[list[Endpoint], Meta(min_length=1, max_length=MAX_ENDPOINTS)]


class Rotate(_Message, frozen=True, tag="rotate"):
    """Write here from now on: each endpoint of each rank of Attach has a new address. The receiver holds its writes
    until those under way are locally complete, answers Rotated, and goes on there when Resume comes. The old addresses
    will be closed."""

    ranks: Annotated[list[RankFabric], Meta(min_length=1, max_length=MAX_RANKS)]

    def __post_init__(self) -> None:
        _check_once(self.ranks)


class SlotRows(Struct, frozen=True):
    """Rows posted so far for one slot of the receiver of this message."""

    slot: Slot
    generation: Generation
    rows: U63


class Rotated(_Message, frozen=True, tag="rotated"):
    """The answer to Rotate: nothing more goes to the old addresses. `posted` has every leg there is a record of."""

    posted: Annotated[list[SlotRows], Meta(max_length=NUM_SLOTS)]


class Resume(_Message, frozen=True, tag="resume"):
    """The answer to Rotated: all of that has landed, so writes may go to the new addresses."""


class Restarted(_Leg, frozen=True, tag="restarted"):
    """Prefiller: it took its pages back, and the leg ends as with Failed (Drained follows). The request may be
    dispatched again, as a new attempt."""


class Unknown(_Leg, frozen=True, tag="unknown"):
    """There is no such leg here. It never means drained."""


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """The last message of a connection, and why it ends."""

    code: Reason
    reason: Text

    def __post_init__(self) -> None:
        _clip_reason(self, self.reason)


Message = (
    Hello
    | Attach
    | Dispatch
    | Accept
    | Busy
    | Refuse
    | Sent
    | Cancel
    | Drained
    | Finished
    | Failed
    | Rotate
    | Rotated
    | Resume
    | Restarted
    | Unknown
    | Goodbye
)
"""Every message."""
