"""Engines that announce steps ahead of the one that runs: any order of what they may do, and what they do wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from random import Random
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvmsgr.errors import LocalProtocolError, StepFaultError, StepLimitError
from kvmsgr.fabric import records
from kvmsgr.fabric.inprocess import Air, use_air
from kvmsgr.runtime.node import Node
from kvmsgr.testing.loop import SimulatedLoop, simulate
from kvmsgr_protocol import Reason

from .ahead import LAYERS, PAGE_TOKENS, ROWS_A_LAYER, AheadEngine, Forward, Job, ahead
from .nodes import until, within

T = TypeVar("T")
NUM_STREAMS = 2
MOST_JOBS, MOST_AHEAD = 5, 3
HOUR_S = 3600.0
LATE_S = 0.3


def one_of(things: Sequence[T], data: st.DataObject) -> T:
    """By its place: the things themselves would be kept alive by hypothesis."""
    return things[data.draw(st.integers(0, len(things) - 1))]


class AsyncScheduling(RuleBasedStateMachine):
    """One engine, in simulated time. Time passes only where a rule says so."""

    @initialize(seed=st.integers(0, 1 << 16), context=st.booleans(), any_order=st.booleans())
    def open(self, seed: int, context: bool, any_order: bool) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(use_air(Air(seed, any_order=any_order)))
        self.runner = self.stack.enter_context(asyncio.Runner(loop_factory=SimulatedLoop))
        self.opened = ahead(
            "inprocess", num_streams=NUM_STREAMS, num_slots=MOST_AHEAD + 1, context=context, step_timeout_s=HOUR_S
        )
        self.engine = self.run(self.opened.__aenter__())
        for num_positions in (2 * PAGE_TOKENS + 1, 3 * PAGE_TOKENS):
            self.run(self.engine.fetch(num_positions))

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.runner.run(work)

    @property
    def with_room(self) -> list[int]:
        """Streams on which more may be announced."""
        return [stream for stream in range(NUM_STREAMS) if len(self.engine.announced[stream]) < MOST_AHEAD]

    @property
    def ready_to_go(self) -> list[int]:
        """Streams that run or could."""
        engine = self.engine
        return [stream for stream in range(NUM_STREAMS) if engine.running[stream] or engine.may_start(stream)]

    @property
    def at_rest(self) -> list[int]:
        """Streams whose latest forward has shown exactly what it should."""
        latest = [(stream, self.engine.latest[stream]) for stream in range(NUM_STREAMS)]
        return [stream for stream, at in latest if at and at.step.moves and at.num_done == at.num_signals]

    @property
    def over(self) -> list[Job]:
        return [job for job in self.engine.jobs if job.result.done() and self.engine.idle(job)]

    def some_parts(self, data: st.DataObject) -> list[tuple[Job, int]]:
        """Lengths of chunks of some requests; also of those that are over, where the engine has not noticed."""
        lengths = {job: data.draw(st.integers(0, job.left), label=str(job)) for job in self.engine.jobs}
        return [(job, length) for job, length in lengths.items() if length]

    def announce_on(self, stream: int, parts: list[tuple[Job, int]]) -> None:
        """The ring is short: it may have no slot, until a step is over and the poller has seen it."""
        before = [job.request.next_position for job, _ in parts]
        try:
            self.engine.announce(stream, parts)
        except StepLimitError:
            assert parts, "a step that moves nothing takes no slot"
            assert [job.request.next_position for job, _ in parts] == before

    @precondition(lambda self: len(self.engine.jobs) < MOST_JOBS)
    @rule(num_positions=st.integers(1, 4 * PAGE_TOKENS))
    def a_request_comes(self, num_positions: int) -> None:
        self.run(self.engine.fetch(num_positions))

    @precondition(lambda self: self.with_room)
    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        self.announce_on(one_of(self.with_room, data), self.some_parts(data))

    @precondition(lambda self: len(self.with_room) == NUM_STREAMS and self.engine.jobs)
    @rule(data=st.data())
    def announce_micro_batches(self, data: st.DataObject) -> None:
        parts = self.some_parts(data)
        for stream in range(NUM_STREAMS):
            self.announce_on(stream, parts[stream::NUM_STREAMS])

    @precondition(lambda self: self.ready_to_go)
    @rule(data=st.data(), num_bumps=st.integers(0, LAYERS + 1), look=st.booleans())
    def compute(self, data: st.DataObject, num_bumps: int, look: bool) -> None:
        stream = one_of(self.ready_to_go, data)
        if self.engine.running[stream] is None:
            self.engine.start(stream)
        for _ in range(num_bumps):
            if self.engine.running[stream] is not None:
                self.engine.bump(stream)
                if look:
                    self.run(asyncio.sleep(0.002))
                    self.engine.check()

    @precondition(lambda self: any(self.engine.announced))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        waiting = [forward for announced in self.engine.announced for forward in announced]
        forward = one_of(waiting, data)
        if self.engine.may_abandon(forward):
            self.engine.abandon(forward)
            return
        before = [job.request.next_position for job, _, _ in forward.parts]
        with pytest.raises(LocalProtocolError, match="abandon the later one first"):
            forward.step.abandon()
        assert [job.request.next_position for job, _, _ in forward.parts] == before

    @precondition(lambda self: self.at_rest)
    @rule(data=st.data())
    def abandon_what_has_run(self, data: st.DataObject) -> None:
        self.engine.latest_of(one_of(self.at_rest, data)).step.abandon()

    @precondition(lambda self: self.at_rest)
    @rule(data=st.data())
    def surplus(self, data: st.DataObject) -> None:
        self.run(self.engine.surplus(one_of(self.at_rest, data)))

    @precondition(lambda self: any(self.engine.running))
    @rule(data=st.data(), crash=st.booleans())
    def cut(self, data: st.DataObject, crash: bool) -> None:
        stream = one_of([stream for stream in range(NUM_STREAMS) if self.engine.running[stream]], data)
        if crash:
            self.engine.crash(stream)
        else:
            self.engine.forget_signals(stream)

    @precondition(lambda self: self.engine.jobs)
    @rule(data=st.data(), by_prefiller=st.booleans(), really=st.integers(0, 3))
    def cancel(self, data: st.DataObject, by_prefiller: bool, really: int) -> None:
        if really == 3:  # or no request would live for long
            self.engine.cancel(one_of(self.engine.jobs, data), by_prefiller=by_prefiller)

    @rule(milliseconds=st.sampled_from([0, 1, 3, 30]))
    def time_passes(self, milliseconds: int) -> None:
        self.run(asyncio.sleep(milliseconds / 1000))

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def reap(self, data: st.DataObject) -> None:
        self.run(self.engine.reap(one_of(self.over, data)))

    @invariant()
    def nothing_came_early(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        with self.stack:
            try:
                self.run(self.engine.finish())
            finally:
                self.run(self.opened.__aexit__(None, None, None))
                del self.engine, self.opened  # whoever keeps this machine keeps no layer counters


@pytest.mark.slow
def test_only_final_bytes_arrive_whatever_is_announced_abandoned_and_cancelled() -> None:
    run_state_machine_as_test(
        AsyncScheduling,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fabric", ["net", "shm"])
async def test_the_same_over_libfabric(fabric: str, seed: int) -> None:
    rng = Random(f"{fabric}/{seed}")
    async with ahead(fabric, num_streams=NUM_STREAMS) as engine:
        for _ in range(150):
            await do_something(engine, rng)
            engine.check()
        await engine.finish()


async def do_something(engine: AheadEngine, rng: Random) -> None:
    stream = rng.randrange(NUM_STREAMS)
    forward, at_rest = engine.running[stream], engine.latest[stream]
    match rng.randrange(12):
        case 0 | 1 if len(engine.jobs) < MOST_JOBS:
            await engine.fetch(rng.randint(1, 4 * PAGE_TOKENS))
        case 2 | 3 if len(engine.announced[stream]) < MOST_AHEAD:
            open_jobs = [job for job in engine.jobs if job.left]
            chosen = rng.sample(open_jobs, rng.randint(0, len(open_jobs)))
            engine.announce(stream, [(job, rng.randint(1, job.left)) for job in chosen])
        case 4 if engine.announced[stream] and engine.may_abandon(engine.announced[stream][-1]):
            engine.abandon(engine.announced[stream][-1])
        case 5 if forward and rng.random() < 0.2:
            engine.crash(stream)
        case 6 if forward and rng.random() < 0.2:
            engine.forget_signals(stream)
        case 7 if at_rest and at_rest.step.moves and at_rest.num_done == at_rest.num_signals and rng.random() < 0.1:
            await engine.surplus(stream)
        case 8 if engine.jobs and rng.random() < 0.2:
            engine.cancel(rng.choice(engine.jobs), by_prefiller=rng.random() < 0.5)
        case 9:
            for job in [job for job in engine.jobs if job.result.done() and engine.idle(job)]:
                await engine.reap(job)
        case _:
            if engine.may_start(stream):
                engine.start(stream)
            while engine.running[stream] and rng.random() < 0.8:
                engine.bump(stream)
                await asyncio.sleep(rng.choice([0, 0, 0.001]))


def announced_whole(engine: AheadEngine, *jobs: Job, stream: int = 0) -> Forward:
    return engine.announce(stream, [(job, job.left) for job in jobs])


def run_whole(engine: AheadEngine, stream: int = 0) -> None:
    engine.start(stream)
    while engine.running[stream]:
        engine.bump(stream)


@pytest.mark.parametrize("context", [False, True], ids=["", "context"])
@pytest.mark.parametrize("num_bumps", range(-1, 2), ids=["one short", "right", "one too many"])
def test_a_missing_and_a_surplus_bump_fail_exactly_their_step(num_bumps: int, context: bool) -> None:
    """Three steps of two requests each; the one in the middle errs."""

    async def scenario(air: Air) -> None:
        async with ahead("inprocess", context=context) as engine:
            jobs = [await engine.fetch(2 * PAGE_TOKENS) for _ in range(6)]
            steps = [engine.announce(0, [(job, PAGE_TOKENS) for job in jobs[n : n + 2]]) for n in (0, 2, 4)]
            num_signals = steps[1].num_signals
            run_whole(engine)
            engine.start(0)
            for _ in range(num_signals + min(num_bumps, 0)):
                engine.bump(0)
            if num_bumps < 0:
                engine.forget_signals(0)
                await asyncio.sleep(1)
                assert not any(job.request.ended for job in jobs)  # the last signal may still come
            elif num_bumps:
                await engine.surplus(0)
            run_whole(engine)
            await asyncio.sleep(0.01)
            failed = [job for job in jobs if job.request.ended]
            assert failed == (jobs[2:4] if num_bumps else [])
            shown = num_signals + num_bumps
            told = {
                -1: f"step 2 of layer counter 0 was over after {shown} of {num_signals} layer signals: signal "
                f"{num_signals} never came",
                1: f"step 2 of layer counter 0 showed {shown} layer signals, {num_signals} were announced",
            }
            for job in failed:
                with pytest.raises(StepFaultError) as caught:
                    await job.fetch
                assert told[num_bumps] in str(caught.value)
                outcome = await job.request.outcome()
                assert outcome.reason is Reason.step_fault
                assert told[num_bumps] in outcome.detail
            await engine.finish()

    simulate(scenario, 0)


def test_a_step_that_does_not_go_on_is_over_at_its_deadline() -> None:
    async def scenario(air: Air) -> None:
        loop = asyncio.get_running_loop()
        async with ahead("inprocess", num_streams=2, context=False, step_timeout_s=5.0) as engine:
            stuck, well = [await engine.fetch(PAGE_TOKENS) for _ in range(2)]
            began = loop.time()
            announced_whole(engine, stuck, stream=1)
            announced_whole(engine, well)
            engine.start(1)
            engine.bump(1)
            run_whole(engine)
            told = f"step 1 of layer counter 1 showed 1 of {LAYERS} layer signals when its time ran out"
            with pytest.raises(StepFaultError, match=told):
                await within(stuck.fetch)
            assert 5.0 <= loop.time() - began < 5.1
            assert (await well.fetch).rows == PAGE_TOKENS * ROWS_A_LAYER * LAYERS
            stuck.faults.append(told)
            engine.forget_signals(1)
            await engine.finish()

    simulate(scenario, 0)


def test_a_full_ring_arms_nothing() -> None:
    async def scenario(air: Air) -> None:
        async with ahead("inprocess", num_slots=4) as engine:
            jobs = [await engine.fetch(PAGE_TOKENS) for _ in range(5)]
            for job in jobs[:4]:
                announced_whole(engine, job)
            before = engine.node.fabric.poller.stats()
            with pytest.raises(StepLimitError, match="4 steps of layer counter 0 are outstanding"):
                announced_whole(engine, jobs[4])
            announced_whole(engine)  # one that moves nothing needs no slot
            await asyncio.sleep(0.1)
            after = engine.node.fabric.poller.stats()
            assert after["posted_rows"] == before["posted_rows"] == 0
            assert jobs[4].request.next_position == jobs[4].request.num_transfers == 0
            for _ in range(2):
                run_whole(engine)
            await asyncio.sleep(0.01)
            assert announced_whole(engine, jobs[4]).step.ticket == 5
            await engine.finish()

    simulate(scenario, 0)


@pytest.mark.parametrize("fabric", ["inprocess", "net"])
async def test_steps_that_are_abandoned_again_and_again_never_fill_the_ring(fabric: str) -> None:
    """Before them a step that is complete, and over only when another one starts: it keeps its slot, and no other."""
    async with ahead(fabric, num_slots=4, context=False) as engine:
        job, other = await engine.fetch(PAGE_TOKENS), await engine.fetch(PAGE_TOKENS)
        announced_whole(engine, job)
        run_whole(engine)
        await within(job.fetch)
        for _ in range(20):
            forward = announced_whole(engine, other)
            engine.abandon(forward)
            rounds = engine.prefiller.stats()["rounds"]
            await until(lambda rounds=rounds: engine.prefiller.stats()["rounds"] > rounds + 1, "two rounds")  # type: ignore[misc]  # a condition
        await engine.finish()


@pytest.mark.parametrize("fabric", ["net", "shm"])
@pytest.mark.parametrize("ahead_of_it", [True, False], ids=["announced before", "announced after"])
async def test_after_a_forward_is_given_up_nothing_it_left_unfinished_is_sent(fabric: str, ahead_of_it: bool) -> None:
    """A later step of the request runs on another stream before this one's event loop does, and would release a page
    of which the step that crashed was to compute the beginning."""
    async with ahead(fabric, num_streams=2, context=False) as engine:
        job = await engine.fetch(PAGE_TOKENS)
        engine.announce(0, [(job, PAGE_TOKENS // 2)])
        if ahead_of_it:
            announced_whole(engine, job, stream=1)
        engine.start(0)
        engine.bump(0)
        engine.crash(0)
        if not ahead_of_it:
            announced_whole(engine, job, stream=1)
        run_whole(engine, stream=1)
        rounds = engine.prefiller.stats()["rounds"]
        while engine.prefiller.stats()["rounds"] < rounds + 50:
            pass  # the poller goes on; the event loop does not
        assert engine.prefiller.stats()["posted_rows"] == 0
        engine.check()
        await engine.finish()


def late(node: Node, *values: int) -> None:
    """The event loop hears of a fault long after the poller has seen it."""
    node.loop.call_later(LATE_S, Node._step_failed, node, *values)


@pytest.mark.parametrize("how", ["the later step may go on", "the later step is over", "abandoned at last"])
@pytest.mark.parametrize("fabric", ["inprocess", "net"])
def test_a_page_that_a_dead_forward_has_begun_is_not_sent_by_a_later_step(
    fabric: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder would have every row before the event loop hears of it, some of which were never computed."""

    async def scenario(air: Air | None = None) -> None:
        async with ahead(fabric, context=False) as engine:
            dies, goes_on, last = [await engine.fetch(PAGE_TOKENS) for _ in range(3)]
            dead = engine.announce(0, [(dies, PAGE_TOKENS // 2)])
            announced_whole(engine, dies, goes_on)
            announced_whole(engine, last)
            engine.start(0)
            engine.bump(0)
            engine.die(0)
            run_whole(engine)
            told = "over"
            if how == "the later step is over":
                run_whole(engine)
            elif how == "abandoned at last":
                await asyncio.sleep(LATE_S / 2)
                dead.step.abandon()
                told = "abandoned"
                dies.faults.append(f"step 1 of layer counter 0 was {told}")
            with pytest.raises(StepFaultError, match=f"step 1 of layer counter 0 was {told} after 1 of {LAYERS}"):
                await within(dies.fetch)
            assert dies.fetch.rows_landed == 0
            await within(goes_on.fetch)
            engine.check()
            await engine.finish()

    monkeypatch.setitem(Node._handlers, records.STEP_FAULT, late)
    if fabric == "inprocess":
        simulate(scenario, 0)
    else:
        asyncio.run(scenario())


def test_the_poller_hears_what_must_not_go_before_it_lets_the_rest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(air: Air) -> None:
        async with ahead("inprocess", context=False) as engine:
            dies, goes_on = [await engine.fetch(PAGE_TOKENS) for _ in range(2)]
            poller, told = engine.node.fabric.poller, list[tuple[str, int, int]]()
            stop, resume_counter = poller.stop, poller.resume_counter
            monkeypatch.setattr(poller, "stop", lambda *to: (told.append(("stop", *to)), stop(*to)))
            monkeypatch.setattr(
                poller, "resume_counter", lambda *at: (told.append(("resume", *at)), resume_counter(*at))
            )
            engine.announce(0, [(dies, PAGE_TOKENS // 2)])
            announced_whole(engine, dies, goes_on)
            engine.start(0)
            engine.die(0)
            run_whole(engine)
            await within(goes_on.fetch)
            (link,) = dies.request.peer.open_links
            assert told[:2] == [("stop", link, dies.request.tag), ("resume", 0, 1)]
            await engine.finish()

    simulate(scenario, 0)
