"""`python -m kvmsgr.cli` is `kvmsgr-cli`."""

from . import main

main(prog_name="kvmsgr-cli")
