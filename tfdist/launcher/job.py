"""Describes a job, as specified by flags, and its outcome."""

import dataclasses
import pathlib
import signal
from collections.abc import Sequence

from tfdist.cluster.tf_config import is_address
from tfdist.coordination import LostMember
from tfdist.coordination.group import NO_GOODBYE
from tfdist.errors import SIGNAL_OFFSET, ExitCode, InputError, describe_code, nearest
from tfdist.launcher.child import Child
from tfdist.launcher.engine_environment import ENGINES


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes of a job, as seen by the launcher on one of its hosts: the flags of `tfdist launch`.

    Attributes:
      processes: number of processes of this launcher, at least 1, including the servers; in an elastic job, the maximum number
        over all launchers.
      min_processes: minimum number of processes of an elastic job, over all launchers; 0 if the job is not elastic.
      servers: number of processes that are parameter servers; they have the last ranks.
      max_restarts: maximum number of restarts after failures; None for no restart, or for no limit in an elastic job.
      max_preemptions: maximum number of restarts after preemptions; None like `max_restarts`.
    """

    processes: int = 1
    min_processes: int = 0
    servers: int = 0
    evaluator: bool = False
    hosts: str = ""
    launcher: str = "tensorflow"
    nodes: int = 1
    node_rank: int = 0
    coordinator: str = ""
    token_file: str = ""
    insecure: bool = False
    start_timeout_seconds: float = 60.0
    log_dir: str = ""
    grace_seconds: float = 60.0
    max_restarts: int | None = None
    max_preemptions: int | None = None
    restart_backoff_seconds: float = 1.0
    rejoin_seconds: float = 60.0
    elastic_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.launcher not in ENGINES:
            raise InputError(f'--launcher must be known. Received: "{self.launcher}".{nearest(self.launcher, ENGINES)}')
        minimums = {"processes": 1, "servers": 0, "nodes": 1, "max_restarts": 0, "max_preemptions": 0}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InputError(f"--{name} must be at least {minimum}. Received: {value}.")
        if self.processes <= self.servers:
            raise InputError(f"--processes must be at least 1. Received: {self.processes - self.servers}.")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(f"--node_rank must be in [0, --nodes={self.nodes}). Received: {self.node_rank}.")
        if self.start_timeout_seconds <= 0:
            raise InputError(f"--start_timeout_seconds must be positive. Received: {self.start_timeout_seconds:g}.")
        for name in ("grace_seconds", "restart_backoff_seconds", "rejoin_seconds", "elastic_timeout_seconds"):
            if not getattr(self, name) >= 0:
                raise InputError(f"--{name} must not be negative. Received: {getattr(self, name):g}.")
        if self.coordinator and not is_address(self.coordinator):
            raise InputError(f'--coordinator must be host:port. Received: "{self.coordinator}".')
        if self.servers and (self.is_elastic or self.nodes > 1 or self.launcher != "tensorflow"):
            elastic = f" --processes={self.min_processes}:{self.processes - self.servers}" if self.is_elastic else ""
            raise InputError(
                "--servers is for a fixed number of processes on one host, with --launcher=tensorflow. Received: --servers="
                f"{self.servers} --nodes={self.nodes} --launcher={self.launcher}{elastic}. On several hosts, set TF_CONFIG."
            )
        self._check_elastic() if self.is_elastic else self._check_fixed()

    @property
    def is_elastic(self) -> bool:
        """Whether the number of processes may change."""
        return self.min_processes > 0

    @property
    def restart_budget(self) -> float:
        """Maximum number of restarts after failures."""
        return self._budget(self.max_restarts)

    @property
    def preemption_budget(self) -> float:
        """Maximum number of restarts after preemptions."""
        return self._budget(self.max_preemptions)

    def _budget(self, limit: int | None) -> float:
        if limit is not None:
            return limit
        return float("inf") if self.is_elastic else 0

    def _check_elastic(self) -> None:
        if self.min_processes > self.processes:
            raise InputError(f"--processes=MIN:MAX needs MIN <= MAX. Received: {self.min_processes}:{self.processes}.")
        if self.nodes > 1 or self.node_rank:
            raise InputError(
                "Launchers join and leave an elastic job at any time, so their number is not fixed. Received: "
                f"--nodes={self.nodes}, --node_rank={self.node_rank}. Remove both flags."
            )
        if self.coordinator and not self.hosts:
            raise InputError(
                "An elastic job on several hosts needs --hosts, which lists how many processes each host may run. "
                "Received no --hosts."
            )

    def _check_fixed(self) -> None:
        if self.hosts:
            raise InputError(f"--hosts requires --processes=MIN:MAX. Received: --processes={self.processes}.")
        if self.nodes > 1 and not self.coordinator:
            raise InputError(
                f"--nodes={self.nodes} needs --coordinator=HOST:PORT, the address of node 0, the same on every host. "
                "Received no --coordinator."
            )
        if self.nodes > 1 and (self.max_restarts or self.max_preemptions):
            raise InputError(
                "--max_restarts and --max_preemptions restart the processes of a single host. Received: "
                f"--nodes={self.nodes}. Remove these flags, or make the job elastic: --processes=MIN:MAX with --hosts."
            )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
      code: exit code.
      reason: description, as a sentence without a period; empty for success.
      rank: rank that caused it; None for no rank, or if it is unknown on this node.
      log: log of that rank, if it ran here.
    """

    code: int
    reason: str = ""
    rank: int | None = None
    log: pathlib.Path | None = None


