"""Tries an engine: runs a command of tfdist on it, in processes of its own."""

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfdist.config.strategy_declaration import Trial
from tfdist.machine.children import Children, Ended
from tfdist.machine.frameworks import Frameworks
from tfdist.machine.report import Finding, Status

_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "-1"}


class Tried(NamedTuple):
    """One trial.

    Attributes:
      strategy: name of the strategy.
      trial: how it was tried; None if it cannot be tried here.
      status: whether it works.
      reason: why it failed or was not made, as one line; empty if it works.
      remedy: the command that fixes it, if known.
      command: the command that repeats the trial; empty if it was not made.
      ended: how its processes ended; None if it was not made.
    """

    strategy: str
    trial: Trial | None
    status: Status
    reason: str = ""
    remedy: str = ""
    command: str = ""
    ended: Ended | None = None

    @property
    def engine(self) -> str:
        """The strategy, and the library of its collectives if it has a choice."""
        return f"{self.strategy} over {self.trial.library}" if self.trial and self.trial.library else self.strategy

    @property
    def flags(self) -> str:
        """The flags that choose the engine; empty if it cannot be tried here."""
        return shlex.join(_flags(self.strategy, self.trial)) if self.trial else ""

    def finding(self, *columns: str) -> Finding:
        """Returns its line of the report.

        Args:
          *columns: the beginning of the line, to which the reason is added.
        """
        again = f"To see its output: {self.command}" if self.status == Status.FAILED and self.command else ""
        return Finding(self.status, "  ".join([*columns, self.reason]).rstrip(), self.remedy or again)

    def facts(self) -> dict[str, Any]:
        """Returns values of JSON."""
        trial = self.trial
        return {
            "strategy": self.strategy,
            "library": trial.library or None if trial else None,
            "processes": trial.processes if trial else None,
            "devices_per_process": trial.devices if trial else None,
            "flags": self.flags or None,
            "status": str(self.status),
            "seconds": self.ended.seconds if self.ended else None,
            "reason": self.reason or None,
            "remedy": self.remedy or None,
            "command": self.command or None,
        }


def run_trial(
    children: Children,
    frameworks: Frameworks,
    strategy: str,
    trial: Trial,
    command: Sequence[str],
    seconds: float,
    unshown: Sequence[str] = (),
) -> Tried:
    """Runs a command on an engine, unless something that it needs is missing.

    Args:
      children: starts the processes.
      frameworks: what they run on.
      strategy: name of the strategy.
      trial: how it is tried.
      command: name of the module, and its arguments.
      seconds: deadline.
      unshown: arguments besides `--json` that are left out where the trial is repeated.
    """
    if obstacle := frameworks.obstacle(trial):
        return Tried(strategy, trial, obstacle.status, reason=obstacle.text, remedy=obstacle.remedy)
    module, *arguments = [*command, *_flags(strategy, trial)]
    all_arguments = [*arguments, *unshown, "--json"]
    ended = children.run(module, all_arguments, trial.processes, seconds, _variables(trial, frameworks))
    launch = f"python -m tfdist.launch --processes={trial.processes} -- " if trial.processes > 1 else ""
    repeated = f"{launch}python -m {module} {shlex.join(arguments)}"
    status = Status.FAILED if ended.code else Status.OK
    return Tried(strategy, trial, status, ended.reason, command=repeated, ended=ended)


def _flags(strategy: str, trial: Trial) -> list[str]:
    return [f"--strategy={strategy}", *(f"--{name}={value}" for name, value in trial.options.items())]


def _variables(trial: Trial, frameworks: Frameworks) -> dict[str, str]:
    """Returns variables for a trial: several replicas need a GPU each, or run on the CPU."""
    replicas = trial.processes * trial.devices
    return _WITHOUT_GPUS if 0 < frameworks.gpus < replicas else {}
