"""Smoke tests of engines: a command of tfdist runs on an engine, in separate processes."""

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfdist.config.strategy_registry import SmokeTest
from tfdist.machine.children import Children, Ended
from tfdist.machine.frameworks import Frameworks
from tfdist.machine.report import Finding, Status

_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "-1"}


class SmokeTestResult(NamedTuple):
    """The result of a smoke test.

    Attributes:
      strategy: name of the strategy.
      test: the test; None if the strategy has none.
      status: whether it works.
      reason: why it failed or was not run, as one line; empty if it works.
      remedy: the command that fixes it, if known.
      command: the command that repeats it; empty if it was not run.
      ended: the end of its processes; None if it was not run.
    """

    strategy: str
    test: SmokeTest | None
    status: Status
    reason: str = ""
    remedy: str = ""
    command: str = ""
    ended: Ended | None = None

    @property
    def engine(self) -> str:
        """The strategy, and the library of its collectives if it has a choice."""
        return f"{self.strategy} over {self.test.library}" if self.test and self.test.library else self.strategy

    @property
    def flags(self) -> str:
        """The flags that choose the engine; empty if it cannot be tried here."""
        return shlex.join(_flags(self.strategy, self.test)) if self.test else ""

    def finding(self, *columns: str) -> Finding:
        """Returns its line of the report.

        Args:
          *columns: the beginning of the line, to which the reason is added.
        """
        repeat = f"To see its output: {self.command}" if self.status == Status.FAILED and self.command else ""
        return Finding(self.status, "  ".join([*columns, self.reason]).rstrip(), self.remedy or repeat)

    def facts(self) -> dict[str, Any]:
        """Returns values of JSON."""
        test = self.test
        return {
            "strategy": self.strategy,
            "library": test.library or None if test else None,
            "processes": test.processes if test else None,
            "devices_per_process": test.devices if test else None,
            "flags": self.flags or None,
            "status": str(self.status),
            "seconds": self.ended.seconds if self.ended else None,
            "reason": self.reason or None,
            "remedy": self.remedy or None,
            "command": self.command or None,
        }


def run_smoke_test(
    children: Children,
    frameworks: Frameworks,
    strategy: str,
    test: SmokeTest,
    command: Sequence[str],
    seconds: float,
    hidden_arguments: Sequence[str] = (),
) -> SmokeTestResult:
    """Runs a command on an engine, unless a requirement is missing.

    Args:
      children: starts the processes.
      frameworks: TensorFlow and Horovod on this machine.
      strategy: name of the strategy.
      test: the test.
      command: name of the module, and its arguments.
      seconds: deadline.
      hidden_arguments: arguments besides `--json` that are left out in the command that repeats it.
    """
    if obstacle := frameworks.obstacle(test):
        return SmokeTestResult(strategy, test, obstacle.status, reason=obstacle.text, remedy=obstacle.remedy)
    module, *arguments = [*command, *_flags(strategy, test)]
    all_arguments = [*arguments, *hidden_arguments, "--json"]
    ended = children.run_module(module, all_arguments, test.processes, seconds, _variables(test, frameworks))
    launch = f"tfdist launch --processes={test.processes} -- " if test.processes > 1 else ""
    repeated = f"{launch}{module.replace('.', ' ')} {shlex.join(arguments)}"
    status = Status.FAILED if ended.code else Status.OK
    return SmokeTestResult(strategy, test, status, ended.reason, command=repeated, ended=ended)


def _flags(strategy: str, test: SmokeTest) -> list[str]:
    return [f"--strategy={strategy}", *(f"--{name}={value}" for name, value in test.options.items())]


def _variables(test: SmokeTest, frameworks: Frameworks) -> dict[str, str]:
    """Returns variables for a smoke test: several replicas need a GPU each, or run on the CPU."""
    replicas = test.processes * test.devices
    return _WITHOUT_GPUS if 0 < frameworks.gpus < replicas else {}
