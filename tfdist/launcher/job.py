"""The description of a job to launch, as given by flags."""

import dataclasses

from tfdist.cluster.tf_config import is_address
from tfdist.errors import InputError
from tfdist.grammar.spec import nearest
from tfdist.launcher.engine_environment import ENGINES


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes of a job, as seen by the launcher on one of its hosts.

    Attributes:
      processes: number of processes that this launcher starts, at least 1; in an elastic job the maximum over all
        launchers together.
      min_processes: in an elastic job, the minimum over all launchers together; 0 for a job that is not elastic.
      hosts: a file, or a program, that lists how many processes each host of an elastic job may run; see `hosts.parse`.
      launcher: which environment variables the processes get: "tensorflow" (TF_CONFIG) or "horovod".
      nodes: number of launchers, one per host; launchers of an elastic job may join and leave instead.
      node_rank: index of this launcher, in [0, nodes).
      coordinator: `host:port` of the launcher of node 0, or of the controlling launcher of an elastic job; only needed
        with several hosts.
      token_file: file with the token that the launchers share, see `job_token`; empty to take it from the environment.
      insecure: whether a job over several hosts may do without a token.
      isolate: whether the processes run in a network namespace of their own.
      start_timeout_seconds: for all launchers to connect, and for all ranks to join, if they use tfdist.
      log_dir: directory of the ranks' logs; empty for a new one under runs/.
      grace_seconds: for the processes to save and end when the job is asked to end, before they are killed.
      max_restarts: how many times all processes are restarted after a failure; see `restarts.Restarts`. None for never
        or, in an elastic job, without limit.
      max_preemptions: the same after an end with code 75, or by SIGTERM, that was not requested from this launcher.
      restart_backoff_seconds: before the first restart; doubles with each failure, up to 60 s.
      rejoin_seconds: in an elastic job, before a failed process is started again; see `slots.Slots`.
      elastic_timeout_seconds: how long an elastic job waits for its minimum of processes; 0 for no limit.
    """

    processes: int = 1
    min_processes: int = 0
    hosts: str = ""
    launcher: str = "tensorflow"
    nodes: int = 1
    node_rank: int = 0
    coordinator: str = ""
    token_file: str = ""
    insecure: bool = False
    isolate: bool = False
    start_timeout_seconds: float = 60.0
    log_dir: str = ""
    grace_seconds: float = 60.0
    max_restarts: int | None = None
    max_preemptions: int | None = None
    restart_backoff_seconds: float = 1.0
    rejoin_seconds: float = 60.0
    elastic_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if self.launcher not in ENGINES:
            raise InputError(f'--launcher must be known. Received: "{self.launcher}".{nearest(self.launcher, ENGINES)}')
        for name, lowest in (("processes", 1), ("nodes", 1), ("max_restarts", 0), ("max_preemptions", 0)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InputError(f"--{name} must be at least {lowest}. Received: {value}.")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(f"--node_rank must be in [0, --nodes={self.nodes}). Received: {self.node_rank}.")
        if self.start_timeout_seconds <= 0:
            raise InputError(f"--start_timeout_seconds must be positive. Received: {self.start_timeout_seconds:g}.")
        for name in ("grace_seconds", "restart_backoff_seconds", "rejoin_seconds", "elastic_timeout_seconds"):
            if not getattr(self, name) >= 0:
                raise InputError(f"--{name} must not be negative. Received: {getattr(self, name):g}.")
        if self.coordinator and not is_address(self.coordinator):
            raise InputError(f'--coordinator must be host:port. Received: "{self.coordinator}".')
        if self.isolate and (self.nodes > 1 or self.coordinator):
            raise InputError(
                f"--isolate is for a job on one host, which no other host can reach then. Received: --nodes={self.nodes}, "
                f'--coordinator="{self.coordinator}". Leave it out.'
            )
        self._check_elastic() if self.is_elastic else self._check_fixed()

    @property
    def is_elastic(self) -> bool:
        """Whether the number of processes may change."""
        return self.min_processes > 0

    @property
    def restart_budget(self) -> float:
        """Number of failures after which the job is restarted."""
        return self._budget(self.max_restarts)

    @property
    def preemption_budget(self) -> float:
        """Number of preemptions after which the job is restarted."""
        return self._budget(self.max_preemptions)

    def _budget(self, said: int | None) -> float:
        if said is not None:
            return said
        return float("inf") if self.is_elastic else 0

    def _check_elastic(self) -> None:
        if self.min_processes > self.processes:
            raise InputError(f"--processes=MIN:MAX needs MIN <= MAX. Received: {self.min_processes}:{self.processes}.")
        if self.nodes > 1 or self.node_rank:
            raise InputError(
                "Launchers join and leave an elastic job at any time: leave out --nodes and --node_rank. Received: "
                f"--nodes={self.nodes}, --node_rank={self.node_rank}."
            )
        if self.coordinator and not self.hosts:
            raise InputError(
                "An elastic job on several hosts needs --hosts, which lists how many processes each may run. Received: "
                "none."
            )

    def _check_fixed(self) -> None:
        if self.hosts:
            raise InputError(f"--hosts is for --processes=MIN:MAX. Received: --processes={self.processes}.")
        if self.nodes > 1 and not self.coordinator:
            raise InputError(
                f"--nodes={self.nodes} needs --coordinator=HOST:PORT, the address of node 0, the same on every host. "
                "Received: none."
            )
        if self.nodes > 1 and (self.max_restarts or self.max_preemptions):
            raise InputError(
                "--max_restarts and --max_preemptions restart the processes of a single host. Received: "
                f"--nodes={self.nodes}. Leave them out, or make the job elastic: --processes=MIN:MAX with --hosts."
            )
