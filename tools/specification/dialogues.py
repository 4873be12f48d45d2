"""Conversations: what an implementation must answer to what, in which order.

A step is one of
    {"expect": PATTERN}     the implementation sends a message with these fields, whatever the others hold
    {"may": PATTERN}        it may send such a message here
    {"send": MESSAGE}       it is sent this message
    {"bytes": HEX}          it is sent these bytes
    {"engine": WORD, ...}   its engine does this
    {"closed": true}        it closes the connection
`begins` says where: "connected", before either Hello, or "live", after both Attach.
"""

from __future__ import annotations

import json
from typing import Any

import kvmsgr_protocol as wire
from kvmsgr_protocol import Reason
from kvmsgr_protocol.answer import to_json
from tests.protocol.samples import group

Step = dict[str, Any]

SETUP = {
    "model": "test",
    "cache": "one rank, one group: 12 pages of 4 tokens, 2 heads, 3 layers, K and V, no context buffers",
    "max_requests": "more than one",
}
"""What the implementation under test must be set up with."""

NUM_TOKENS, NUM_ROWS = 7, 6 * 2 * 3 * 2
HELLO = wire.Hello(
    wire.PROTOCOL_VERSIONS, [], "ab" * 16, "vectors", "vectors", wire.Identity("test", ["prefiller", "decoder"])
)
MISFIT = wire.Attach([wire.RankAttach(0, 0, [group(name="other")], [wire.Region(0, 1 << 20, 1)], [])], 3, 0.5, 2.0)
PAGES = wire.RankSpans(0, [wire.Span(0, 0, wire.pack_pages([3, 5]))])


def send(message: wire.Message) -> Step:
    return {"send": to_json(message)}


def expect(t: str, **fields: object) -> Step:
    return {"expect": {"t": t, **fields}}


def may(t: str) -> Step:
    return {"may": {"t": t}}


def dispatch(**changes: Any) -> Step:
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1001,
        "num_tokens": NUM_TOKENS,
        "tokens": b"",
        "slot": 16000,
        "generation": 3,
        "ranks": [PAGES],
        "context_slot": -1,
        "expected_rows": NUM_ROWS,
        "time_allowed_s": 60.0,
    }
    return send(wire.Dispatch(**(fields | changes)))


LEG = ("r", 1001)
NAMED = {"request_id": "r", "attempt": 1001}
CANCEL = send(wire.Cancel(*LEG, Reason.cancelled, "the client left"))
CLOSED = {"closed": True}
GREET = [expect("hello"), send(HELLO)]


def _connected() -> dict[str, list[Step]]:
    def refused(first: wire.Hello) -> list[Step]:
        return [expect("hello"), send(first), expect("goodbye", code="identity_mismatch"), CLOSED]

    broken = [may("attach"), expect("goodbye", code="protocol"), CLOSED]
    newer = (wire.PROTOCOL_VERSIONS[1] + 1, wire.PROTOCOL_VERSIONS[1] + 2)
    identity = wire.Identity("another", ["prefiller", "decoder"])
    return {
        "no common version": refused(_replace(HELLO, versions=newer)),
        "another model": refused(_replace(HELLO, identity=identity)),
        "a second Hello": [*GREET, send(HELLO), *broken],
        "Attach before Hello": [expect("hello"), send(MISFIT), *broken],
        "Dispatch before Attach": [*GREET, dispatch(), *broken],
        "another cache": [*GREET, send(MISFIT), may("attach"), expect("goodbye", code="layout_mismatch"), CLOSED],
        "a frame too large": [*GREET, {"bytes": "ffffffff"}, *broken],
        "a frame that is no message": [*GREET, {"bytes": "00000001c1"}, *broken],
        "Goodbye": [
            *GREET,
            send(wire.Goodbye(Reason.closed, "enough")),
            may("attach"),
            expect("goodbye", code="closed"),
            CLOSED,
        ],
    }


def _replace(hello: wire.Hello, **changes: Any) -> wire.Hello:
    fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
    return wire.Hello(**(fields | changes))


