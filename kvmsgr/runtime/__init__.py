"""Drivers: they turn what happens outside into events of `kvmsgr.core`, and effects into I/O.

Everything here runs on one event loop, but for `steps.begin_step`, which any thread may call.
"""
