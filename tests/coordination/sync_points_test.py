"""All ranks act at the same step, whichever rank requests it at whatever time, and no rank waits forever."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.coordination.members import members
from tests.waiting import DEADLINE, wait_for
from tfdist.coordination import Group, LocalGroup
from tfdist.coordination.sync_points import SyncPoints
from tfdist.errors import PeerLostError

Acts = list[tuple[int, list[str]]]
Between = Callable[[int, SyncPoints], object]

pytestmark = [pytest.mark.processes, pytest.mark.waits, pytest.mark.usefixtures("no_thread_is_left")]


class Job:
    """Ranks as threads, in a group over TCP, that synchronize at a barrier in each call of the loop and between some calls."""

    def __init__(self, groups: Sequence[Group]):
        self.size, self.groups = len(groups), groups
        self.collective = threading.Barrier(self.size)

    def all(self, call: Callable[[int], Acts]) -> list[Acts]:
        with ThreadPoolExecutor(max_workers=self.size) as pool:
            return [one.result(DEADLINE) for one in [pool.submit(call, rank) for rank in range(self.size)]]

    def meet(self) -> None:
        self.collective.wait(DEADLINE)


@contextlib.contextmanager
def started(size: int) -> Iterator[Job]:
    with members(size) as groups:
        job = Job(groups)
        try:
            yield job
        finally:
            job.collective.abort()


def run(sync_points: SyncPoints, ends: Sequence[int], call: Between, between: Between) -> Acts:
    """Runs one rank; returns the steps at which it acted, with the topics."""
    acted = []
    with sync_points:
        for end in ends:
            sync_points.begin(end)
            call(end, sync_points)
            if due := sync_points.end_call(end):
                acted.append((end, sorted(due)))
            between(end, sync_points)
    return acted


def cut(dice: random.Random, steps: int) -> list[int]:
    ends = [0]
    while ends[-1] < steps:
        ends.append(min(steps, ends[-1] + dice.randint(1, 7)))
    return ends[1:]


@pytest.mark.parametrize("block", range(10))
def test_all_ranks_act_at_the_same_steps(block: int) -> None:
    """Random requests from random places and other threads, on ranks of random speed, with and without collectives."""
    for seed in range(10 * block, 10 * block + 10):
        dice = random.Random(seed)
        size, slack = dice.randint(2, 5), dice.choice((0.0, 0.001, 0.004))
        ends = cut(dice, 60)
        collectives, evaluations = dice.random() < 0.8, dice.random() < 0.5
        with started(size) as job:
            stray = [dice.random() * 0.02 for _ in range(dice.randint(0, 3))]

            def rank(number: int, job: Job = job, seed: int = seed, slack: float = slack) -> Acts:
                own = random.Random(seed * 1000 + number)

                def step(end: int, sync_points: SyncPoints) -> None:
                    if own.random() < 0.1:
                        sync_points.request(own.choice(("checkpoint", "preempt")))
                    time.sleep(own.random() * slack)

                def call(end: int, sync_points: SyncPoints) -> None:
                    step(end, sync_points)
                    if collectives:  # noqa: B023 - called within the iteration
                        job.meet()
                    step(end, sync_points)

                def between(end: int, sync_points: SyncPoints) -> None:
                    step(end, sync_points)
                    if evaluations and end % 3 == 0:  # noqa: B023
                        job.meet()

                sync_points = SyncPoints(job.groups[number])
                timers = [threading.Timer(wait, sync_points.request, ("stray",)) for wait in stray]  # noqa: B023
                for timer in timers:
                    timer.start()
                acted = run(sync_points, ends, call, between)  # noqa: B023
                for timer in timers:
                    timer.join()
                return acted

            everyone = job.all(rank)
            assert everyone.count(everyone[0]) == size, (seed, everyone)


def wish_at(step: int, topic: str) -> Between:
    return lambda end, sync_points: sync_points.request(topic) if end == step else None


def nothing(end: int, sync_points: SyncPoints) -> None:
    """Does nothing, as most ranks do."""


def until_answered(sync_points: SyncPoints) -> None:
    """Waits until this rank has answered with the first step at which it can act."""
    wait_for(lambda: sync_points._pending_answer is not None or sync_points._agreed_steps)


@pytest.mark.parametrize("size", [1, 3])
def test_a_wish_is_granted_at_the_end_of_the_call_and_again_later(size: int) -> None:
    with started(size) if size > 1 else contextlib.nullcontext(Job([LocalGroup()])) as job:

        def rank(number: int) -> Acts:
            def call(end: int, sync_points: SyncPoints) -> None:
                if end in (10, 50):
                    if number == size - 1:
                        sync_points.request("checkpoint")
                    until_answered(sync_points)
                job.meet()

            return run(SyncPoints(job.groups[number]), range(5, 80, 5), call, nothing)

        assert job.all(rank) == [[(10, ["checkpoint"]), (50, ["checkpoint"])]] * size


def test_whoever_is_between_two_calls_does_not_keep_the_others_from_an_evaluation() -> None:
    """Rank 1 gets the request after `end_call(10)`, and needs rank 0, which is in the call, before its next call."""
    with started(2) as job:

        def rank(number: int) -> Acts:
            def call(end: int, sync_points: SyncPoints) -> None:
                job.meet()
                if number == 0 and end == 10:
                    assert passed.wait(DEADLINE)
                    sync_points.request("preempt")
                    until_answered(sync_points)

            def between(end: int, sync_points: SyncPoints) -> None:
                if number == 1 and end == 10:
                    passed.set()
                    until_answered(sync_points)
                job.meet()

            return run(SyncPoints(job.groups[number]), [10, 20, 30], call, between)

        passed = threading.Event()
        assert job.all(rank) == [[(20, ["preempt"])]] * 2


def test_a_wish_behind_the_last_call_has_no_effect_and_holds_nobody() -> None:
    with started(2) as job:

        def rank(number: int) -> Acts:
            sync_points = SyncPoints(job.groups[number])
            slow = (lambda end, _: time.sleep(0.1)) if number else nothing
            acted = run(sync_points, [1, 2], slow, wish_at(2, "checkpoint") if not number else nothing)
            job.meet()
            return acted

        assert job.all(rank) == [[], []]


def test_a_wish_before_the_run_is_granted_in_it_and_the_next_run_begins_anew() -> None:
    with started(2) as job:
        job.groups[0].publish("sync_points", {"request": "preempt", "name": "sync_points/early"})

        def rank(number: int) -> Acts:
            def call(end: int, sync_points: SyncPoints) -> None:
                if end == 10:
                    until_answered(sync_points)

            def late(end: int, sync_points: SyncPoints) -> None:
                if end == 30 and number:
                    sync_points.request("lost")

            def again(end: int, sync_points: SyncPoints) -> None:
                if end == 10:
                    sync_points.request("again")
                    until_answered(sync_points)

            first = run(SyncPoints(job.groups[number]), [10, 20, 30], call, late)
            return first + run(SyncPoints(job.groups[number]), range(5, 50, 5), again, nothing)

        [acted, other] = job.all(rank)
        assert acted == other
        assert acted[0] == (10, ["preempt"]) and {(step, *due) for step, due in acted[1:]} <= {
            (10, "again"),
            (15, "again"),
        }
        assert acted[1:]


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_end_of_a_rank_ends_the_others_wait_and_is_a_failure_if_it_is_lost(is_lost: bool) -> None:
    with started(2) as job:
        sync_points = SyncPoints(job.groups[0])  # rank 1 has none, and never answers
        sync_points.begin(5)
        sync_points.request("checkpoint")
        until_answered(sync_points)
        threading.Timer(0.2, job.groups[1]._client._disconnect if is_lost else job.groups[1].leave).start()
        with pytest.raises(PeerLostError, match="rank 1 is lost") if is_lost else contextlib.nullcontext():
            assert sync_points.end_call(5) == frozenset()
