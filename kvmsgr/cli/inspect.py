"""`kvmsgr-cli inspect`: what the messengers of this host do now, from their state files alone."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import click
import msgspec
from rich.console import Console
from rich.live import Live

from kvmsgr.inspect import HostView, MessengerView, Unreadable, find, host_view, look, unreadable
from kvmsgr.inspect.schema import shipped

from .render import printable, render


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False), metavar="[STATE_FILE]...")
@click.option(
    "--state-dir",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="Folder with state files. Default: the user's runtime folder and /dev/shm.",
)
@click.option("--pid", "pids", multiple=True, type=click.IntRange(min=1), help="Only messengers of this process.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, a line each time.")
@click.option(
    "--watch",
    "interval_s",
    type=click.FloatRange(0, 86400, min_open=True),
    metavar="S",
    help="Look again every S seconds.",
)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of what --json prints.")
def inspect(
    paths: tuple[str, ...],
    folders: tuple[str, ...],
    pids: tuple[int, ...],
    as_json: bool,
    interval_s: float | None,
    schema: bool,
) -> None:
    """Show the messengers of this host and each of their live requests.

    Only state files are read: a messenger that is stuck, stopped or dead can be looked into, and none is disturbed.
    Without STATE_FILE, all messengers of this host are looked for. "sent" means posted to the fabric.
    """
    if paths and (folders or pids):
        raise click.UsageError("a STATE_FILE says it all: leave out --state-dir and --pid")
    if interval_s is not None and math.isnan(interval_s):
        raise click.BadParameter("nan is no number of seconds", param_hint="--watch")
    if schema:
        click.echo(shipped(), nl=False)
        return

    def see() -> HostView:
        return host_view([_look(path) for path in paths] if paths else find(folders, pids))

    if interval_s is None:
        view = see()
        _warn(view)
        _show(view, as_json)
        if paths and view.unreadable:
            sys.exit(1)
    else:
        try:
            _watch(see, interval_s, as_json)
        except KeyboardInterrupt:
            return


def _look(path: str) -> MessengerView | Unreadable:
    try:
        return look(path)
    except FileNotFoundError:
        return unreadable(path, "it was closed just now")


def _warn(view: HostView) -> None:
    for one in view.unreadable:
        click.echo(f"kvmsgr-cli: cannot read {printable(one.path)}: {printable(one.error)}", err=True)
    if not view.messengers:
        click.echo("kvmsgr-cli: no messengers here", err=True)


def _show(view: HostView, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(view), indent=2))
    elif view.messengers:
        Console().print(render(view), soft_wrap=True)


def _watch(see: Callable[[], HostView], interval_s: float, as_json: bool) -> None:
    if as_json:
        while True:
            click.echo(msgspec.json.encode(see()))
            time.sleep(interval_s)
    with Live(auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            live.update(render(see()), refresh=True)
            time.sleep(interval_s)
