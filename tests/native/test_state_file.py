"""The state file, from this process and from another."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmsgr._ext import native
from tests.native.loopback import GENERATION, NUM_LAYERS, PAGE_ROWS, SLOT, Pair

COUNTING, DONE, ENDED = (native.ATTEMPT_STATES.index(name) for name in ("counting", "done", "ended"))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[native.StateFile]:
    state = native.StateFile(tmp_path / "state", incarnation=0xABCDEF)
    yield state
    state.close()


def test_the_file_is_private_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = native.StateFile(str(path), incarnation=1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (state.path, state.pid, state.incarnation) == (str(path), os.getpid(), f"{1:032x}")
    with pytest.raises(FileExistsError, match="cannot create"):
        native.StateFile(str(path), incarnation=2)
    state.close()
    state.close()
    assert not path.exists()


def test_a_file_nobody_closed_goes_away_too(tmp_path: Path) -> None:
    native.StateFile(tmp_path / "state", incarnation=1)
    gc.collect()
    assert not (tmp_path / "state").exists()


def test_only_touched_pages_are_resident(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = native.StateFile(path, incarnation=1)
    state.open_attempt(1, 10, "one")
    state.link_slot(1 << 13, 5, 1)
    used = path.stat()
    assert used.st_size > 1 << 22
    assert used.st_blocks * 512 < 1 << 17
    state.close()


def test_attempts_are_listed_with_their_labels(state: native.StateFile) -> None:
    state.open_attempt(7, 100, "request-7")
    state.open_attempt(8, 200, "é" * 40)
    state.end_attempt(7)
    state.end_attempt(7)
    state.open_attempt(9, 0, "nothing to receive")
    assert state.attempts() == [
        (7, ENDED, 0, 100, "request-7"),
        (8, COUNTING, 0, 200, "é" * 32),
        (9, DONE, 0, 0, "nothing to receive"),
    ]
    assert state.expecting == 1
    assert (state.find("request-7"), state.find("é" * 40), state.find("request")) == (7, 8, None)


def test_an_entry_is_used_again_but_never_while_it_counts(state: native.StateFile) -> None:
    state.open_attempt(3, 10, "old")
    later = 3 + (1 << 14)
    with pytest.raises(ValueError, match="attempt 3 is still counting"):
        state.open_attempt(later, 10, "new")
    state.end_attempt(3)
    state.open_attempt(later, 10, "new")
    assert state.find("old") is None
    assert state.attempt_rows(later) == 0
    with pytest.raises(KeyError, match="attempt 3 is not in the table"):
        state.attempt_rows(3)
    with pytest.raises(KeyError, match="never opened"):
        state.end_attempt(3)


def test_the_newest_of_equal_labels_is_found(state: native.StateFile) -> None:
    for attempt in (5, 4):
        state.open_attempt(attempt, 1, "retry")
    assert state.find("retry") == 4


def test_slots_are_linked_and_counted(state: native.StateFile) -> None:
    state.open_attempt(1, 10, "")
    with pytest.raises(KeyError, match="never opened"):
        state.link_slot(0, 0, 2)
    for slot, generation in ((1 << 14, 0), (0, 16)):
        with pytest.raises(ValueError, match="want <"):
            state.link_slot(slot, generation, 1)
    state.link_slot(9, 2, 1)
    state.link_slot(9, 2, 1)
    state.link_slot(9, 3, 1)
    assert native.debug_counters()["slots"] == 2
    state.unlink_slot(9, 2)
    state.unlink_slot(9, 2)
    assert native.debug_counters()["slots"] == 1
    assert state.slot_rows(9, 3) == 0


LOOK = """
import sys
from kvmsgr._ext import native
from tests.native.loopback import GENERATION, NUM_LAYERS, PAGE_ROWS, SLOT, Pair
state = native.StateFile(sys.argv[1], writable=False)
print(state.pid, state.incarnation, state.attempts(), state.find("stuck"))
try:
    state.open_attempt(2, 1, "")
except RuntimeError as error:
    print(error)
