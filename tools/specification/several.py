"""Dialogues of nodes with several ranks, and of attempts with several legs."""

from __future__ import annotations

from msgspec.structs import replace

import kvmsgr_protocol as wire
from kvmsgr_protocol import Reason
from kvmsgr_protocol.answer import to_json
from tools.specification.script import (
    ACCEPTED,
    BROKEN,
    CANCEL,
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
    nic,
    on,
    send,
)

HALF = NUM_ROWS // 2
"""Rows of one of two ranks with a head each."""
STAGE = NUM_ROWS * 2 // 3
"""Rows of two of three layers."""


def ranks_of_a_prefiller() -> dict[str, list[Step]]:
    """What one that has two ranks does with a Dispatch for two."""

    def served(ranks: list[wire.RankSpans], rows: int) -> list[Step]:
        return [dispatch(ranks=ranks, expected_rows=rows), *ACCEPTED, CANCEL, DRAINED]

    def refused(ranks: list[wire.RankSpans], rows: int) -> list[Step]:
        return [dispatch(ranks=ranks, expected_rows=rows), expect("refuse", **NAMED, code="protocol")]

    late = wire.Span(0, 4, wire.pack_pages([1]))  # 2 of the 6 positions
    twice = wire.Span(0, 0, wire.pack_pages([3, 3]))
    absent = wire.Span(0, 0, wire.pack_pages([3, 12]))
    return {
        "pages on both ranks": served(on(0, 1), NUM_ROWS),
        "pages on both ranks, the second named first": served(on(1, 0), NUM_ROWS),
        "pages on one of two ranks": served(on(1), HALF),
        "other positions on each rank": served([*on(0), *on(1, span=late)], HALF + HALF // 3),
        "rows of one rank where two are filled": refused(on(0, 1), HALF),
        "rows of two ranks where one is filled": refused(on(1), NUM_ROWS),
        "a third rank where there are two": refused(on(0, 1, 2), NUM_ROWS),
        "a page twice on the second rank": refused([*on(0), *on(1, span=twice)], NUM_ROWS),
        "a page that does not exist on the second rank": refused([*on(0), *on(1, span=absent)], NUM_ROWS),
        "rows where no rank is named": refused([], HALF),
    }


def ranks_of_a_decoder() -> dict[str, list[Step]]:
    """What one that has two ranks asks of a prefiller that has two."""
    asked = [FETCH, expect("dispatch", request_id="r", expected_rows=NUM_ROWS), send(wire.Accept(*LEG))]
    return {
        "pages on both ranks": [*asked, send(wire.Drained(*LEG, 0)), failed("engine"), FREE],
        "pages on one of two ranks": [
            {**FETCH, "ranks": [1]},
            expect("dispatch", request_id="r", expected_rows=HALF, ranks=to_json(on(1))),
            send(wire.Refuse(*LEG, Reason.refused, "")),
            failed("refused"),
            FREE,
        ],
        "a Drained of the rows of one rank frees no pages": [
            *asked,
            {"engine": "cancel", "request_id": "r"},
            expect("cancel", request_id="r"),
            send(wire.Drained(*LEG, HALF)),
            HELD,
        ],
        "a rank of the prefiller dies": [
            *asked,
            send(wire.Failed(*LEG, Reason.rank_lost, "rank 1 has died", 0, NUM_ROWS)),
            failed("rank_lost"),
            HELD,
            send(wire.Drained(*LEG, 0)),
            FREE,
        ],
    }


def stage_of_a_prefiller() -> dict[str, list[Step]]:
    """What one that holds two of three layers does with a Dispatch of a decoder that wants all."""
    refused = expect("refuse", **NAMED, code="protocol")
    return {
        "the rows of its layers": [dispatch(expected_rows=STAGE), *ACCEPTED, CANCEL, DRAINED],
        "the rows of all layers": [dispatch(), refused],
        "the rows of the other stage": [dispatch(expected_rows=NUM_ROWS - STAGE), refused],
    }


def legs_of_a_decoder() -> dict[str, list[Step]]:
    """What one that fetches from two prefillers tells the one that holds two of three layers."""
    asked = [FETCH, expect("dispatch", request_id="r", expected_rows=STAGE)]
    accepted = [*asked, send(wire.Accept(*LEG))]
    return {
        "a leg that fails ends the attempt": [
            *accepted,
            send(wire.Failed(*LEG, Reason.engine, "", 0, STAGE)),
            failed("engine"),
            HELD,
            send(wire.Drained(*LEG, 0)),
            FREE,
        ],
        "a leg that is declined ends the attempt": [*asked, send(wire.Busy(*LEG, "", 1.0)), failed("busy"), FREE],
        "Sent of all rows of the leg, of which none landed": [
            *accepted,
            send(wire.Sent(*LEG, STAGE)),
            {"engine": "cancel", "request_id": "r"},
            expect("cancel", request_id="r", code="cancelled"),
            failed("cancelled"),
            HELD,
        ],
    }


def rotations() -> dict[str, list[Step]]:
    """Rotate that does not name what Attach has named."""
    new = nic(beat_slot=0)
    first, second = (wire.RankFabric(rank, [new]) for rank in range(2))

    def rotate(*ranks: wire.RankFabric) -> list[Step]:
        return [send(wire.Rotate(list(ranks))), *BROKEN]

    return {
        "Rotate of one of two ranks": rotate(first),
        "Rotate of a rank that does not exist": rotate(first, replace(second, rank=2)),
        "Rotate of a rank too many": rotate(first, second, replace(second, rank=2)),
        "Rotate with an endpoint too many": rotate(first, replace(second, endpoints=[new, new])),
        "Rotate with fewer regions": rotate(first, replace(second, endpoints=[replace(new, regions=[])])),
        "Rotate to another provider": rotate(first, replace(second, endpoints=[replace(new, provider="other")])),
        "Resume without Rotate": [send(wire.Resume()), *BROKEN],
    }
