"""Where a launcher gets its orders: from a director of its own, or as one of a fixed number of launchers."""

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from tfdist.group import Group, LocalGroup
from tfdist.group.addresses import LOOPBACK
from tfdist.launching import nodes
from tfdist.launching.director import Director
from tfdist.launching.hosts import Hosts, own_names
from tfdist.launching.job import Job
from tfdist.launching.orders import Kind, Order, Report
from tfdist.launching.outcome import Outcome
from tfdist.launching.placement import own_host

OWN = "this launcher"  # the first of a director's


class Desk(abc.ABC):
    """Where a launcher gets its orders.

    Attributes:
      host: how the job's other launchers reach this host.
      everyone: all launchers of the job, where their number is fixed; else this one alone.
    """

    host: str = LOOPBACK
    everyone: Group

    @abc.abstractmethod
    def order(self) -> Order:
        """What this launcher is to do now; asked again and again."""

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Says how the attempt ended that was ordered."""

    @abc.abstractmethod
    def meet(self, order: Order) -> AbstractContextManager[Group]:
        """The launchers of an attempt."""

    def end(self, outcome: Outcome) -> None:
        """Says that somebody wants this launcher to end, while nothing runs."""

    def conclude(self, outcome: Outcome) -> Outcome:
        """How the job ended, once all launchers have ended."""
        return outcome


class OneHost(Desk):
    """The only launcher of a job, which decides for itself."""

    def __init__(self, director: Director):
        """Args: director: decides; nobody has joined it yet."""
        self._director = director
        self.everyone = LocalGroup()
        director.joined(OWN, own_names())

    def order(self) -> Order:
        """See base class."""
        return self._director.order(OWN)

    def report(self, report: Report) -> None:
        """See base class."""
        self._director.reported(OWN, report)

    def meet(self, order: Order) -> AbstractContextManager[Group]:
        """See base class."""
        return contextlib.nullcontext(self.everyone)

    def end(self, outcome: Outcome) -> None:
        """See base class."""
        self._director.end(outcome)


class FixedNodes(Desk):
    """One of a fixed number of launchers, each of which runs its processes once."""

    def __init__(self, job: Job, group: Group):
        """Args: job: of all; group: of all launchers."""
        self._job, self.everyone = job, group
        self._ended: Outcome | None = None
        self.host = own_host(job.coordinator, serves=group.rank == 0)

    def order(self) -> Order:
        """See base class."""
        if self._ended:
            return Order(Kind.OVER, outcome=self._ended)
        return Order(Kind.RUN, 0, self._job.node_rank, self._job.nodes, self._job.processes)

    def report(self, report: Report) -> None:
        """See base class."""
        self._ended = report.outcome

    def meet(self, order: Order) -> AbstractContextManager[Group]:
        """See base class."""
        return contextlib.nullcontext(self.everyone)

    def conclude(self, outcome: Outcome) -> Outcome:
        """See base class."""
        return nodes.conclude(self.everyone, outcome)


@contextlib.contextmanager
def opened(job: Job, environment: Mapping[str, str], say: Callable[[str], object]) -> Iterator[Desk]:
    """The desk of this launcher.

    Args:
      job: what is to be launched.
      environment: has the token of jobs on several hosts.
      say: told what becomes of the job.

    Raises:
      PeerLostError: another host's launcher did not come.
      InputError: the coordinator's address, or `--hosts`, cannot be used.
    """
    if job.nodes > 1:
        with nodes.launchers(job, environment) as group:
            yield FixedNodes(job, group)
        return
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(job.hosts)) if job.hosts else None
        yield OneHost(Director(job, say, listed=lambda: hosts.slots if hosts else None, clock=time.monotonic))
