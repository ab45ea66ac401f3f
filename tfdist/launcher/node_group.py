"""The group of launchers on a fixed number of hosts."""

import contextlib
from collections.abc import Iterator, Mapping

from tfdist.coordination import Group
from tfdist.coordination.job_token import job_token, with_flags
from tfdist.coordination.join import serve_group, started
from tfdist.errors import PeerLostError
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome

FOREVER = float("inf")


@contextlib.contextmanager
def launchers(job: Job, environment: Mapping[str, str]) -> Iterator[Group]:
    """Yields the group of all launchers of a job, which node 0 serves at the coordinator's address.

    Raises:
      PeerLostError: a launcher did not connect in time; the message names its node.
      InputError: node 0 cannot listen there, there is no token, or the token, --nodes or --node_rank differ.
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
        yield started(group, job.start_timeout_seconds)
    except BaseException as error:
        group.leave(1, f"{type(error).__name__}: {error}".partition("\n")[0])
        raise
    finally:
        group.leave()


def conclude(group: Group, mine: Outcome) -> Outcome:
    """Returns how the job ended, after waiting for the other launchers if this one succeeded."""
    if mine.code:
        group.leave(mine.code, mine.reason)
        return mine
    try:
        group.barrier("launch/end", FOREVER)
        return mine
    except PeerLostError as error:
        return lost_launcher(group) or Outcome(error.exit_code, str(error).rstrip("."))


def lost_launcher(group: Group) -> Outcome | None:
    """Returns how the job ended if another launcher is lost, else None."""
    loss = group.lost()
    return Outcome(PeerLostError.exit_code if loss.code is None else loss.code, str(loss)) if loss else None


def token(job: Job, environment: Mapping[str, str]) -> str:
    """Returns the token of the launchers' group.

    Raises:
      InputError: the coordinator is not on the loopback, and there is no token, or it cannot be used.
    """
    return job_token(with_flags(environment, job.token_file, job.insecure), job.coordinator)
