"""kvmsgr-cli: looking into running messengers from a terminal."""

from __future__ import annotations

import click

from .inspect import inspect


@click.group()
@click.version_option(package_name="kvmsgr")
def main() -> None:
    """Tools around running kvmsgr messengers of this host."""


main.add_command(inspect)
