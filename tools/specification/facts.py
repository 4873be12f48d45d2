"""What the types of the messages do not say: who sends each, when, and what answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import kvmsgr_protocol as wire

BOTH: Final = "both"
DECODER: Final = "decoder to prefiller"
PREFILLER: Final = "prefiller to decoder"


@dataclass(frozen=True)
class Fact:
    """Args:
    sender: Who sends the message.
    when: In which state it may come.
    answer: What comes back.
    """

    sender: str
    when: str
    answer: str


FACTS: Final = {
    wire.Hello: Fact(BOTH, "first, once", "Attach, or Goodbye where the two do not fit"),
    wire.Attach: Fact(BOTH, "after both Hellos, once", "none; Goodbye where the layouts do not fit"),
    wire.Dispatch: Fact(DECODER, "when live, once a leg", "Accept, Busy or Refuse"),
    wire.Accept: Fact(PREFILLER, "after Dispatch", "none"),
    wire.Busy: Fact(PREFILLER, "in place of Accept", "none; the leg is over"),
    wire.Refuse: Fact(PREFILLER, "in place of Accept", "none; the leg is over"),
    wire.Sent: Fact(PREFILLER, "after Accept, once", "Finished or Failed"),
    wire.Cancel: Fact(
        DECODER,
        "after Dispatch, at any time before Finished or Failed",
        "Drained; Refuse where it was not accepted; none after Sent; Unknown where there is no such leg",
    ),
    wire.Drained: Fact(PREFILLER, "after Accept, as the last message of a leg that ends early", "none"),
    wire.Finished: Fact(DECODER, "after Dispatch, once", "none; the leg is over"),
    wire.Failed: Fact(
        BOTH,
        "after Dispatch (decoder) or Accept (prefiller)",
        "to a decoder's: Drained; to a prefiller's: none, and the prefiller's own Drained follows",
    ),
    wire.Rotate: Fact(BOTH, "when live", "Rotated"),
    wire.Rotated: Fact(BOTH, "after Rotate, once", "Resume"),
    wire.Resume: Fact(BOTH, "after Rotated, once", "none"),
    wire.Restarted: Fact(
        PREFILLER,
        "after Accept and before Sent; Drained of the attempt follows",
        "none; maybe a Dispatch of a new attempt, once this one is proven ended",
    ),
    wire.Unknown: Fact(PREFILLER, "in answer to a Cancel about a leg of which there is no record", "none"),
    wire.Goodbye: Fact(BOTH, "at any time, as the last message", "the connection is closed"),
}

MEANINGS: Final = {
    "request_id": "Name of the request, chosen by the decoder's engine",
    "attempt": "Number of the attempt, chosen by the decoder, the same in all its legs and never used for another; "
    "with the request id it names the leg on this connection",
    "code": "Why, as a reason code",
    "reason": "Why, as a text for people",
    "rows_posted": "Rows posted for the leg in all",
    "Busy.retry_after_s": "When to try again, as advice; nil: no advice",
    "Finished.rows": "Rows of the leg that were counted",
    "Failed.rows": "Rows counted (decoder) or posted (prefiller), for people",
    "Failed.expected_rows": "Rows expected, for people",
    "RankFabric.rank": "The rank",
    "RankFabric.endpoints": "Its new addresses, as many as in its Attach, with the new keys of its regions",
    "RankSpans.rank": "The rank",
    "RankSpans.spans": "The pages of the destination there",
    "Rotate.ranks": "Every rank of Attach",
    "SlotRows.slot": "Slot of the receiver of this message",
    "SlotRows.generation": "Generation of that slot",
    "SlotRows.rows": "Rows posted so far with this slot and generation",
    "Rotated.posted": "Every leg there is a record of",
}
"""Meanings of fields whose struct does not describe them, by `Struct.field` or by the field alone."""
