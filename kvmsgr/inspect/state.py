"""Reading the state files of messengers, alive, stopped or dead."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvmsgr.errors import StateFileError
from kvmsgr.fabric.leftovers import SHARED_MEMORY, state_folder
from kvmsgr.fabric.state_view import Leg, StateView, monotonic_ns

from .process import process_state
from .views import HostView, LegView, MessengerView, PagesView, Unreadable

NS = 1e-9


def landed_rows(path: str, request_id: str) -> int | None:
    """Rows of a fetch that have landed so far; None when no such request is alive there."""
    with StateView(path) as state:
        return state.landed_rows(request_id)


def snapshot(path: str | os.PathLike[str]) -> MessengerView:
    """What the messenger with this state file does now. It is neither asked nor waited for.

    Raises:
        StateFileError: It is not a state file that this kvmsgr can read.
        OSError: It cannot be opened.
    """
    with StateView(path) as state:
        info, legs, pages = state.info(), state.legs(), state.pages()
        poller_seen_ns, quarantined = state.poller_seen_ns, state.quarantined
        now_ns = monotonic_ns()  # after all that was read: no age is negative
    return MessengerView(
        path=_text(os.fspath(path)),
        name=info.name,
        incarnation=info.incarnation,
        pid=info.pid,
        process=process_state(os.fspath(path), info.pid, info.pid_started),
        age_s=(now_ns - info.started_ns) * NS,
        address=info.address,
        provider=info.provider,
        libfabric=".".join(map(str, info.libfabric)),
        software=info.software,
        poller_seen_s=(now_ns - poller_seen_ns) * NS if poller_seen_ns else None,
        pages=[PagesView(group=own.group, name=own.name, held=own.held, total=own.total) for own in pages],
        quarantined=quarantined,
        legs=[_leg(leg, now_ns) for leg in legs],
    )


def _leg(leg: Leg, now_ns: int) -> LegView:
    return LegView(
        request_id=leg.request_id,
        role=leg.role,
        state=leg.state,
        peer=leg.peer,
        leg=leg.number,
        attempt=leg.attempt,
        slot=leg.slot,
        generation=leg.generation,
        age_s=(now_ns - leg.started_ns) * NS,
        in_state_s=(now_ns - leg.since_ns) * NS,
        num_layers=leg.num_layers,
        layers_seen=min(leg.signals_seen, leg.num_layers),  # one more signal releases context
        layers_sent=leg.entries_posted * leg.num_layers // leg.num_entries if leg.num_entries else 0,
        entries_posted=leg.entries_posted,
        num_entries=leg.num_entries,
        rows_posted=leg.rows_posted,
        writes_posted=leg.writes_posted,
        rows_expected=leg.rows_expected,
        rows_landed=leg.slot_rows,
        attempt_rows_landed=leg.attempt_rows,
        attempt_rows_expected=leg.attempt_expected,
        pages_held=leg.pages_held,
        reason=leg.reason,
        why=leg.why,
        torn=leg.torn,
    )


def state_files(folders: Iterable[str | os.PathLike[str]] = (), pids: Iterable[int] = ()) -> list[Path]:
    """State files in `folders` (none: where messengers put them), of these processes (none: of all)."""
    names = [f"kvmsgr-{pid}-*.state" for pid in pids] or ["kvmsgr-*-*.state"]
    chosen = [Path(folder) for folder in folders] or [state_folder(), SHARED_MEMORY]
    found = {os.path.realpath(path) for folder in chosen for name in names for path in folder.glob(name)}
    return [Path(path) for path in sorted(found)]


def find(folders: Iterable[str | os.PathLike[str]] = (), pids: Iterable[int] = ()) -> list[MessengerView | Unreadable]:
    """Look at all messengers of this host; see `state_files`. One that closes meanwhile is left out."""
    found: list[MessengerView | Unreadable] = []
    for path in state_files(folders, pids):
        try:
            found.append(look(path))
        except FileNotFoundError:
            continue
    return found


def look(path: str | os.PathLike[str]) -> MessengerView | Unreadable:
    """As `snapshot`, but a file that cannot be read is a value too.

    Raises:
        FileNotFoundError: There is no such file.
    """
    try:
        return snapshot(path)
    except FileNotFoundError:
        raise
    except (StateFileError, OSError) as error:
        return unreadable(path, str(error))


def unreadable(path: str | os.PathLike[str], error: str) -> Unreadable:
    """A state file that could not be read, and why."""
    return Unreadable(path=_text(os.fspath(path)), error=_text(error))


def _text(text: str) -> str:
    """With escapes for the bytes of a file name that are no UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def host_view(found: Iterable[MessengerView | Unreadable]) -> HostView:
    """Both kinds apart, as `kvmsgr-cli inspect --json` prints them."""
    seen = list(found)
    return HostView(
        version=1,
        messengers=[one for one in seen if isinstance(one, MessengerView)],
        unreadable=[one for one in seen if isinstance(one, Unreadable)],
    )
