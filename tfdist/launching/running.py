"""One job from its first process to its last, over all attempts: what `launch` and `spawn` both do."""

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfdist.errors import ExitCode, PeerLostError
from tfdist.launching.arriving import opened
from tfdist.launching.attempt import Ask, Host, asked, attempt
from tfdist.launching.desks import Desk
from tfdist.launching.guard import Guard
from tfdist.launching.job import Job
from tfdist.launching.logs import log_directory
from tfdist.launching.orders import Kind, Order, Report
from tfdist.launching.outcome import SUCCESS, Outcome
from tfdist.launching.supervision import POLL_SECONDS

LAUNCHED_VARIABLE = "TFDIST_LAUNCHED"  # when the job was started first: the name of what it writes


def run(
    job: Job,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    *,
    stops: Sequence[Ask] = (),
    interrupts: contextlib.AbstractContextManager[list[int]] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Starts a job's processes on this host, sees them to their end, and starts them again where the job says so.

    Args:
      job: how many, and how they find each other.
      command: what a rank runs.
      environment: what they inherit; the variables that say who a process is are replaced.
      stops: each is asked again and again for a reason to end the processes.
      interrupts: collects the signals that ask for the end while processes run, as `signals.received()` does; outside
        of it they do what they always do. None where they are others' affair.
      say: told where the logs are, and of restarts.

    Returns:
      How the last attempt ended.

    Raises:
      PeerLostError: another host's launcher did not come.
      InputError: the command, the log directory or the coordinator's address cannot be used.
    """
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(Guard())
        desk = stack.enter_context(opened(job, environment, say))
        logs = log_directory(job.log_dir, desk.everyone)
        notes = stack.enter_context(_notes(job))
        environment = {**environment, LAUNCHED_VARIABLE: time.strftime("%Y%m%d-%H%M%S")}
        with interrupts or contextlib.nullcontext([]) as arrived:
            outcome = _until_over(Host(job, command, environment, guard, logs, notes, stops, arrived, say), desk)
        return desk.conclude(outcome)


def _until_over(host: Host, desk: Desk) -> Outcome:
    """Does what is ordered, from the first order to the last."""
    last = SUCCESS
    while (order := desk.order()).kind != Kind.OVER:
        if order.kind == Kind.RUN:
            report = _attempt(host, desk, order)
            last = report.outcome
            desk.report(report)
        elif stop := asked(host):  # a preemption remains one: what has ended so has saved
            desk.end(last if last.code == ExitCode.PREEMPTED else stop.outcome)
        else:
            time.sleep(POLL_SECONDS)
    return order.outcome


def _attempt(host: Host, desk: Desk, order: Order) -> Report:
    try:
        return attempt(host, desk, order)
    except PeerLostError as error:  # another launcher was lost before the processes began
        return Report(Outcome(error.exit_code, str(error).rstrip(".")))


@contextlib.contextmanager
def _notes(job: Job) -> Iterator[pathlib.Path | None]:
    """A directory for what the ranks note of their progress, which decides whether a failure repeats."""
    if not job.restart_budget:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="tfdist-launch-") as path:
        yield pathlib.Path(path)
