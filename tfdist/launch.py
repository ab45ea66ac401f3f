"""Starts the processes of a job on this host: python -m tfdist.launch --processes=2 -- python -m tfdist.train ...

On several hosts, run the same command on each, with --nodes, --coordinator, and a --node_rank of its own. An elastic job,
--processes=MIN:MAX, goes on with fewer processes when one dies, and with more when there is room again.
"""

import contextlib
import dataclasses
import os
import sys
from typing import Any

from absl import flags

from tfdist.cli import command
from tfdist.errors import InputError
from tfdist.launcher import running, signals
from tfdist.launcher.engines import ENGINES
from tfdist.launcher.job import Job
from tfdist.launcher.restarts import VAIN, VAIN_LATER

_HELP = {
    "processes": "How many processes to start on this host; or MIN:MAX, of all hosts together: as many as --hosts has slots"
    " for. When one dies the others go on.",
    "hosts": "With --processes=MIN:MAX: a file of lines NAME:SLOTS, or a program that prints them; read again each second.",
    "launcher": f"How the processes find each other: {' or '.join(ENGINES)}.",
    "nodes": "How many hosts the job has; this command runs on each.",
    "node_rank": "This host's number, from 0 to --nodes - 1.",
    "coordinator": "host:port at which the launcher of node 0, or of the host that decides for an elastic job, can listen; the"
    " same on every host.",
    "start_timeout_seconds": "How long to wait for the other hosts' launchers, and for ranks that do not come.",
    "log_dir": "Where each rank's output is written as rank-N.log; by default a new directory under runs/.",
    "grace_seconds": "How long the processes may take to save and end when this command gets SIGTERM or Ctrl-C.",
    "max_restarts": "How many times all processes are started again when one fails; by default 0, or, for MIN:MAX, without"
    " limit. Final are codes 2 and 3, replicas that have drifted, a second failure in a row after the same step, and, without"
    f" limit, {VAIN} in a row before training began, or {VAIN_LATER} before it goes on. Not with --nodes.",
    "max_preemptions": "The same when all end with code 75, or one by a SIGTERM that this command has not sent.",
    "restart_backoff_seconds": "The pause before a restart; it doubles with each failure, up to 60, and with each preemption"
    " before training began.",
    "rejoin_seconds": "With MIN:MAX: after which another process may take the place of one that died; it doubles each time,"
    " up to an hour. 0: at once, as always where fewer than MIN would be left; inf: never.",
    "elastic_timeout_seconds": "With MIN:MAX: how long to wait while fewer than MIN can run; 0: for ever.",
}
_DEFINE = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    type(None): flags.DEFINE_integer,
}
_FIELDS = [field for field in dataclasses.fields(Job) if field.name != "min_processes"]  # which --processes has, too


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags: the fields of a `Job`."""
    for field in _FIELDS:
        default = "2" if field.name == "processes" else field.default
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
    said: dict[str, Any] = {field.name: values[field.name].value for field in _FIELDS}
    job = Job(**said | parse_processes(said["processes"]))
    outcome = running.run(job, lambda rank: arguments, os.environ, interrupts=signals.received(), say=_say)
    if outcome.code:
        _say(f"{outcome.reason}." + (f" Its log: {outcome.log}" if outcome.log else ""))
    command.flush(may_lose=True)  # the code is the job's, also where its output has found no room
    return outcome.code


def parse_processes(text: str) -> dict[str, int]:
    """Reads --processes: N, or MIN:MAX; returns the fields of a `Job`.

    Raises:
      InputError: it is neither.
    """
    least, _, most = text.rpartition(":")
    if not most.isdecimal() or not (least.isdecimal() or most == text):
        raise InputError(f'--processes must be a number, or MIN:MAX. Received: "{text}".')
    if least and int(least) < 1:
        raise InputError(f'--processes=MIN:MAX needs a MIN of at least 1. Received: "{text}".')
    return {"processes": int(most), "min_processes": int(least or 0)}


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed, and there is a job to be seen to its end
        print(f"tfdist.launch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(command.run("launch", define_flags, main, about=__doc__.partition(":")[0] + ".", arguments="-- COMMAND"))
