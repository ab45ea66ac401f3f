"""How a launcher follows its orders, without processes, and what it does of an attempt that cannot begin or go on."""

import contextlib
import errno
import os
import pathlib
import signal
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tfdist.coordination import LocalGroup
from tfdist.errors import InputError
from tfdist.launcher import job_runner
from tfdist.launcher.attempt import _check_orders, _supervise
from tfdist.launcher.child import Task
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.orders import Order, OrderKind, Report
from tfdist.launcher.supervision import Host, Stop

pytestmark = [pytest.mark.processes, pytest.mark.waits]

LOST = Outcome(5, "launcher 2 is lost")


class Desk:
    """An order source with a list of orders: each one is current until its report; the last one ends the job."""

    def __init__(self, *orders: Order):
        self.orders, self.reports, self.ended = list(orders), [], []

    def order(self) -> Order:
        return self.orders.pop(0) if self.orders[0].kind == OrderKind.WAIT else self.orders[0]

    def report(self, report: Report) -> None:
        self.reports.append(report)
        self.orders.pop(0)

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        self.ended.append((outcome, is_immediate))


def host(guard: object = None, memory: object = None, arrived: Sequence[int] = ()) -> Host:
    return Host(Job(), cast(Any, None), {}, cast(Any, guard), cast(Any, memory), None, (), arrived, print)


def until_over(order_source: Desk, arrived: list[int]) -> Outcome:
    return job_runner._follow_orders(host(arrived=arrived), cast(Any, order_source))


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch) -> None:
    def fail(*arguments: object) -> Report:
        raise AssertionError("nothing is to run")

    monkeypatch.setattr(job_runner, "run_attempt", fail)


def test_an_attempt_that_was_to_stop_before_it_was_seen_is_reported() -> None:
    order_source = Desk(
        Order(OrderKind.WAIT), Order(OrderKind.STOP, 3, outcome=LOST), Order(OrderKind.OVER, outcome=LOST)
    )
    assert until_over(order_source, []) == LOST
    assert order_source.reports == [Report(LOST)]


def test_whoever_is_asked_to_end_begins_nothing() -> None:
    order_source = Desk(Order(OrderKind.RUN, 1, processes=2), Order(OrderKind.OVER))
    until_over(order_source, [signal.SIGTERM])
    assert order_source.reports == [Report(Outcome(143, "ended by SIGTERM"), stopped=True)]


def test_whoever_is_asked_twice_does_not_wait_for_the_others() -> None:
    """Its own processes have ended already."""
    for arrived in [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]:
        order_source = Desk(Order(OrderKind.WAIT), Order(OrderKind.OVER))
        until_over(order_source, arrived)
        assert order_source.ended == [(Outcome(143, "ended by SIGTERM"), len(arrived) > 1)]


def test_a_launcher_that_finds_no_room_in_memory_says_so(monkeypatch, tmp_path) -> None:
    def full(**options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(InputError, match=r"Received: .* \(No space left on device\)\. Free up space there\."):
        job_runner.run(Job(log_dir=str(tmp_path)), lambda rank: ["true"], {})


class Unguarded:
    """A guard that fails to add a process."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def add(self, group: int) -> None:
        self.groups.append(group)
        raise OSError("no guard")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python closes the pipes
def test_a_process_that_cannot_be_guarded_is_not_left(tmp_path: pathlib.Path) -> None:
    guard = Unguarded()
    task = Task(0, ("sleep", "1000"), {"PATH": os.environ["PATH"]}, tmp_path / "rank-0.log")
    with contextlib.ExitStack() as stack, pytest.raises(OSError, match="no guard"):
        _supervise(host(guard, tmp_path), [task], (), LocalGroup(), None, stack, 0)
    [group] = guard.groups
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_processes_that_cannot_save_end_at_once_if_the_job_is_over() -> None:
    lost = Outcome(5, "rank 1 is lost")
    order_source = SimpleNamespace(order=lambda: Order(OrderKind.OVER, outcome=lost))
    assert _check_orders(host(), cast(Any, order_source)) == Stop(lost, is_final=False)
