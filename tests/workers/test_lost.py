"""Workers and leads that die, in each phase of their life."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmsgr.device.process import how_it_ended
from kvmsgr.errors import WorkerLostError
from kvmsgr.workers import WorkerGroup

from .processes import Child, ChildError, address_in, children, joined, loss, within
from .test_group import kv_of

End = Callable[[Child], None]
ENDS: dict[str, tuple[End, str]] = {
    "killed": (lambda child: child.kill(signal.SIGKILL), "its process was killed by SIGKILL"),
    "segmentation fault": (lambda child: child.kill(signal.SIGSEGV), "its process was killed by SIGSEGV"),
    "real-time signal": (
        lambda child: os.kill(child.pid, signal.SIGRTMIN + 3),
        f"its process was killed by signal {signal.SIGRTMIN + 3}",
    ),
    "exits": (lambda child: child.say("os._exit(0)"), "its process has exited with status 0"),
    "fails": (lambda child: child.say("os._exit(3)"), "its process has exited with status 3"),
    "closes": (lambda child: child.say("link.close()"), "it has closed its link, and its process runs on"),
    "publishes twice": (
        lambda child: child.say("link._published = False; publish(link)"),
        "it was turned away: it published memory a second time",
    ),
    "babbles": (lambda child: child.say("link._link.send(b'x')"), "it was turned away: a packet of 1 bytes holds no"),
}

PHASES = {
    "joined": "link = WorkerLink.join({address}, {rank})",
    "published": "allocate(); link = WorkerLink.join({address}, {rank}); publish(link)",
}

FORK = """
child = os.fork()
if child == 0:
    hang_up = select.poll()
    hang_up.register(0, 0)
    hang_up.poll()
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
async def test_a_worker_that_ends_is_named_and_its_memory_stays(tmp_path: Path, end: str) -> None:
    act, how = ENDS[end]
    async with joined(tmp_path, 2) as (group, workers):
        await workers[1]("kv[:] = 9")
        act(workers[1])
        lost = await loss(group)
        assert (lost.rank, lost.pid) == (1, workers[1].pid)
        assert lost.how.startswith(how)
        assert f"the worker of rank 1 (pid {lost.pid}) is lost: {how}" in str(lost)
        kv = kv_of(group.ranks[1])
        assert (kv == 9).all()
        kv[:] = 1  # what still lands there harms nobody
        assert await loss(group) is lost  # whoever asks later hears of it too
        assert group.losses == [lost]
        assert await workers[0]("link.lead_alive") is True


@pytest.mark.slow
async def test_death_is_noticed_at_once(tmp_path: Path) -> None:
    delays_s = []
    async with joined(tmp_path, 4) as (group, workers):
        for number, worker in enumerate(workers):
            noticed = asyncio.Event()
            group.on_lost(lambda error, of=number, noticed=noticed: noticed.set() if error.rank == of else None)
            killed_s = time.monotonic()
            worker.kill(signal.SIGKILL)
            await within(noticed.wait())
            delays_s.append(time.monotonic() - killed_s)
        assert [error.rank for error in group.losses] == [0, 1, 2, 3]
    assert min(delays_s) < 0.1  # milliseconds, but for what else the machine does


@pytest.mark.slow
async def test_a_child_that_holds_the_socket_open_does_not_hide_the_death(tmp_path: Path) -> None:
    """As with data loaders that are forked."""
    async with joined(tmp_path, 1) as (group, (worker,)):
        await worker(FORK)
        child = await worker("child")
        worker.kill(signal.SIGKILL)
        try:
            assert (await loss(group)).how == "its process was killed by SIGKILL"
        finally:
            os.kill(child, signal.SIGKILL)
        assert worker.exit_status() == -signal.SIGKILL  # its parent is still told


