"""Another process of this host: who is at the other end of a socket, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
import struct

_CREDENTIALS = struct.Struct("iII")


def peer_of(link: socket.socket) -> tuple[int, int]:
    """Process id and user id of the process at the other end of a Unix socket; for one that connects, of the one that
    listens. The process id is 0 in another PID namespace."""
    pid, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def open_process(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None: it cannot be seen from here, or has ended."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def how_it_ended(process: int) -> str:
    """How a process ended whose descriptor can be read. Whoever waits for it still can."""
    try:
        end = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        end = None
    if end is None:
        return "its process has ended; how is not known, for it is no child of this one or was waited for already"
    if end.si_code == os.CLD_EXITED:
        return f"its process has exited with status {end.si_status}"
    return f"its process was killed by {_signal_name(end.si_status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
