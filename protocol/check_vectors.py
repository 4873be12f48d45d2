#!/usr/bin/env python3
"""Checks the test vectors, and an implementation of the protocol against them.

It imports no implementation: it has its own reader and writer of msgpack, and its own count of rows. The implementation
under test is a program that reads one JSON object a line and answers each with one line; what it is asked is described
in `kvmsgr_protocol/answer.py`. Only the standard library and `jsonschema` are needed.

Exit status: 0 all is as expected, 1 the implementation differs, 2 usage, 3 it did not answer, 4 vectors and schema
contradict each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import selectors
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend

HERE = Path(__file__).parent
FILES = ("immediates", "rows", "versions", "streams", "messages", "refused", "dialogues")
MAX_DEPTH = 64
MAX_ANSWER_BYTES = 64 << 20  # the longest right answer has 32 MiB: a frame of 16 MiB in hex
MAX_TIMEOUT_S = 86400.0
SHOWN = 300  # characters of a value in a report
READ_BYTES = 1 << 16
END_S = 5.0  # what a program gets to end after the last answer

Json = Any
Vector = dict[str, Any]
Ask = Callable[[Json], Json]


class Malformed(ValueError):
    """Bytes are no msgpack."""


class NoAnswer(RuntimeError):
    """The implementation ended, or said something that is no answer."""


# msgpack


class Reader:
    """Reads one value. Bytes stay bytes; an extension becomes None: no message has one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def whole(self) -> Json:
        """The value that is all of the data."""
        value = self._value(0)
        if self._at != len(self._data):
            raise Malformed(f"{len(self._data) - self._at} bytes follow the value")
        return value

    def _take(self, num_bytes: int) -> bytes:
        taken = self._data[self._at : self._at + num_bytes]
        if len(taken) < num_bytes:
            raise Malformed(f"{num_bytes} bytes are needed at {self._at}, {len(taken)} are left")
        self._at += num_bytes
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack(">" + form, self._take(struct.calcsize(form)))[0]

    def _text(self, num_bytes: int) -> str:
        try:
            return self._take(num_bytes).decode()
        except UnicodeDecodeError as error:
            raise Malformed(f"a text is not UTF-8: {error}") from error

    def _array(self, length: int, depth: int) -> list[Json]:
        return [self._value(depth + 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[Json, Json]:
        found = {}
        for _ in range(length):
            key = self._value(depth + 1)
            found[key if isinstance(key, str) else repr(key)] = self._value(depth + 1)
        return found

    def _value(self, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise Malformed(f"deeper than {MAX_DEPTH}")
        head = self._take(1)[0]
        if head < 0x80 or head >= 0xE0:
            return head if head < 0x80 else head - 256
        if head < 0x90:
            return self._map(head & 15, depth)
        if head < 0xA0:
            return self._array(head & 15, depth)
        if head < 0xC0:
            return self._text(head & 31)
        if head in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[head]
        if head in (0xC4, 0xC5, 0xC6):
            return self._take(self._number("BHI"[head - 0xC4]))
        if head in (0xC7, 0xC8, 0xC9):
            return self._take(self._number("BHI"[head - 0xC7]) + 1) and None
        if 0xCA <= head <= 0xD3:
            return self._number("fdBHIQbhiq"[head - 0xCA])
        if 0xD4 <= head <= 0xD8:
            return self._take((1 << head - 0xD4) + 1) and None
        if head in (0xD9, 0xDA, 0xDB):
            return self._text(self._number("BHI"[head - 0xD9]))
        if head in (0xDC, 0xDD):
            return self._array(self._number("HI"[head - 0xDC]), depth)
        if head in (0xDE, 0xDF):
            return self._map(self._number("HI"[head - 0xDE]), depth)
        raise Malformed(f"byte {head:#x} means nothing")


def _sized(length: int, short: tuple[int, int] | None, heads: list[tuple[int, str]]) -> bytes:
    """The shortest head for a length: `short` is (limit, first byte), `heads` are bytes and widths."""
    if short is not None and length < short[0]:
        return bytes([short[1] | length])
    for head, form in heads:
        if length < 1 << 8 * struct.calcsize(form):
            return bytes([head]) + struct.pack(">" + form, length)
    raise ValueError(f"{length} is too long for msgpack")


def _integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack("b" if value < 0 else "B", value)
    forms = [(0xCC, "B"), (0xCD, "H"), (0xCE, "I"), (0xCF, "Q")]
    if value < 0:
        forms = [(0xD0, "b"), (0xD1, "h"), (0xD2, "i"), (0xD3, "q")]
    for head, form in forms:
        bits = 8 * struct.calcsize(form)
        if (value < 1 << bits) if value >= 0 else (value >= -(1 << bits - 1)):
            return bytes([head]) + struct.pack(">" + form, value)
    raise ValueError(f"{value} does not fit into msgpack")


def write(value: Json) -> bytes:
    """Write a value in its shortest form."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return _integer(value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return _sized(len(data), (32, 0xA0), [(0xD9, "B"), (0xDA, "H"), (0xDB, "I")]) + data
        case bytes():
            return _sized(len(value), None, [(0xC4, "B"), (0xC5, "H"), (0xC6, "I")]) + value
        case list():
            return _sized(len(value), (16, 0x90), [(0xDC, "H"), (0xDD, "I")]) + b"".join(map(write, value))
        case dict():
            pairs = b"".join(write(key) + write(item) for key, item in value.items())
            return _sized(len(value), (16, 0x80), [(0xDE, "H"), (0xDF, "I")]) + pairs
    raise TypeError(f"{type(value).__name__} has no form in msgpack")


# Forms of vectors and messages


def expand(pieces: str | list[Any]) -> bytes:
    """Undo the shortening of bytes: a piece is hex, or [hex, times]."""
    if isinstance(pieces, str):
        return bytes.fromhex(pieces)
    return b"".join(
        bytes.fromhex(piece) if isinstance(piece, str) else bytes.fromhex(piece[0]) * piece[1] for piece in pieces
    )


def to_json(value: Json) -> Json:
    """Bytes as hex."""
    match value:
        case bytes():
            return value.hex()
        case list():
            return [to_json(item) for item in value]
        case dict():
            return {key: to_json(item) for key, item in value.items()}
    return value


def _items(validator: Any, items: Json, values: Json, schema: Json) -> Iterator[Any]:
    """The items of an array. Of equal ones in a row only the first is looked at: arrays at their bounds are long."""
    before: Json = object()
    for index, value in enumerate(values if isinstance(values, list) else []):
        if value != before:
            yield from validator.descend(value, items, path=index)
        before = value


Validator = extend(Draft202012Validator, {"items": _items})  # type: ignore[no-untyped-call]  # its stub has no types


class Schema:
    """The committed schema, and what follows from it."""

    def __init__(self, schema: Json) -> None:
        self.schema = schema
        self._parts = schema["$defs"]
        self._names = {
            part["properties"]["t"]["const"]: name
            for name, part in self._parts.items()
            if "t" in part.get("properties", {})
        }
        self._validators = {
            tag: Validator({"$ref": f"#/$defs/{name}", "$defs": self._parts}) for tag, name in self._names.items()
        }

    def flaw(self, message: Json) -> str | None:
        """What the schema has against a message."""
        tag = message.get("t") if isinstance(message, dict) else None
        if not isinstance(tag, str) or tag not in self._validators:
            return f"there is no message {tag!r}"
        error = next(self._validators[tag].iter_errors(message), None)
        return error and f"{error.json_path}: {_short(error.message)}"

    def complete(self, message: Json) -> Json:
        """A message without unknown keys, and with the values of what was left out."""
        return self._complete(message, self._parts[self._names[message["t"]]])

    def _complete(self, value: Json, part: Json) -> Json:
        if "$ref" in part:
            return self._complete(value, self._parts[part["$ref"].rpartition("/")[2]])
        if isinstance(value, list):
            items = part.get("items")
            return [self._complete(item, items) for item in value] if items else value
        if "properties" not in part or not isinstance(value, dict):
            return value
        names = part["properties"]
        known = {name: self._complete(item, names[name]) for name, item in value.items() if name in names}
        return {name: inner["default"] for name, inner in names.items() if "default" in inner} | known


def same(one: Json, other: Json) -> bool:
    """Equality of JSON where 1 and 1.0 are the same number and True is none."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(item, other[key]) for key, item in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


# What is checked


@dataclass
class Report:
    """What was found: contradictions inside the vectors, and differences of the implementation."""

    contradictions: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    num_checked: int = 0

    def contradict(self, name: str, what: str) -> None:
        self.contradictions.append(f"{name}: {what}")

    def compare(self, name: str, ask: Ask, question: Json, expected: Json) -> Json | None:
        """Ask, and compare those fields of the answer that are expected; it must not hold messages or an error besides.

        Returns:
            The answer; None when it differs.
        """
        self.num_checked += 1
        answer = ask(question)
        seen = {key: answer[key] for key in {*expected, "messages", "error"} if key in answer}
        if same(seen, expected):
            return answer
        lines = [name, f"  sent     {_short(question)}", f"  seen     {_short(answer)}"]
        self.differences.append("\n".join([*lines, f"  expected {_short(expected)}"]))
        return None


def _body(frame: bytes) -> bytes:
    if int.from_bytes(frame[:4], "big") != len(frame) - 4:
        raise Malformed(f"the frame says {frame[:4].hex()} and has {len(frame) - 4} bytes")
    return frame[4:]


def check_message(vector: Vector, schema: Schema, report: Report, ask: Ask) -> None:
    """A frame that must be read, and a message that must be written."""
    name, frame = vector["name"], expand(vector["frame"])
    try:
        value = Reader(_body(frame)).whole()
    except Malformed as error:
        report.contradict(name, str(error))
        return
    if vector.get("shortest", True) and write(value) != frame[4:]:
        report.contradict(name, "the frame is not in its shortest form")
    plain = to_json(value)
    message = schema.complete(plain)
    flaw = schema.flaw(plain)
    if flaw is not None:
        report.contradict(name, f"the schema refuses it: {flaw}")
    if not same(vector.get("message", message), message):
        report.contradict(name, f"the frame holds {_short(message)}, the vector says {_short(vector['message'])}")
    report.compare(name, ask, {"decode": frame.hex()}, {"messages": [message]})
    answer = report.compare(f"{name}, written", ask, {"encode": message}, {})
    if answer is None:
        return
    try:
        written = to_json(Reader(_body(bytes.fromhex(answer["frame"]))).whole())
        if not same(schema.complete(written), message):
            raise Malformed(f"it says {_short(written)}")
    except (KeyError, TypeError, ValueError) as error:
        report.differences.append(
            f"{name}, written\n  sent     {_short(message)}\n  seen     {_short(answer)}\n  expected a frame: {error!r}"
        )


def check_refused(vector: Vector, schema: Schema, report: Report, ask: Ask) -> None:
    """A frame that must not be read."""
    name, frame = vector["name"], expand(vector["frame"])
    if vector.get("schema_tells", True):
        try:
            flaw = schema.flaw(_finite(to_json(Reader(_body(frame)).whole())))
        except Malformed as error:
            flaw = str(error)
        if flaw is None:
            report.contradict(name, "the schema allows it")
    report.compare(f"{name} ({vector['why']})", ask, {"decode": frame.hex()}, {"error": vector["error"]})


def _finite(value: Json) -> Json:
    """Infinity as a number that JSON has."""
    match value:
        case float() if math.isinf(value):
            return sys.float_info.max
        case list():
            return [_finite(item) for item in value]
        case dict():
            return {key: _finite(item) for key, item in value.items()}
    return value


def check_stream(vector: Vector, schema: Schema, report: Report, ask: Ask) -> None:
    """Bytes of a connection."""
    expected = {key: vector[key] for key in ("messages", "error") if key in vector}
    for message in vector.get("messages", []):
        if schema.flaw(message) is not None:
            report.contradict(vector["name"], f"the schema refuses it: {schema.flaw(message)}")
    report.compare(vector["name"], ask, {"decode": expand(vector["stream"]).hex()}, expected)


def check_immediate(vector: Vector, schema: Schema, report: Report, ask: Ask) -> None:
    """slot << 18 | generation << 14 | rows - 1."""
    if "error" in vector:
        question = {"pack": vector["parts"]} if "parts" in vector else {"unpack": vector["immediate"]}
        report.compare(f"immediate {vector}", ask, question, {"error": vector["error"]})
        return
    slot, generation, num_rows = vector["parts"]
    if slot << 18 | generation << 14 | num_rows - 1 != vector["immediate"]:
        report.contradict(f"immediate {vector}", "it is packed otherwise")
    report.compare(f"pack {vector}", ask, {"pack": vector["parts"]}, {"immediate": vector["immediate"]})
    parts = {"slot": slot, "generation": generation, "rows": num_rows}
    report.compare(f"unpack {vector}", ask, {"unpack": vector["immediate"]}, parts)


def rows_held(group: Json) -> int:
    """Rows of one position that somebody holds, one by one."""

    def held(shard: Json) -> set[tuple[int, int]]:
        heads = range(shard["head_start"], shard["head_start"] + shard["num_heads"])
        return {(layer, head) for layer in shard["layers"] for head in heads}

    sources = set().union(*map(held, group["sources"])) if "sources" in group else held(group)
    return len(held(group) & sources) * int(group["num_planes"])


def count_rows(num_tokens: int, spans: list[Json], groups: list[Json], context: list[int]) -> int | None:
    """Rows position by position; None: the request makes no sense. The one page of a recurrent group has position 0."""
    if num_tokens < 1 or any(span["group"] >= len(groups) for span in spans):
        return None
    if num_tokens == 1:
        return 0
    positions: dict[int, set[int]] = {index: set() for index in range(len(groups))}
    for span in spans:
        group, first = groups[span["group"]], span["first_token"]
        size, held, is_state = group["page_tokens"], positions[span["group"]], group.get("recurrent", False)
        if is_state and first:
            return None
        for index in range(len(span["pages"]) // 8):
            start = (first // size + index) * size
            of_page = {at for at in range(start, start + size) if first <= at < num_tokens - 1}
            if is_state:
                of_page = {0}
            if of_page & held:
                return None
            held |= of_page
    return sum(len(held) * rows_held(groups[at]) for at, held in positions.items()) + sum(context)


def check_rows(vector: Vector, schema: Schema, report: Report, ask: Ask) -> None:
    """The number of rows of a request."""
    if count_rows(**vector["facts"]) != vector.get("rows"):
        report.contradict(vector["name"], f"{count_rows(**vector['facts'])} rows are counted")
    expected = {key: vector[key] for key in ("rows", "error") if key in vector}
    report.compare(f"rows: {vector['name']}", ask, {"rows": vector["facts"]}, expected)


def check_version(vector: Vector, schema: Schema, report: Report, ask: Ask) -> None:
    """The highest version that both ranges hold."""
    ours, theirs = (set(range(low, min(high, 99) + 1)) for low, high in (vector["ours"], vector["theirs"]))
    if max(ours & theirs, default=None) != vector.get("version"):
        report.contradict(f"versions {vector}", f"common are {ours & theirs}")
    expected = {key: vector[key] for key in ("version", "error") if key in vector}
    report.compare(f"versions {vector}", ask, {"negotiate": [vector["ours"], vector["theirs"]]}, expected)


def check_dialogue(vector: Vector, schema: Schema, report: Report, ask: Ask) -> None:
    """What a dialogue sends must be messages; no implementation is asked."""
    for step in vector["steps"]:
        if "send" in step and schema.flaw(step["send"]) is not None:
            report.contradict(vector["name"], f"the schema refuses {_short(step['send'])}")


CHECKS = {
    "messages": check_message,
    "refused": check_refused,
    "streams": check_stream,
    "immediates": check_immediate,
    "rows": check_rows,
    "versions": check_version,
    "dialogues": check_dialogue,
}


def check_schema(schema: Schema, report: Report, ask: Ask) -> None:
    """The schema of the implementation is the committed one."""
    answer = ask({"schema": True}).get("schema")
    if same(answer, schema.schema):
        return
    theirs = answer.get("$defs") if isinstance(answer, dict) else None
    theirs, ours = theirs if isinstance(theirs, dict) else {}, schema.schema["$defs"]
    parts = [name for name in sorted(ours.keys() | theirs.keys()) if not same(ours.get(name), theirs.get(name))]
    names = ", ".join(name if name.isidentifier() else ascii(name) for name in parts)
    report.differences.append(f"schema: differs in {names or 'its frame'}")


def check(ask: Ask, *, with_schema: bool = True, folder: Path = HERE) -> Iterator[Report]:
    """Check everything; the report is given after each vector, so that a caller may end early."""
    schema, report = Schema(json.loads((folder / "schema.json").read_text())), Report()
    for name in FILES:
        for vector in json.loads((folder / "vectors" / f"{name}.json").read_text())["vectors"]:
            CHECKS[name](vector, schema, report, ask)
            yield report
    if with_schema:
        check_schema(schema, report, ask)
    yield report


def is_deeper(value: Json, depth: int) -> bool:
    """Whether values are nested more than so deep."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(value, dict | list) for value in level)


class Program:
    """An implementation in a process group of its own. Nothing that it does or leaves undone keeps us."""

    def __init__(self, command: list[str], timeout_s: float) -> None:
        self._command, self._timeout_s = shlex.join(command), timeout_s
        self._unread = bytearray()  # what came after the last answer
        try:
            self._process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise NoAnswer(f"{self._command} cannot be run: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)

    def ask(self, question: Json) -> Json:
        """Send one line, read one line."""
        try:
            answer = json.loads(self._exchange(json.dumps(question).encode() + b"\n").decode())
            if is_deeper(answer, MAX_DEPTH):
                raise ValueError(f"values are nested more than {MAX_DEPTH} deep")
        except (OSError, ValueError, RecursionError) as error:
            raise NoAnswer(f"{self._command} did not answer {_short(question)}: {error}") from error
        if not isinstance(answer, dict):
            raise NoAnswer(f"{self._command} answered {_short(answer)} to {_short(question)}, needed is an object")
        return answer

    def _exchange(self, line: bytes) -> bytes:
        """Send a line while it is read, and take the line that comes."""
        deadline_s = time.monotonic() + self._timeout_s
        unsent, seen = memoryview(line), 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            selector.register(self._stdout, selectors.EVENT_READ)
            while unsent or (end := self._unread.find(b"\n", seen)) < 0:
                seen = 0 if unsent else len(self._unread)
                if len(self._unread) > MAX_ANSWER_BYTES:
                    raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes came without an end")
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready or time.monotonic() > deadline_s:
                    raise TimeoutError(f"nothing whole came within {self._timeout_s:g} s")
                for key, _ in ready:
                    if key.fileobj is self._stdin:
                        unsent = unsent[os.write(self._stdin.fileno(), unsent) :]
                        if not unsent:
                            selector.unregister(self._stdin)
                    elif data := os.read(self._stdout.fileno(), READ_BYTES):
                        self._unread += data
                    else:
                        raise ValueError("its output ended")
        answer = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return answer

    def finish(self) -> None:
        """Ask nothing more, and let the program end."""
        self._stdin.close()
        deadline_s = time.monotonic() + END_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline_s - time.monotonic())) and time.monotonic() < deadline_s:
                if not os.read(self._stdout.fileno(), READ_BYTES):
                    return

    def kill(self) -> None:
        """End the program, if it still runs, and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: nobody is left but one that has ended
            os.killpg(self._process.pid, signal.SIGKILL)  # it was not waited for: the number is still its own
        self._process.wait()
        self._stdin.close()
        self._stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--implementation", metavar="COMMAND", help="program that answers (default: python -m kvmsgr_protocol.answer)"
    )
    parser.add_argument("--no-schema", action="store_true", help="do not ask the implementation for its JSON Schema")
    parser.add_argument("--first", action="store_true", help="end at the first difference")
    parser.add_argument(
        "--folder", type=Path, default=HERE, help="where schema.json and vectors/ lie (default: beside this program)"
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="seconds that an answer may take (default: 10)"
    )
    parser.add_argument("--show", type=int, default=20, metavar="N", help="show at most N differences (default: 20)")
    options = parser.parse_args()
    if not 0 < options.timeout <= MAX_TIMEOUT_S:
        parser.error(f"--timeout must be above 0 and at most {MAX_TIMEOUT_S:g}")
    default = [sys.executable, "-m", "kvmsgr_protocol.answer"]
    try:
        command = shlex.split(options.implementation) if options.implementation else default
        program = Program(command, options.timeout)
        try:
            for report in check(program.ask, with_schema=not options.no_schema, folder=options.folder):
                if options.first and (report.differences or report.contradictions):
                    break
            program.finish()
        finally:
            program.kill()
    except NoAnswer as error:
        print(error)
        return 3
    for title, found in (("contradictions", report.contradictions), ("differences", report.differences)):
        print(*found[: options.show], sep="\n", end="\n" if found else "")
        if len(found) > options.show:
            print(f"... and {len(found) - options.show} more {title}")
    counts = f"{len(report.contradictions)} contradictions, {len(report.differences)} differences"
    print(f"{report.num_checked} answers checked: {counts}")
    return 4 if report.contradictions else 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main())
