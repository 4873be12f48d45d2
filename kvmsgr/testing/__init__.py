"""For people who embed kvmsgr or write a fabric for it: fakes with faults, and the conformance suite of a fabric.

`conformance` needs pytest, which kvmsgr itself does not.
"""
