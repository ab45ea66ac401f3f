"""Starts the processes of a job on this host: python -m tfdist.launch --processes=2 -- python -m tfdist.train ...

On several hosts, run the same command on each, with --nodes, --coordinator, and a --node_rank of its own.
"""

import dataclasses
import os
import sys
from typing import Any

from absl import flags

from tfdist import command
from tfdist.errors import InputError
from tfdist.launching import running, signals
from tfdist.launching.engines import ENGINES
from tfdist.launching.job import Job

_HELP = {
    "processes": "How many processes to start on this host.",
    "launcher": f"How the processes find each other: {' or '.join(ENGINES)}.",
    "nodes": "How many hosts the job has; this command runs on each.",
    "node_rank": "This host's number, from 0 to --nodes - 1.",
    "coordinator": "host:port of node 0 at which its launcher can listen; the same on every host.",
    "start_timeout_seconds": "How long to wait for the other hosts' launchers, and for ranks that do not come.",
    "log_dir": "Where each rank's output is written as rank-N.log; by default a new directory under runs/.",
    "grace_seconds": "How long the processes may take to save and end when this command gets SIGTERM or Ctrl-C.",
    "max_restarts": "How many times all processes are started again when one fails. Codes 2 and 3 are final, and so is"
    " a second failure in a row after the same step. On one host only.",
    "max_preemptions": "How many times all processes are started again when all end with code 75. On one host only.",
    "restart_backoff_seconds": "The pause before a restart; it doubles with each failure, up to 60.",
}
_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags: the fields of a `Job`."""
    for field in dataclasses.fields(Job):
        default = 2 if field.name == "processes" else field.default
        _DEFINE[type(default)](field.name, default, _HELP[field.name], flag_values=values)  # type: ignore[operator]


def main(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs the job that the flags describe.

    Args:
      values: parsed.
      arguments: the command, which every rank runs.

    Returns:
      The exit code of the process that was the cause of a failure, or 0.
    """
    if not arguments:
        raise InputError("The command to start must follow: tfdist.launch --processes=2 -- python -m tfdist.train ...")
    said: dict[str, Any] = {field.name: values[field.name].value for field in dataclasses.fields(Job)}
    job = Job(**said)
    outcome = running.run(job, lambda rank: arguments, os.environ, interrupts=signals.received(), say=_say)
    if outcome.code:
        _say(f"{outcome.reason}." + (f" Its log: {outcome.log}" if outcome.log else ""))
    return outcome.code


def _say(line: str) -> None:
    print(f"tfdist.launch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(command.run("launch", define_flags, main, about=__doc__.partition(":")[0] + ".", arguments="-- COMMAND"))
