"""Simulated jobs: a job controller with a simulated clock, a host list, and recorded messages."""

from collections.abc import Mapping

from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.orders import Order, OrderKind, Report

KILLED = Outcome(137, "rank 1 ended with code 137 (killed by SIGKILL)", 1)
SEVERAL = {"coordinator": "a:1", "hosts": "list", "names": ("a", "b"), "listed": {"a": 2, "b": 2}}


class Play:
    """A job controller with a simulated clock, its host list, and its messages."""

    def __init__(self, listed: Mapping[str, int] | None = None, names: tuple[str, ...] = ("a",), **fields):
        self.now, self.listed, self.said = 0.0, listed, []
        self.met: list[tuple[int, int]] = []
        self.controller = JobController(Job(**fields), self.said.append, lambda: self.listed, lambda: self.now)
        self.controller.open_group = self.open_group
        for name in names:
            self.join(name)

    def open_group(self, attempt, size):
        self.met.append((attempt, size))
        return f"host:{len(self.met)}"

    def join(self, name: str) -> None:
        self.controller.add_launcher(name, [name])

    def order(self, name: str = "a", after: float = 0.0) -> Order:
        self.now += after
        return self.controller.order(name)

    def runs(self, name: str = "a", after: float = 0.0) -> int:
        """Returns how many processes a launcher is ordered to run; 0 for none."""
        order = self.order(name, after)
        assert order.kind in (OrderKind.RUN, OrderKind.WAIT), order
        return order.processes

    def report(self, name: str = "a", code: int = 0, **fields) -> None:
        outcome = KILLED if code == 137 else Outcome(code, f"code {code}" if code else "")
        self.controller.record_report(name, Report(outcome, **fields))


def elastic(least: int = 2, most: int = 3, **fields) -> Play:
    return Play(processes=most, min_processes=least, **fields)