SUCCESS = Outcome(ExitCode.DONE)
# Exit codes of processes ended by a signal; a signal from the launcher is not a cause.
_SIGNAL_CODES = (SIGNAL_OFFSET + signal.SIGINT, SIGNAL_OFFSET + signal.SIGTERM)


def root_cause(children: Sequence[Child], loss: LostMember | None = None) -> Outcome:
    """Finds the process whose end caused the others to end.

    Processes that the launcher has signaled, or that ended because they lost a peer, are not causes. A preempted process is
    the cause only if there is no failure. Of the remaining processes, the first one that ended is the cause, unless the
    group's loss names another: an engine's error can end a process before the process that caused the error ends, and a
    suspended or hanging process does not end at all.

    Args:
      children: the processes; running processes have no code.
      loss: the first loss in the ranks' group.

    Returns:
      The cause; success if all processes that have ended returned 0 or were signaled by the launcher.
    """
    if loss and loss.code not in (None, ExitCode.DONE, ExitCode.PEER_LOST, *_SIGNAL_CODES):
        return _outcome_of_goodbye(loss)
    failures = sorted((c for c in children if c.code and not c.signaled), key=lambda child: child.end_time)
    if loss and loss.code is None and _has_disappeared(loss, children, failures):
        return Outcome(ExitCode.PEER_LOST, str(loss), loss.rank)
    lost_peer = loss if loss and loss.code == ExitCode.PEER_LOST else None
    # A program may end with code 1 although the engine's error that ended it was the loss of a peer.
    affected_rank = lost_peer.rank if lost_peer else None
    causes = [child for child in failures if child.code != ExitCode.PEER_LOST and child.rank != affected_rank]
    if not causes and lost_peer:
        return _outcome_of_goodbye(lost_peer)
    causes = causes or failures
    causes = [child for child in causes if child.code != ExitCode.PREEMPTED] or causes
    if not causes:
        return SUCCESS
    cause = next((child for child in causes if loss and child.rank == loss.rank), causes[0])
    assert cause.code is not None
    return Outcome(cause.code, f"rank {cause.rank} ended with {describe_code(cause.code)}", cause.rank)


def _outcome_of_goodbye(loss: LostMember) -> Outcome:
    assert loss.code is not None
    return Outcome(loss.code, f"{loss.noun} {loss.rank} {loss.reason.rstrip('.')}", loss.rank)


def _has_disappeared(loss: LostMember, children: Sequence[Child], failures: Sequence[Child]) -> bool:
    """Returns whether the cause is a member that has disappeared without a goodbye.

    Its process is still running, or belongs to another node and all failures here are lost peers. If no process has failed, a
    member with a closed connection may be about to end normally.
    """
    child = next((child for child in children if child.rank == loss.rank), None)
    if child and child.code is not None:
        return False
    is_first = child is not None or all(failure.code == ExitCode.PEER_LOST for failure in failures)
    return is_first and (bool(failures) or loss.reason != NO_GOODBYE)