state.close()
"""


def test_another_process_looks_into_it(state: native.StateFile) -> None:
    state.open_attempt(11, 64, "stuck")
    assert state.path
    command = [sys.executable, "-c", LOOK, state.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    seen = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30).stdout
    first, second = seen.splitlines()
    assert first == f"{os.getpid()} {0xABCDEF:032x} [(11, {COUNTING}, 0, 64, 'stuck')] 11"
    assert "only be looked into" in second
    assert Path(state.path).exists()


def test_other_files_are_not_looked_into(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for content in (b"", bytes(4096), b"short"):
        other.write_bytes(content)
        with pytest.raises(ValueError, match="is not a state file, or not ready yet"):
            native.StateFile(other, writable=False)
    with pytest.raises(ValueError, match="is not a state file"):
        native.StateFile(tmp_path, writable=False)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="is not a state file"):
        native.StateFile(tmp_path / "fifo", writable=False)
    with pytest.raises(FileNotFoundError, match="cannot open"):
        native.StateFile(tmp_path / "none", writable=False)
    with pytest.raises(ValueError, match="needs its path"):
        native.StateFile(None, writable=False)


def test_files_of_another_version_are_named(state: native.StateFile, tmp_path: Path) -> None:
    assert state.path
    older = tmp_path / "older"
    content = bytearray(Path(state.path).read_bytes())
    content[8] -= 1
    older.write_bytes(content)
    with pytest.raises(ValueError, match="of version 2, but of version 1: look with the kvmsgr that made it"):
        native.StateFile(older, writable=False)


def test_an_incarnation_is_a_number_or_its_digits(tmp_path: Path) -> None:
    for given in ("ab" * 16, 0xABABABABABABABABABABABABABABABAB):
        state = native.StateFile(None, incarnation=given)
        assert state.incarnation == "ab" * 16
        state.close()
    for wrong in (1 << 128, "1" * 33, "x"):
        with pytest.raises(ValueError, match=r"hex digits|invalid literal"):
            native.StateFile(tmp_path / "state", incarnation=wrong)


def test_info_and_pages_are_read_from_outside(state: native.StateFile) -> None:
    state.set_info(name="decode", address="tcp://10.0.0.1:4000", provider="net", software="é" * 40)
    state.set_pages(0, "full", 3, 64)
    state.set_pages(15, "sliding window of a long name", 0, 8)
    state.set_quarantined(5)
    with pytest.raises(ValueError, match="has room for 16"):
        state.set_pages(16, "", 0, 1)
    looker = native.StateFile(state.path, writable=False)
    info = looker.info()
    stat_fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert (info.pid, info.pid_started) == (os.getpid(), int(stat_fields[19]))  # field 22 of all
    assert (info.name, info.address, info.provider, info.software) == ("decode", "tcp://10.0.0.1:4000", "net", "é" * 16)
    assert info.incarnation == f"{0xABCDEF:032x}"
    assert info.libfabric == native.libfabric_version()
    assert 0 < info.started_ns < native.monotonic_ns()
    assert looker.pages() == [(0, "full", 3, 64), (15, "sliding window of a long", 0, 8)]
    assert looker.quarantined == 5
    assert looker.poller_seen_ns == 0
    for write in (
        lambda: looker.set_quarantined(1),
        lambda: looker.set_pages(0, "", 1, 1),
        lambda: looker.set_info(name="", address="", provider="", software=""),
        lambda: looker.await_slot(0, 0, 1),
        lambda: looker.link_beat(0, 0, 1),
        lambda: looker.close_leg(0),
    ):
        with pytest.raises(RuntimeError, match="only be looked into"):
            write()
    looker.close()


def open_leg(state: native.StateFile, number: int, role: str = "fetch") -> None:
    state.open_leg(
        number,
        role=role,
        state="waiting",
        request_id=f"request-{number}",
        peer="prefill-0",
        attempt=7,
        slot=9,
        generation=2,
        rows_expected=100,
        num_layers=32,
    )


def test_legs_are_listed_while_they_are_open(state: native.StateFile) -> None:
    state.open_attempt(7, 100, "")
    state.link_slot(9, 2, 7)
    open_leg(state, 40)
    open_leg(state, 4, "serve")
    looker = native.StateFile(state.path, writable=False)
    serving, fetching = looker.legs()
    assert fetching[:11] == (40, "fetch", "waiting", "request-40", "prefill-0", 7, 9, 2, 100, 32, 0)
    assert fetching.started_ns == fetching.since_ns <= native.monotonic_ns()
    assert fetching[13:] == ("", "", 0, 0, 0, 0, 0, 0, 0, 100, False)
    assert (serving.number, serving.role) == (4, "serve")
    assert (serving.slot_rows, serving.attempt_rows, serving.attempt_expected) == (None, None, None)

    state.update_leg(40, state="quarantined", reason="peer_lost" * 5, why="é" * 40, pages_held=12)
    fetching = looker.legs()[1]
    assert (fetching.state, fetching.reason, fetching.why) == ("quarantined", ("peer_lost" * 5)[:20], "é" * 40)
    assert fetching.pages_held == 12
    assert fetching.since_ns > fetching.started_ns
    state.close_leg(4)
    state.close_leg(4)
    assert [leg.number for leg in looker.legs()] == [40]
    with pytest.raises(KeyError, match="leg 4 is not open"):
        state.update_leg(4, state="")
    looker.close()


def test_an_entry_holds_one_open_leg(state: native.StateFile) -> None:
    open_leg(state, 5)
    with pytest.raises(ValueError, match="leg 5 is still open"):
        open_leg(state, 5 + native.NUM_LEGS)
    state.close_leg(5)
    open_leg(state, 5 + native.NUM_LEGS)
    assert [leg.number for leg in state.legs()] == [5 + native.NUM_LEGS]
    with pytest.raises(ValueError, match="want fetch or serve"):
        open_leg(state, 6, "watch")
    with pytest.raises(ValueError, match="below 2"):
        open_leg(state, 2**32 - 1)
    with pytest.raises(ValueError, match="want <"):
        state.open_leg(
            6,
            role="serve",
            state="",
            request_id="",
            peer="",
            attempt=0,
            slot=1 << 14,
            generation=0,
            rows_expected=0,
            num_layers=0,
        )


def test_looking_touches_no_page_that_is_not_in_use(state: native.StateFile) -> None:
    assert state.path
    open_leg(state, 3 * native.NUM_LEGS // 4, "serve")
    used = Path(state.path).stat().st_blocks
    looker = native.StateFile(state.path, writable=False)
    assert len(looker.legs()) == 1
    assert Path(state.path).stat().st_blocks == used
    looker.close()


def test_a_slot_is_awaited(state: native.StateFile) -> None:
    state.open_attempt(1, 10, "")
    state.link_slot(9, 2, 1)
    assert state.await_slot(9, 2, 10) == 0
    with pytest.raises(ValueError, match="want <"):
        state.await_slot(1 << 14, 0, 1)


def test_the_rows_of_an_awaited_slot_come_as_a_record(pair: Pair) -> None:
    pair.expect(2)
    state, rows = pair.target.state, 2 * PAGE_ROWS * NUM_LAYERS
    pair.begin([(0, 0)], ready=True)
    pair.source.wait(native.SENT)
    pair.wait_landed("landed_rows", rows // 2)
    assert state.await_slot(SLOT, GENERATION, rows) == rows // 2
    pair.begin([(1, 1)], ready=True)
    _, slot_index, landed, *_ = pair.target.wait(native.SLOT_REACHED)
    assert (slot_index, landed) == (SLOT << 4 | GENERATION, rows)
    pair.target.wait(native.REACHED, 1)  # one write did both
    assert state.await_slot(SLOT, GENERATION, rows) == rows
    assert pair.target.drain(native.SLOT_REACHED) == []


def test_heartbeats_are_no_strays(pair: Pair) -> None:
    pair.target.state.link_beat(SLOT, GENERATION, pair.target_link)
    pair.begin([(0, 0)], ready=True)
    pair.source.wait(native.SENT)
    limit_ns = native.monotonic_ns() + 10**10
    while pair.target.state.slot_rows(SLOT, GENERATION) < PAGE_ROWS * NUM_LAYERS:
        assert native.monotonic_ns() < limit_ns
    pair.target.state.unlink_slot(SLOT, GENERATION)
    pair.begin([(1, 1)], ready=True, tag=2)
    pair.target.wait(native.STRAY)  # the first of the second transfer: nothing of the first was one
    assert pair.target.poller.stats()["landed_writes"] <= NUM_LAYERS
    pair.num_dropped = NUM_LAYERS  # they are counted by their link, not as landed writes


def test_a_poller_counts_for_the_leg_its_tag_names(pair: Pair) -> None:
    pair.expect(2)
    source = pair.source.state
    open_leg(source, 1, "serve")
    tickets = [pair.begin([(0, 0)], tag=1), pair.begin([(1, 1)], tag=1 + native.NUM_LEGS)]
    pair.run_step(tickets[0], 3)
    limit_ns = native.monotonic_ns() + 10**10
    while (leg := source.legs()[0]).writes_posted < 3:
        assert native.monotonic_ns() < limit_ns
    assert (leg.rows_posted, leg.signals_seen, leg.entries_posted, leg.num_entries) == (3 * PAGE_ROWS, 3, 3, NUM_LAYERS)
    pair.source.counter.bump()
    pair.run_step(tickets[1])
    pair.target.wait(native.REACHED)
    leg = source.legs()[0]
    assert (leg.rows_posted, leg.writes_posted) == (NUM_LAYERS * PAGE_ROWS, NUM_LAYERS)
    assert (leg.signals_seen, leg.entries_posted) == (NUM_LAYERS, NUM_LAYERS)
    assert 0 < source.poller_seen_ns <= native.monotonic_ns()
