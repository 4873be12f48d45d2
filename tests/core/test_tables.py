"""What holds for every table: each entry is reachable and makes its effects; a missing entry is the error."""

from __future__ import annotations

import pytest

from kvmsgr.core import attempt, leg, peer, rotation, serve
from kvmsgr.core.machine import Machine
from kvmsgr.errors import LocalProtocolError

from .machines import EXAMPLES, events_of, new_machines, states_of

KINDS = [leg.Leg, attempt.Attempt, serve.Serve, peer.Peer, rotation.Rotation]


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_is_reachable(kind: type[Machine]) -> None:
    todo = [new_machines()[kind].state]
    reached = set(todo)
    while todo:
        state = todo.pop()
        for event in events_of(kind, state):
            target = kind.table[state, event].to
            if target not in reached:
                reached.add(target)
                todo.append(target)
    assert reached == states_of(kind), f"never reached: {states_of(kind) - reached}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_moves_and_makes_its_effects(kind: type[Machine]) -> None:
    for (state, event), row in kind.table.items():
        machine = new_machines()[kind]
        machine.state = state
        effects = machine.feed(EXAMPLES[event])
        assert machine.state is row.to
        assert len(effects) == len(row.effects)


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_without_an_entry_is_refused_and_changes_nothing(kind: type[Machine]) -> None:
    for state in states_of(kind):
        for event in EXAMPLES.values():
            if (state, type(event)) in kind.table:
                continue
            machine = new_machines()[kind]
            machine.state = state
            with pytest.raises(LocalProtocolError) as raised:
                machine.feed(event)
            assert machine.state is state
            for part in (kind.__name__, type(event).__name__, str(state), machine.name):
                assert part in str(raised.value)