@pytest.mark.slow
async def test_nor_does_it_hide_the_death_of_a_lead(tmp_path: Path) -> None:
    listen = f"""
import asyncio, structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
from kvmsgr.workers import WorkerGroup
loop = asyncio.new_event_loop()
group = loop.run_until_complete(WorkerGroup.listen({address_in(tmp_path)!r}, 1))
"""
    async with children(2) as (lead, worker):
        lead.say(listen)
        await worker(PHASES["published"].format(address=repr(address_in(tmp_path)), rank=0))
        await lead.answer()
        await lead(FORK)
        child = await lead("child")
        worker.say("link.wait_for_lead_end()")
        lead.kill(signal.SIGKILL)
        try:
            assert await worker.answer() is True
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
async def test_a_process_that_cannot_be_seen_is_missed_by_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another PID namespace."""
    monkeypatch.setattr("kvmsgr.runtime.worker_process.open_process", lambda pid: None)
    async with joined(tmp_path, 1) as (group, (worker,)):
        worker.kill(signal.SIGKILL)
        assert (await loss(group)).how == "it has closed its link; its process cannot be seen from here"


@pytest.mark.slow
async def test_a_worker_that_is_stopped_is_not_lost(tmp_path: Path) -> None:
    async with joined(tmp_path, 2) as (group, (stopped, other)):
        stopped.kill(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        other.kill(signal.SIGKILL)
        assert (await loss(group)).rank == 1  # whatever there was to notice has been
        assert [error.rank for error in group.losses] == [1]
        stopped.kill(signal.SIGCONT)
        assert await stopped("link.lead_alive") is True


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("end", ["killed", "exits", "closes"])
async def test_a_worker_that_ends_before_all_have_joined_ends_the_wait(tmp_path: Path, phase: str, end: str) -> None:
    act, how = ENDS[end]
    async with children(1) as (worker,):
        listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 2))
        await worker(PHASES[phase].format(address=repr(address_in(tmp_path)), rank=1))
        act(worker)
        with pytest.raises(WorkerLostError, match=how) as raised:
            await within(listening)
        assert (raised.value.rank, raised.value.pid) == (1, worker.pid)


@pytest.mark.slow
async def test_one_that_dies_before_it_joined_makes_room_for_another(tmp_path: Path) -> None:
    async with children(2) as (first, second):
        listening = asyncio.ensure_future(WorkerGroup.listen(address_in(tmp_path), 1))
        path = str(tmp_path / "workers")
        await first("from kvmsgr.device.worker_messages import open_socket")
        await second("allocate()")
        second.say(f"link = WorkerLink.join({address_in(tmp_path)!r}, 0)")
        await second.answer()
        await first(f"s = open_socket(); s.connect({path!r})")
        first.kill(signal.SIGKILL)
        await second("publish(link)")
        (await within(listening)).close()


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_a_worker_learns_of_its_leads_death(tmp_path: Path, phase: str) -> None:
    num_ranks = 3  # more than come: it goes on waiting
    lead_code = f"""
import asyncio
from kvmsgr.workers import WorkerGroup
asyncio.run(WorkerGroup.listen({address_in(tmp_path)!r}, {num_ranks}))
"""
    async with children(2) as (lead, worker):
        lead.say(lead_code)
        await worker(PHASES[phase].format(address=repr(address_in(tmp_path)), rank=1))
        assert await worker("link.lead_alive") is True
        assert await worker("link.wait_for_lead_end(0.01)") is False
        worker.say("link.wait_for_lead_end()")
        lead.kill(signal.SIGKILL)
        assert await worker.answer() is True
        assert await worker("link.lead_alive") is False
        with pytest.raises(ChildError, match=r"LeadLostError: the lead at unix:.* has ended"):
            await worker("link.counter()")
        if phase == "joined":
            await worker("allocate()")
            with pytest.raises(ChildError, match=r"LeadLostError: the lead at unix:.* has ended"):
                await worker("publish(link)")
        await worker("link.close()")
        for use in ("link.counter()", "link.wait_for_lead_end()"):
            with pytest.raises(ChildError, match="LocalProtocolError: the link is closed"):
                await worker(use)
        assert await worker("link.lead_alive") is False


@pytest.mark.slow
async def test_how_a_strangers_process_ended_is_not_known(tmp_path: Path) -> None:
    async with joined(tmp_path, 1) as (group, (worker,)):
        await worker("import subprocess; child = subprocess.Popen(['true'])")
        stranger = os.pidfd_open(await worker("child.pid"))
        try:
            await worker("child.wait()")
            assert "how is not known" in how_it_ended(stranger)
        finally:
            os.close(stranger)
        assert group.losses == []