def _prefiller() -> dict[str, list[Step]]:
    asked = [dispatch(), {"engine": "accept", "request_id": "r"}, expect("accept", **NAMED)]
    drained = expect("drained", **NAMED, rows_posted=0)
    unknown = expect("unknown", **NAMED)

    def refused(why: str, **changes: Any) -> list[Step]:
        return [dispatch(**changes), expect("refuse", **NAMED, code=why), CANCEL, unknown]

    def span(*pages: int, group: int = 0, first_token: int = 0) -> list[wire.RankSpans]:
        return [wire.RankSpans(0, [wire.Span(group, first_token, wire.pack_pages(pages))])]

    return {
        "Cancel for an unknown leg": [CANCEL, unknown],
        "Finished and Failed for an unknown leg are late": [
            send(wire.Finished(*LEG, NUM_ROWS)),
            send(wire.Failed(*LEG, Reason.timeout, "", 0, NUM_ROWS)),
            CANCEL,
            unknown,
        ],
        "Cancel after Accept": [*asked, CANCEL, drained, CANCEL, unknown],
        "Failed after Accept": [*asked, send(wire.Failed(*LEG, Reason.timeout, "", 0, NUM_ROWS)), drained],
        "Cancel before the engine has answered": [dispatch(), CANCEL, expect("refuse", **NAMED, code="cancelled")],
        "the engine gives up": [
            *asked,
            {"engine": "fail", "request_id": "r"},
            expect("failed", **NAMED, code="engine", rows=0, expected_rows=NUM_ROWS),
            drained,
        ],
        "the engine refuses": [
            dispatch(),
            {"engine": "refuse", "request_id": "r"},
            expect("refuse", **NAMED, code="refused"),
        ],
        "the engine is busy": [
            dispatch(),
            {"engine": "busy", "request_id": "r", "retry_after_s": 1.5},
            expect("busy", **NAMED, retry_after_s=1.5),
        ],
        "a prompt without rows": [
            dispatch(num_tokens=1, expected_rows=0),
            send(wire.Finished(*LEG, 0)),
            CANCEL,
            unknown,
        ],
        "the same leg twice": [*asked, dispatch(), may("drained"), expect("goodbye", code="protocol"), CLOSED],
        "another row count": refused("protocol", expected_rows=NUM_ROWS - 1),
        "Rotated that nobody asked for": [send(wire.Rotated([])), expect("goodbye", code="protocol"), CLOSED],
        "a page that does not exist": refused("protocol", ranks=span(3, 12)),
        "a page twice": refused("protocol", ranks=span(3, 3)),
        "a group that does not exist": refused("protocol", ranks=span(3, 5, group=1)),
        "a rank that does not exist": refused("protocol", ranks=[wire.RankSpans(1, PAGES.spans)]),
        "a context buffer where there is none": refused("protocol", context_slot=0, expected_rows=NUM_ROWS + 1),
        "a prompt longer than the cache": refused("refused", num_tokens=12 * 4 + 2),
    }


def _decoder() -> dict[str, list[Step]]:
    fetch = {"engine": "fetch", "request_id": "r", "num_tokens": NUM_TOKENS, "pages": [3, 5]}
    asked = [fetch, expect("dispatch", request_id="r", num_tokens=NUM_TOKENS, expected_rows=NUM_ROWS)]
    accepted = [*asked, send(wire.Accept(*LEG))]
    held, free = {"engine": "pages are held"}, {"engine": "pages are free"}

    def failed(code: str) -> Step:
        return {"engine": "has failed", "code": code}

    return {
        "Refuse frees the pages": [*asked, send(wire.Refuse(*LEG, Reason.refused, "")), failed("refused"), free],
        "Busy frees the pages": [*asked, send(wire.Busy(*LEG, "", 1.0)), failed("busy"), free],
        "cancelled: only a counted Drained frees the pages": [
            *accepted,
            {"engine": "cancel", "request_id": "r"},
            expect("cancel", request_id="r", code="cancelled"),
            failed("cancelled"),
            held,
            send(wire.Drained(*LEG, 0)),
            free,
        ],
        "cancelled: a Drained of rows that have not landed frees nothing": [
            *accepted,
            {"engine": "cancel", "request_id": "r"},
            expect("cancel", request_id="r"),
            send(wire.Drained(*LEG, NUM_ROWS)),
            held,
        ],
        "Drained unasked fails the request": [*accepted, send(wire.Drained(*LEG, 0)), failed("engine"), free],
        "Failed, then Drained": [
            *accepted,
            send(wire.Failed(*LEG, Reason.engine, "", 0, NUM_ROWS)),
            failed("engine"),
            held,
            send(wire.Drained(*LEG, 0)),
            free,
        ],
        "Unknown is no proof: only the fence frees the pages": [
            *accepted,
            send(wire.Unknown(*LEG)),
            failed("unknown_request"),
            expect("goodbye", code="unknown_request"),
            CLOSED,
            free,
        ],
        "Sent of fewer rows than were asked for": [
            *accepted,
            send(wire.Sent(*LEG, NUM_ROWS - 1)),
            failed("short_count"),
            expect("failed", request_id="r", code="short_count"),
            expect("goodbye", code="short_count"),
            CLOSED,
            free,
        ],
        "Sent before Accept": [
            *asked,
            send(wire.Sent(*LEG, 0)),
            expect("goodbye", code="protocol"),
            CLOSED,
            failed("protocol"),
            free,
        ],
    }


def dialogues() -> list[dict[str, Any]]:
    """Every dialogue. `attempt` 1001 stands for the number that the implementation chose where it is the decoder."""
    groups = [
        ("connected", "either", _connected()),
        ("live", "prefiller", _prefiller()),
        ("live", "decoder", _decoder()),
    ]
    return [
        {"name": name, "begins": begins, "implementation": role, "steps": steps}
        for begins, role, made in groups
        for name, steps in made.items()
    ]


def render() -> str:
    """Return the file: one dialogue a line."""
    lines = ",\n".join(json.dumps(dialogue) for dialogue in dialogues())
    about = " ".join((__doc__ or "").split())
    return f'{{"about": {json.dumps(about)}, "setup": {json.dumps(SETUP)}, "vectors": [\n{lines}\n]}}\n'
