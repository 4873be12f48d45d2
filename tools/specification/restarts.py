"""Dialogues of prefillers that take their pages back, and of decoders that ask again by themselves."""

from __future__ import annotations

import kvmsgr_protocol as wire
from kvmsgr_protocol import Reason
from tools.specification.script import (
    ACCEPTED,
    BROKEN,
    CLOSED,
    DRAINED,
    FETCH,
    FREE,
    HELD,
    LEG,
    NAMED,
    NUM_ROWS,
    Step,
    dispatch,
    expect,
    failed,
    send,
)
from tools.specification.several import STAGE

RESTARTED = send(wire.Restarted(*LEG))
NOTHING_POSTED = send(wire.Drained(*LEG, 0))
CANCEL: list[Step] = [
    {"engine": "cancel", "request_id": "r"},
    expect("cancel", request_id="r", code="cancelled"),
    failed("cancelled"),
    HELD,
    NOTHING_POSTED,
    FREE,
]


def prefiller() -> dict[str, list[Step]]:
    """What one says that takes its pages back, and that the request is a new one when it comes again."""
    again = {"request_id": "r", "attempt": 1002}
    return {
        "the engine takes its pages back": [
            dispatch(),
            *ACCEPTED,
            {"engine": "preempt", "request_id": "r"},
            expect("restarted", **NAMED),
            DRAINED,
            dispatch(attempt=1002, generation=4),
            {"engine": "accept", "request_id": "r"},
            expect("accept", **again),
            send(wire.Cancel("r", 1002, Reason.cancelled, "")),
            expect("drained", **again, rows_posted=0),
        ],
    }


def decoder(rows: int = NUM_ROWS) -> dict[str, list[Step]]:
    """What one does that asks again: not before nothing of the first attempt can land."""
    asked = expect("dispatch", request_id="r", expected_rows=rows)
    accepted = [FETCH, asked, send(wire.Accept(*LEG))]
    gone = [send(wire.Goodbye(Reason.closed, "")), expect("goodbye", code="closed"), CLOSED]
    return {
        "Restarted and a counted Drained: it is dispatched again": [
            *accepted,
            RESTARTED,
            NOTHING_POSTED,
            asked,
            send(wire.Accept(*LEG)),
            *CANCEL,
        ],
        "Restarted twice": [
            *accepted,
            *[RESTARTED, NOTHING_POSTED, asked, send(wire.Accept(*LEG))] * 2,
            *CANCEL,
        ],
        "the next attempt is refused": [
            *accepted,
            RESTARTED,
            NOTHING_POSTED,
            asked,
            send(wire.Refuse(*LEG, Reason.refused, "")),
            failed("refused"),
            FREE,
        ],
        "Restarted and a Drained of rows that have not landed: it is not dispatched again": [
            *accepted,
            RESTARTED,
            send(wire.Drained(*LEG, rows // 2)),
            *gone,
            failed("closed"),
            FREE,
        ],
        "Restarted without Drained: it is not dispatched again": [*accepted, RESTARTED, *gone, failed("closed"), FREE],
        "cancelled between Restarted and Drained": [
            *accepted,
            RESTARTED,
            {"engine": "cancel", "request_id": "r"},
            failed("cancelled"),
            HELD,
            NOTHING_POSTED,
            FREE,
        ],
        "Restarted after Sent": [*accepted, send(wire.Sent(*LEG, rows)), RESTARTED, *BROKEN, failed("protocol"), FREE],
    }


def decoder_with_two_legs() -> dict[str, list[Step]]:
    """Both are asked again: all legs of an attempt have one number."""
    return decoder(STAGE)
