"""The state machines: pure, no I/O, no clock.

Each machine is one table, `(state, event) -> next state and effects`. A driver in `kvmsgr.runtime` turns what
happens outside into events (past participles), feeds them, and carries out the effects (imperatives) that come back.
A missing entry is the error.
"""
