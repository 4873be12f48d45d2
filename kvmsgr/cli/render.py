"""Messengers and their legs as text for people."""

from __future__ import annotations

from rich.text import Text

from kvmsgr.inspect import HostView, LegView, MessengerView

LATE_POLLER_S = 1.0  # a polling thread looks at the clock many times a second
ALIVE = ("running", "sleeping", "waiting")


def render(view: HostView) -> Text:
    """A head for each messenger, and a few lines for each of its legs."""
    parts = [part for one in view.messengers for part in (_head(one), *map(_leg, one.legs))]
    parts += [Text(f"{printable(one.path)}: {printable(one.error)}", style="red") for one in view.unreadable]
    return Text("\n").join(parts)


def _head(one: MessengerView) -> Text:
    text = Text()
    text.append(printable(one.name) or "(no name)", style="bold")
    text.append(f"  pid {one.pid} ")
    text.append(one.process, style="green" if one.process in ALIVE else "bold red")
    text.append(f", open for {duration(one.age_s)}, poller ")
    late = one.poller_seen_s is not None and one.poller_seen_s > LATE_POLLER_S
    seen = "not started" if one.poller_seen_s is None else f"seen {duration(one.poller_seen_s)} ago"
    text.append(seen, style="bold red" if late else "")
    where = [one.address, f"{one.provider} (libfabric {one.libfabric})" if one.provider else "", one.software]
    if any(where):
        text.append("\n  " + ", ".join(printable(part) for part in where if part))
    pages = [f"{printable(own.name) or own.group} {own.held} of {own.total}" for own in one.pages]
    text.append(f"\n  destination pages held, on all ranks: {', '.join(pages) or '-'}; quarantined: ")
    text.append(str(one.quarantined), style="bold red" if one.quarantined else "")
    text.append(f"\n  {printable(one.path)}, incarnation {printable(one.incarnation)}", style="dim")
    if not one.legs:
        text.append("\n  no requests alive", style="dim")
    return text


def _leg(leg: LegView) -> Text:
    text = Text("  ")
    text.append(printable(leg.request_id), style="bold")
    serves = leg.role == "serve"
    text.append(f"  {leg.role} {'to' if serves else 'from'} {printable(leg.peer)}: ")
    text.append(printable(leg.state), style="bold red" if leg.reason or leg.why else "bold")
    text.append(f" for {duration(leg.in_state_s)}, alive for {duration(leg.age_s)}")
    if leg.torn:
        text.append(" (half written: parts may be older)", style="bold red")
    moved = (
        f"layers seen {leg.layers_seen}, sent {leg.layers_sent} of {leg.num_layers}; "
        f"rows sent {leg.rows_posted} of {leg.rows_expected}"
        if serves
        else f"rows landed {leg.rows_landed} of {leg.rows_expected}{_of_all(leg)}"
    )
    text.append(f"\n    {moved}; {'source' if serves else 'destination'} pages held {leg.pages_held}")
    text.append(f"; attempt {leg.attempt}, slot {leg.slot}.{leg.generation}, leg {leg.leg}", style="dim")
    because = ": ".join(printable(part) for part in (leg.reason, leg.why) if part)
    if because:
        text.append(f"\n    {because}", style="red")
    return text


def _of_all(leg: LegView) -> str:
    """The whole request, where several peers send it."""
    if leg.attempt_rows_landed is None or leg.attempt_rows_expected in (None, leg.rows_expected):
        return ""
    return f" ({leg.attempt_rows_landed} of {leg.attempt_rows_expected} from all its peers)"


def duration(seconds: float) -> str:
    """Short, for people: "250 ms", "3.2 s", "5 min 7 s", "3 h 4 min"."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // 60} h {minutes % 60} min"


def printable(text: str) -> str:
    """What an engine or a peer named must not steer the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
