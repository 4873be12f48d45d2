"""Conversations: what an implementation must answer to what, in which order.

A step is one of
    {"expect": PATTERN}     the implementation sends a message with these fields, whatever the others hold
    {"may": PATTERN}        it may send such a message here
    {"send": MESSAGE}       it is sent this message
    {"bytes": HEX}          it is sent these bytes
    {"engine": WORD, ...}   its engine does this
    {"closed": true}        it closes the connection
`begins` says where: "connected", before either Hello; "dialled", likewise, and it is the implementation that dials;
"live", after both Attach. `cache` is one of `caches` in `setup`. What `needs` "rotate" is for implementations that have
this capability, what `needs` "restart" for decoders that dispatch again by themselves. Where the implementation is the
decoder, `attempt` 1001 stands for the number that it chose in its last Dispatch.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec.structs import replace

import kvmsgr_protocol as wire
from kvmsgr_protocol import Reason
from tests.protocol.samples import group
from tools.specification import restarts, several
from tools.specification.script import (
    ACCEPTED,
    BROKEN,
    CANCEL,
    CLOSED,
    CLUSTERS,
    DRAINED,
    FETCH,
    FREE,
    GREET,
    HEADS,
    HELD,
    HELLO,
    LAYERS,
    LEG,
    NAMED,
    NUM_ROWS,
    NUM_TOKENS,
    PAGE_TOKENS,
    PAGES,
    PROVIDER,
    Step,
    attach,
    dispatch,
    expect,
    failed,
    may,
    on,
    part,
    send,
)

SETUP = {
    "model": "test",
    "cache": f"one group, kv: {PAGES} pages of {PAGE_TOKENS} tokens, {HEADS} heads, {LAYERS} layers, K and V, rows of "
    "4 elements of bfloat16; no context buffers. Who holds what of it is in `caches`",
    "caches": {name: cluster.about for name, cluster in CLUSTERS.items()},
    "provider": f"{PROVIDER}; where it is another, its name and an address of its kind take the place of those "
    "that are sent. Nobody listens there",
    "max_requests": "more than one",
}
"""What the implementation under test must be set up with."""


def _connected() -> dict[str, list[Step]]:
    def refused(first: wire.Hello) -> list[Step]:
        return [expect("hello"), send(first), expect("goodbye", code="identity_mismatch"), CLOSED]

    def misfit(theirs: wire.Attach, code: str = "layout_mismatch") -> list[Step]:
        return [*GREET, send(theirs), may("attach"), expect("goodbye", code=code), CLOSED]

    broken = [may("attach"), *BROKEN]
    newer = (wire.PROTOCOL_VERSIONS[1] + 1, wire.PROTOCOL_VERSIONS[1] + 2)
    identity = wire.Identity("another", ["prefiller", "decoder"])
    ours = group()
    narrow = [replace(plane, row_bytes=plane.row_bytes // 2) for plane in ours.planes]
    return {
        "no common version": refused(replace(HELLO, versions=newer)),
        "another model": refused(replace(HELLO, identity=identity)),
        "a second Hello": [*GREET, send(HELLO), *broken],
        "Attach before Hello": [expect("hello"), send(attach(ours)), *broken],
        "Dispatch before Attach": [*GREET, dispatch(), *broken],
        "another group": misfit(attach(replace(ours, name="other"))),
        "another type of elements": misfit(attach(replace(ours, dtype="float16"))),
        "rows of another length": misfit(attach(replace(ours, planes=narrow))),
        "one plane": misfit(attach(group(num_planes=1))),
        "another number of heads in all": misfit(attach(replace(ours, total_heads=2 * HEADS))),
        "pages of which neither divides the other": misfit(attach(group(page_tokens=6))),
        "a recurrent group": misfit(attach(replace(group(page_tokens=1), recurrent=True))),
        "the second of two ranks does not fit": misfit(attach(ours, replace(ours, name="other"))),
        "heartbeats slower than any lease": misfit(replace(attach(ours), heartbeat_s=1e6)),
        "another provider": misfit(_other_provider()),
        "a group that is not inside its region": misfit(attach(ours, region_bytes=1 << 10), "protocol"),
        "two ranks of one number": [*GREET, {"bytes": _two_of_one_number().hex()}, *broken],
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


def _other_provider() -> wire.Attach:
    fits = attach(group())
    (rank,) = fits.ranks
    endpoints = [replace(rank.endpoints[0], provider="other")]
    return replace(fits, ranks=[replace(rank, endpoints=endpoints)])


def _two_of_one_number() -> bytes:
    fits = msgspec.to_builtins(attach(group()), builtin_types=(bytes,))
    body = msgspec.msgpack.encode({**fits, "ranks": fits["ranks"] * 2})
    return len(body).to_bytes(4, "big") + body


def _dialled() -> dict[str, list[Step]]:
    asked = [FETCH, *GREET]
    misfit = [may("attach"), expect("goodbye", code="layout_mismatch"), CLOSED, failed("layout_mismatch"), FREE]
    overlapping = attach(part(range(2), range(HEADS)), part(range(1, LAYERS), range(HEADS)))
    return {
        "another group": [*asked, send(attach(replace(group(), name="other"))), *misfit],
        "ranks that share a part of what they hold": [*asked, send(overlapping), *misfit],
        "another incarnation than was asked for": [
            FETCH,
            expect("hello"),
            send(replace(HELLO, incarnation="cd" * 16)),
            expect("goodbye", code="peer_lost"),
            CLOSED,
            failed("peer_lost"),
            FREE,
        ],
    }


def _prefiller() -> dict[str, list[Step]]:
    asked = [dispatch(), *ACCEPTED]
    unknown = expect("unknown", **NAMED)

    def refused(why: str, **changes: Any) -> list[Step]:
        return [dispatch(**changes), expect("refuse", **NAMED, code=why), CANCEL, unknown]

    def span(*pages: int, group: int = 0) -> list[wire.RankSpans]:
        return on(0, span=wire.Span(group, 0, wire.pack_pages(pages)))

    return {
        "Cancel for an unknown leg": [CANCEL, unknown],
        "Finished and Failed for an unknown leg are late": [
            send(wire.Finished(*LEG, NUM_ROWS)),
            send(wire.Failed(*LEG, Reason.timeout, "", 0, NUM_ROWS)),
            CANCEL,
            unknown,
        ],
        "Cancel after Accept": [*asked, CANCEL, DRAINED, CANCEL, unknown],
        "Failed after Accept": [*asked, send(wire.Failed(*LEG, Reason.timeout, "", 0, NUM_ROWS)), DRAINED],
        "Cancel before the engine has answered": [dispatch(), CANCEL, expect("refuse", **NAMED, code="cancelled")],
        "the engine gives up": [
            *asked,
            {"engine": "fail", "request_id": "r"},
            expect("failed", **NAMED, code="engine", rows=0, expected_rows=NUM_ROWS),
            DRAINED,
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
        "the same leg twice": [*asked, dispatch(), may("drained"), *BROKEN],
        "another row count": refused("protocol", expected_rows=NUM_ROWS - 1),
        "Rotated that nobody asked for": [send(wire.Rotated([])), *BROKEN],
        "a page that does not exist": refused("protocol", ranks=span(3, 12)),
        "a page twice": refused("protocol", ranks=span(3, 3)),
        "a group that does not exist": refused("protocol", ranks=span(3, 5, group=1)),
        "a rank that does not exist": refused("protocol", ranks=on(1)),
        "a context buffer where there is none": refused("protocol", context_slot=0, expected_rows=NUM_ROWS + 1),
        "a prompt longer than the cache": refused("refused", num_tokens=12 * 4 + 2),
    }


def _decoder() -> dict[str, list[Step]]:
    asked = [FETCH, expect("dispatch", request_id="r", num_tokens=NUM_TOKENS, expected_rows=NUM_ROWS)]
    accepted = [*asked, send(wire.Accept(*LEG))]
    return {
        "Refuse frees the pages": [*asked, send(wire.Refuse(*LEG, Reason.refused, "")), failed("refused"), FREE],
        "Busy frees the pages": [*asked, send(wire.Busy(*LEG, "", 1.0)), failed("busy"), FREE],
        "cancelled: only a counted Drained frees the pages": [
            *accepted,
            {"engine": "cancel", "request_id": "r"},
            expect("cancel", request_id="r", code="cancelled"),
            failed("cancelled"),
            HELD,
            send(wire.Drained(*LEG, 0)),
            FREE,
        ],
        "cancelled: a Drained of rows that have not landed frees nothing": [
            *accepted,
            {"engine": "cancel", "request_id": "r"},
            expect("cancel", request_id="r"),
            send(wire.Drained(*LEG, NUM_ROWS)),
            HELD,
        ],
        "Drained unasked fails the request": [*accepted, send(wire.Drained(*LEG, 0)), failed("engine"), FREE],
        "Failed, then Drained": [
            *accepted,
            send(wire.Failed(*LEG, Reason.engine, "", 0, NUM_ROWS)),
            failed("engine"),
            HELD,
            send(wire.Drained(*LEG, 0)),
            FREE,
        ],
        "Unknown is no proof: only the fence frees the pages": [
            *accepted,
            send(wire.Unknown(*LEG)),
            failed("unknown_request"),
            expect("goodbye", code="unknown_request"),
            CLOSED,
            FREE,
        ],
        "Sent of fewer rows than were asked for": [
            *accepted,
            send(wire.Sent(*LEG, NUM_ROWS - 1)),
            failed("short_count"),
            expect("failed", request_id="r", code="short_count"),
            expect("goodbye", code="short_count"),
            CLOSED,
            FREE,
        ],
        "Sent before Accept": [
            *asked,
            send(wire.Sent(*LEG, 0)),
            expect("goodbye", code="protocol"),
            CLOSED,
            failed("protocol"),
            FREE,
        ],
    }


def dialogues() -> list[dict[str, Any]]:
    """Every dialogue."""
    groups: list[tuple[dict[str, str], dict[str, list[Step]]]] = [
        (_about("connected", "prefiller", "one rank"), _connected()),
        (_about("dialled", "decoder", "one rank"), _dialled()),
        (_about("live", "prefiller", "one rank"), _prefiller()),
        (_about("live", "decoder", "one rank"), _decoder()),
        (_about("live", "prefiller", "two ranks"), several.ranks_of_a_prefiller()),
        (_about("live", "decoder", "two ranks"), several.ranks_of_a_decoder()),
        (_about("live", "prefiller", "two stages"), several.stage_of_a_prefiller()),
        (_about("live", "decoder", "two stages"), several.legs_of_a_decoder()),
        (_about("live", "prefiller", "two ranks", needs="rotate"), several.rotations()),
        (_about("live", "prefiller", "one rank"), restarts.prefiller()),
        (_about("live", "decoder", "one rank", needs="restart"), restarts.decoder()),
        (_about("live", "decoder", "two stages", needs="restart"), restarts.decoder_with_two_legs()),
    ]
    return [{"name": name, **about, "steps": steps} for about, made in groups for name, steps in made.items()]


def _about(begins: str, implementation: str, cache: str, **more: str) -> dict[str, str]:
    return {"begins": begins, "implementation": implementation, "cache": cache, **more}


def render() -> str:
    """Return the file: one dialogue a line."""
    lines = ",\n".join(json.dumps(dialogue) for dialogue in dialogues())
    about = " ".join((__doc__ or "").split())
    return f'{{"about": {json.dumps(about)}, "setup": {json.dumps(SETUP)}, "vectors": [\n{lines}\n]}}\n'
