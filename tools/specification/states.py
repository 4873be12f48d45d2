"""Diagrams of the state machines, from their tables."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from types import ModuleType

import kvmsgr.core
from kvmsgr.core.machine import Go, Machine

Edge = tuple[StrEnum, str, Go]


def machines() -> list[type[Machine]]:
    """Every machine of the core, in the order of its modules."""
    modules = [
        importlib.import_module(f"kvmsgr.core.{found.name}") for found in pkgutil.iter_modules(kvmsgr.core.__path__)
    ]
    kinds = [kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)]
    return [kind for kind in dict.fromkeys(kinds) if issubclass(kind, Machine) and kind is not Machine]


def effects(row: Go) -> tuple[str, ...]:
    """Names of the effects of an entry, which its makers return."""
    return tuple(make.__annotations__["return"] for make in row.effects)


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()))[0]


def _state_comments(states: type[StrEnum]) -> dict[str, str]:
    """State to the comment beside it."""
    found = re.findall(r'^    (\w+) = "\w+"(?:  # (.*))?$', inspect.getsource(states), re.MULTILINE)
    return dict(found)


def _diagram(states: Iterable[StrEnum], edges: list[Edge]) -> Iterator[str]:
    """One arrow for all events that lead from one state to another with the same effects."""
    arrows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for state, event, row in edges:
        if row.to != state or row.effects:
            arrows.setdefault((state, row.to, effects(row)), []).append(event)
    targets = {to for state, to, _ in arrows if to != state}
    sources = {state for state, to, _ in arrows if to != state}
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield from (f"    [*] --> {state}" for state in states if state not in targets)
    for (source, to, does), events in arrows.items():
        yield f"    {source} --> {to}: {', '.join(events)}" + (f" / {', '.join(does)}" if does else "")
    yield from (f"    {state} --> [*]" for state in states if state not in sources)
    yield "```"


def _words(title: str, names: Iterable[str], module: ModuleType) -> Iterator[str]:
    yield f"| {title} | meaning |"
    yield "|---|---|"
    for name in dict.fromkeys(names):
        text = vars(module)[name].__doc__
        yield f"| {name} | {_first_sentence('' if text.startswith(f'{name}(') else text)} |"
    yield ""


def _machine(kind: type[Machine]) -> Iterator[str]:
    module = inspect.getmodule(kind)
    assert module is not None
    edges: list[Edge] = [(state, event.__name__, row) for (state, event), row in kind.table.items()]
    states = list(type(edges[0][0]))
    comments = _state_comments(type(edges[0][0]))
    yield f"## {kind.__name__}"
    yield ""
    yield " ".join((module.__doc__ or "").split())
    yield ""
    yield from _diagram(states, edges)
    yield ""
    yield "| state | meaning | nothing changes on |"
    yield "|---|---|---|"
    for state in states:
        idle = [event for at, event, row in edges if at == state and row.to == state and not row.effects]
        yield f"| {state} | {comments[state.name]} | {', '.join(idle)} |"
    yield ""
    yield from _words("event", (event for _, event, _ in edges), module)
    yield from _words("effect", (name for _, _, row in edges for name in effects(row)), module)


def render() -> str:
    """Return the whole document."""
    lines = [
        "# State machines",
        "",
        "Made from the tables in `kvmsgr/core` by `python -m tools.specification`; do not edit. An arrow reads",
        "*events / effects*: any of the events leads there, and the effects are carried out in this order. An event",
        "that a state does not name is an error: of the peer, whose connection ends, or of the engine, which gets an",
        "exception.",
        "",
    ]
    for kind in machines():
        lines += _machine(kind)
    return "\n".join(lines)
