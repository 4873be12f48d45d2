"""kvmsgr-cli inspect, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from kvmsgr.cli import main
from kvmsgr.inspect.schema import shipped
from tests.inspect.messengers import add_fetch, child, messenger, open_leg, state_path, until


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def test_a_stopped_messenger_is_shown_with_its_legs(tmp_path: Path) -> None:
    with child(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        until(lambda: " stopped, open for" in run("--state-dir", tmp_path).stdout, "it is seen to be stopped")
        result = run("--state-dir", tmp_path)
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        assert re.search(rf"decode +pid {process.pid} stopped, open for [\d.]+ m?s, poller not started", result.stdout)
        assert "tcp://127.0.0.1:7000, net (libfabric 1." in result.stdout
        assert "destination pages held, on all ranks: kv 7 of 64, window 1 of 8; quarantined: 3" in result.stdout
        assert re.search(
            r"  fetched  fetch from prefill-0: moving for [\d.]+ m?s, alive for [\d.]+ m?s\n", result.stdout
        )
        moved = "rows landed 0 of 600 (0 of 640 from all its peers); destination pages held 4"
        assert f"    {moved}; attempt 70, slot 9.2, leg 5\n" in result.stdout
        by_pid, by_path = run("--state-dir", tmp_path, "--pid", process.pid), run(state_path(tmp_path, process.pid))
        assert "fetched" in by_pid.stdout
        assert "fetched" in by_path.stdout


def test_layers_and_quarantine_are_shown(tmp_path: Path) -> None:
    with messenger(tmp_path) as state:
        open_leg(state, 6, "serve", "served", peer="decode-1")
        state.update_leg(6, state="quarantined", reason="peer_lost", why="writes may be in the air", pages_held=2)
        result = run("--state-dir", tmp_path)
    assert "  served  serve to decode-1: quarantined for " in result.stdout
    assert "    layers seen 0, sent 0 of 32; rows sent 0 of 600; source pages held 2; " in result.stdout
    assert "\n    peer_lost: writes may be in the air\n" in result.stdout


def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    with messenger(tmp_path) as state:
        add_fetch(state, "[red]\x1b[2Jx\ny")
        result = run("--state-dir", tmp_path)
        document = json.loads(run("--state-dir", tmp_path, "--json").stdout)
    assert "[red]\N{REPLACEMENT CHARACTER}[2Jx\N{REPLACEMENT CHARACTER}y" in result.stdout
    assert document["messengers"][0]["legs"][0]["request_id"] == "[red]\x1b[2Jx\ny"


def test_file_names_do_not_steer_the_terminal_and_fit_into_json(tmp_path: Path) -> None:
    names = [b"kvmsgr-1-\x1b]0;x\x07.state", b"kvmsgr-1-a\nb.state", b"kvmsgr-1-\xff.state"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(bytes(5000))
    with messenger(tmp_path) as state:
        add_fetch(state)
        for arguments in (["--state-dir", tmp_path], sorted(tmp_path.iterdir())):
            result = run(*arguments)
            assert "fetched" in result.stdout
            assert len(result.stderr.splitlines()) == len(names)
            assert all(line.isprintable() for line in result.stderr.splitlines())
        document = json.loads(run("--state-dir", tmp_path, "--json").stdout)
    assert [Path(own["path"]).name for own in document["unreadable"]] == [
        "kvmsgr-1-\x1b]0;x\x07.state",
        "kvmsgr-1-a\nb.state",
        "kvmsgr-1-\\xff.state",
    ]


def test_a_messenger_in_a_folder_that_is_no_utf8_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    with messenger(folder):
        document = json.loads(run("--state-dir", folder, "--json").stdout)
        shown = run("--state-dir", folder).stdout
    assert document["messengers"][0]["path"].startswith(f"{tmp_path}/\\xff/kvmsgr-")
    assert "/\\xff/kvmsgr-" in shown


def test_json_fits_the_schema_it_prints(tmp_path: Path) -> None:
    schema = run("--schema")
    assert schema.stdout == shipped()
    (tmp_path / "kvmsgr-1-aaaaaaaa.state").write_bytes(bytes(5000))
    with messenger(tmp_path) as state:
        add_fetch(state)
        result = run("--state-dir", tmp_path, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    jsonschema.validate(document, json.loads(schema.stdout))
    assert [own["pid"] for own in document["messengers"]] == [os.getpid()]
    assert [Path(own["path"]).name for own in document["unreadable"]] == ["kvmsgr-1-aaaaaaaa.state"]


def test_nothing_to_show_is_said_and_no_error(tmp_path: Path) -> None:
    result = run("--state-dir", tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "kvmsgr-cli: no messengers here\n")
    result = run("--state-dir", tmp_path, "--json")
    assert json.loads(result.stdout) == {"version": 1, "messengers": [], "unreadable": []}
    assert result.exit_code == 0


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "kvmsgr-1-aaaaaaaa.state"
    bad.write_bytes(bytes(5000))
    with messenger(tmp_path) as state:
        add_fetch(state)
        result = run("--state-dir", tmp_path)
        assert result.exit_code == 0
        assert f"cannot read {bad}: " in result.stderr
        assert "fetched" in result.stdout
        result = run(bad, state.path)
        assert result.exit_code == 1  # it was asked for
        assert "fetched" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pid", "x"],
        ["--pid", "0"],
        ["--watch", "0"],
        ["--watch", "nan"],
        ["--watch", "inf"],
        ["--state-dir", "/nowhere"],
        ["/nowhere/kvmsgr-1-a.state"],
        ["--bogus"],
        ["/proc/self/stat", "--pid", "1"],
    ],
)
def test_wrong_usage_is_refused(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


@pytest.mark.parametrize("as_json", [True, False])
def test_watching_shows_what_changes_until_it_is_interrupted(tmp_path: Path, as_json: bool) -> None:
    command = [sys.executable, "-m", "kvmsgr.cli", "inspect", "--state-dir", str(tmp_path), "--watch", "0.01"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "FORCE_COLOR": "1", "COLUMNS": "200"}
    with messenger(tmp_path) as state:
        watching = subprocess.Popen(
            [*command, "--json"] if as_json else command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )
        try:
            assert watching.stdout is not None
            for line in watching.stdout:
                if '"legs":[]' in line or "no requests alive" in line:
                    break
            add_fetch(state)
            for line in watching.stdout:
                if "fetched" in line:
                    break
            else:
                raise AssertionError("the new leg was never shown")
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=20)
            assert watching.returncode == 0
        finally:
            watching.kill()
            watching.communicate()
