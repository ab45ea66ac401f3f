"""Chooses the strategy for `--strategy=auto`, and checks that the environment meets the needs of an explicit one."""

import dataclasses

from tfdist.cluster.environment import Cluster, Environment, describe, detect_cluster, multi_process_hint
from tfdist.cluster.tf_config import EXAMPLE
from tfdist.config.strategy_registry import (
    AUTO,
    DECLARATIONS,
    PARAMETER_SERVER,
    Declaration,
    Processes,
    strategy_declaration,
)
from tfdist.errors import InputError


@dataclasses.dataclass(frozen=True)
class StrategyChoice:
    """Result of `choose_strategy`.

    Attributes:
      cluster: this process's place among the job's processes.
      strategy: name of the strategy.
      reason: one sentence for the log.
    """

    cluster: Cluster
    strategy: str
    reason: str

    @property
    def cause(self) -> str:
        """The clause of `reason` that gives the cause, such as `because this is a single process with one local device`."""
        return self.reason.partition(", ")[2].rstrip(".")


def choose_strategy(
    env: Environment,
    strategy: str = AUTO,
    local_devices: int = 1,
    declaration: Declaration | None = None,
    cluster: Cluster | None = None,
) -> StrategyChoice:
    """Chooses the strategy and determines this process's place among the job's processes.

    An explicit strategy has priority. Otherwise, the first declaration that accepts this environment determines it.

    Args:
      env: environment of the process.
      strategy: "auto", or the name of a strategy, such as `package.module:Class`.
      local_devices: default number of devices of this process, at least 1.
      declaration: declaration of the strategy; by default, its entry in the registry.
      cluster: this process's place; by default, the one that `env` describes.

    Raises:
      InputError: launchers disagree about this process's rank or the job's size, or the strategy does not support these.
    """
    cluster = cluster or detect_cluster(env)
    if strategy == AUTO:
        selected = next(entry for entry in DECLARATIONS if entry.auto and entry.auto(cluster, local_devices))
        devices = f"{local_devices} local devices" if local_devices > 1 else "one local device"
        is_one = selected.processes is Processes.ONE
        cause = f"this is a single process with {devices}{multi_process_hint(env)}" if is_one else describe(cluster)
        return StrategyChoice(cluster, selected.name, f"Using strategy {selected.name}, because {cause}.")
    _check_processes(strategy, (declaration or strategy_declaration(strategy)).processes, cluster)
    return StrategyChoice(cluster, strategy, f"Using strategy {strategy}, set by --strategy; {describe(cluster)}.")


def _check_processes(strategy: str, processes: Processes, cluster: Cluster) -> None:
    if cluster.servers and strategy != PARAMETER_SERVER:
        raise InputError(
            f"Only --strategy={PARAMETER_SERVER} has parameter servers. Received: --strategy={strategy} and a TF_CONFIG with "
            f"{cluster.servers} of them (ps). Use --strategy=parameter_server, or remove the servers."
        )
    if processes is Processes.ONE and cluster.size > 1:
        raise InputError(
            f"--strategy={strategy} is for a single process: several processes would train independently and write to the "
            f"same directory. Received: {describe(cluster)}. Use --strategy=auto, or start one process without "
            f"{cluster.source}'s environment variables."
        )
    if processes is Processes.SEVERAL and cluster == Cluster():
        raise InputError(f"--strategy={strategy} needs to know its workers. Received no TF_CONFIG. Example: {EXAMPLE}")
    if processes is Processes.SEVERAL and cluster.size > 1 and not cluster.coordinator:
        raise InputError(
            f"--strategy={strategy} needs the address of rank 0. Received: {cluster.source}'s variables, which do "
            "not contain it. Set TFDIST_COORDINATOR=host:port."
        )
