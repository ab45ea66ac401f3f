"""Tries each engine: two training steps, compared with those of one device by `tfdist.verify`."""

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tfdist.config.strategy_declaration import Declaration, Trial
from tfdist.config.strategy_registry import DECLARATIONS
from tfdist.errors import ExitCode
from tfdist.machine.children import Children, Ended
from tfdist.machine.frameworks import Frameworks
from tfdist.machine.report import Finding, Status

_TRAINING = ("--model=mlp(hidden=(8,))", "--dataset=synthetic:4x4x1", "--batch_size=8", "--steps=2")
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "-1"}


class Tried(NamedTuple):
    """One trial.

    Attributes:
      strategy: name of the strategy.
      trial: how it was tried; None if it cannot be tried here.
      status: whether it works.
      seconds: how long the trial took; None if it was not made.
      reason: why it failed or was not made, as one line; empty if it works.
      remedy: the command that fixes it, if known.
      command: the command that repeats the trial; empty if it was not made.
    """

    strategy: str
    trial: Trial | None
    status: Status
    seconds: float | None = None
    reason: str = ""
    remedy: str = ""
    command: str = ""

    @property
    def title(self) -> str:
        """The strategy, and how it was tried."""
        if self.trial is None:
            return self.strategy
        library = f" over {self.trial.library}" if self.trial.library else ""
        devices = self.trial.devices
        parts = [f"{self.trial.processes} processes"] if self.trial.processes > 1 else []
        parts += [f"{devices} devices"] if devices > 1 else []
        return ", ".join([f"{self.strategy}{library}", *parts])

    def finding(self) -> Finding:
        """Returns its line of the report."""
        took = f"{self.seconds:.1f} s" if self.seconds is not None else ""
        text = "  ".join(filter(None, [f"{self.title:<33}", took, self.reason])).rstrip()
        again = f"To see its output: {self.command}" if self.status == Status.FAILED and self.command else ""
        return Finding(self.status, text, self.remedy or again)

    def facts(self) -> dict[str, Any]:
        """Returns values of JSON."""
        trial = self.trial
        return {
            "strategy": self.strategy,
            "library": trial.library or None if trial else None,
            "processes": trial.processes if trial else None,
            "devices_per_process": trial.devices if trial else None,
            "status": str(self.status),
            "seconds": self.seconds,
            "reason": self.reason or None,
            "remedy": self.remedy or None,
            "command": self.command or None,
        }


def tried(children: Children, frameworks: Frameworks, names: Sequence[str], seconds: float) -> Iterator[Tried]:
    """Tries strategies one after the other.

    Args:
      children: starts the processes.
      frameworks: what they run on.
      names: names of the strategies.
      seconds: deadline of each trial.
    """
    for declaration in DECLARATIONS:
        if declaration.name not in names:
            continue
        if not declaration.trials:
            yield Tried(declaration.name, None, Status.MISSING, reason=f"not tried here: it runs on {declaration.help}")
        for trial in declaration.trials:
            yield _tried(children, frameworks, declaration, trial, seconds)


def _tried(children: Children, frameworks: Frameworks, declaration: Declaration, trial: Trial, seconds: float) -> Tried:
    obstacle = frameworks.obstacle(trial)
    if obstacle:
        return Tried(declaration.name, trial, obstacle.status, reason=obstacle.text, remedy=obstacle.remedy)
    arguments = [*flags_of(declaration.name, trial), *_TRAINING]
    ended = children.run(
        "tfdist.verify", [*arguments, "--json"], trial.processes, seconds, variables_of(trial, frameworks)
    )
    launch = f"python -m tfdist.launch --processes={trial.processes} -- " if trial.processes > 1 else ""
    command = f"{launch}python -m tfdist.verify {shlex.join(arguments)}"
    status = Status.FAILED if ended.code else Status.OK
    return Tried(declaration.name, trial, status, ended.seconds, _reason(ended), command=command)


def flags_of(strategy: str, trial: Trial) -> list[str]:
    """Returns the flags of a trial that choose the engine."""
    return [f"--strategy={strategy}", *(f"--{name}={value}" for name, value in trial.options.items())]


def variables_of(trial: Trial, frameworks: Frameworks) -> dict[str, str]:
    """Returns variables for a trial: several replicas need a GPU each, or run on the CPU."""
    replicas = trial.processes * trial.devices
    return _WITHOUT_GPUS if 0 < frameworks.gpus < replicas else {}


def _reason(ended: Ended) -> str:
    if ended.code == ExitCode.FAILED and ended.reason.startswith("{"):  # it has ended with its result
        found = json.loads(ended.reason)
        equal = "" if found["replicas_equal"] else "its replicas differ; "
        return (
            f"{equal}its weights differ from those of one device by {found['largest_difference']} "
            f"({found['difference_unit']}; tolerance {found['tolerance']})"
        )
    return ended.reason
