"""The group of launchers on a fixed number of hosts."""

import contextlib
import math
import signal
from collections.abc import Iterator, Mapping

from tfdist.coordination import Group
from tfdist.coordination.job_token import add_token_flags, job_token
from tfdist.coordination.join import serve_group, wait_for_members
from tfdist.errors import SIGNAL_OFFSET, ExitCode, PeerLostError, describe_code, error_summary
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.orphan_guard import END_SIGNALS


@contextlib.contextmanager
def launchers(job: Job, environment: Mapping[str, str]) -> Iterator[Group]:
    """Yields the group of all launchers of a job, which node 0 serves at the coordinator's address.

    Raises:
      PeerLostError: a launcher did not connect in time.
      InputError: node 0 cannot listen at the address, there is no token, or the token, --nodes or --node_rank differ.
    """
    group = serve_group(
        job.coordinator,
        rank=job.node_rank,
        size=job.nodes,
        token=token(job, environment),
        timeout=job.start_timeout_seconds,
        remedy="Choose another --coordinator, the same on every host.",
        noun="node",
    )
    try:
        yield wait_for_members(group, job.start_timeout_seconds)
    except BaseException as error:
        group.leave(1, error_summary(error))
        raise
    finally:
        group.leave()


def conclude(group: Group, local_outcome: Outcome, grace: float) -> Outcome:
    """Returns the outcome of the job, after waiting for other launchers unless the local processes have failed."""
    if local_outcome.code not in (ExitCode.DONE, ExitCode.PREEMPTED) or group.goodbye_code is not None:
        group.leave(local_outcome.code, local_outcome.reason)
        return local_outcome
    try:
        codes = group.gather("launch/end", int(local_outcome.code), grace if local_outcome.code else math.inf)
    except PeerLostError as error:
        return _outcome_of_loss(group, local_outcome, error, grace)
    if local_outcome.code or ExitCode.PREEMPTED not in codes:
        return local_outcome
    node = codes.index(ExitCode.PREEMPTED)
    return Outcome(ExitCode.PREEMPTED, f"ranks of node {node} ended with {describe_code(ExitCode.PREEMPTED)}")


def _outcome_of_loss(group: Group, local_outcome: Outcome, error: PeerLostError, grace: float) -> Outcome:
    loss, reason = group.first_loss(), str(error).rstrip(".")
    if loss and local_outcome.code and (loss.code is None or is_request(loss.code)):  # this node's ranks have saved
        return local_outcome
    if local_outcome.code and not loss:
        reason += f" of the end of this node's ranks, which were preempted (--grace_seconds={grace:g})"
    outcome = lost_launcher(group) or Outcome(error.exit_code, reason)
    group.leave(outcome.code, outcome.reason)
    return outcome


def is_request(code: int) -> bool:
    """Returns whether an exit code means that the end of a launcher was requested, or its output closed."""
    return code - SIGNAL_OFFSET in (*END_SIGNALS, signal.SIGPIPE)


def lost_launcher(group: Group) -> Outcome | None:
    """Returns the outcome of the job if another launcher is lost, else None."""
    loss = group.first_loss()
    return Outcome(PeerLostError.exit_code if loss.code is None else loss.code, str(loss)) if loss else None


def token(job: Job, environment: Mapping[str, str]) -> str:
    """Returns the token of the launchers' group.

    Raises:
      InputError: the coordinator is not on the loopback, and there is no token or it is invalid.
    """
    return job_token(add_token_flags(environment, job.token_file, job.insecure), job.coordinator)
