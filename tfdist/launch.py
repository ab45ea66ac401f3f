"""Start the processes of a job on this host: tfdist launch --processes=2 -- tfdist train ...

On several hosts, run the same command on each, with --nodes, --coordinator, and its own --node_rank. An elastic job,
--processes=MIN:MAX, continues with fewer processes when one fails, and with more when slots become available again.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
from typing import Any

from absl import flags

from tfdist.cli import command
from tfdist.cli.flags import define_flag
from tfdist.cluster.signals import is_at_terminal
from tfdist.errors import ExitCode, InputError
from tfdist.launcher import job_runner
from tfdist.launcher.engine_environment import ENGINES
from tfdist.launcher.job import Job
from tfdist.launcher.job_controller import MAX_EARLY_FAILURES, MAX_LATER_FAILURES


def check_program(name: str) -> None:
    """Raises `InputError` if a program cannot be started, before the launcher creates logs and connects to hosts."""
    if not shutil.which(name):
        remedy = f"Use python {name}" if name.endswith(".py") else "Correct the name, or specify the path"
        raise InputError(
            f'The command must be a program that can be started. Received: "{name}", which is not an executable file on the '
            f"PATH. {remedy}."
        )


_HELP = {  # the flags of a topic one after the other
    "processes": "Number of processes to start on this host. For an elastic job, pass MIN:MAX, the limits of the total over "
    "all hosts: as many processes run as --hosts has slots for, and if one fails, the others continue.",
    "servers": "Number of parameter servers to start besides these processes, for --strategy=parameter_server.",
    "evaluator": "Also start an evaluator: `tfdist train` in it evaluates each checkpoint on the CPU during training.",
    "launcher": f"Environment to set up for the processes: {' or '.join(ENGINES)}.",
    "log_dir": "Directory for the output of each rank, rank-N.log. Defaults to a new directory under runs/.",
    "grace_seconds": "Seconds that processes may take to save and exit when this command receives SIGTERM or Ctrl-C, when "
    "another process has exited with code 75, or when an elastic job is resized.",
    "nodes": "Number of hosts of the job; this command runs on each of them.",
    "node_rank": "Rank of this host, from 0 to --nodes - 1.",
    "coordinator": "HOST:PORT on which the launcher of node 0, or of one host of an elastic job, listens. Must be "
    "the same on every host.",
    "token_file": "File with the token that the launchers of several hosts share, if TFDIST_TOKEN is not set. Its mode must be "
    "0600.",
    "insecure": "Run a job on several hosts without a token: anyone who can reach the coordinator can join it.",
    "start_timeout_seconds": "Seconds to wait for the launchers of the other hosts, and for ranks that do not start.",
    "max_restarts": "Maximum number of restarts of all processes after a failure. Defaults to 0, or to no limit for "
    "MIN:MAX. No restart follows exit codes 2 and 3, diverged replicas, two failures in a row after the same step, "
    f"and, without a limit, {MAX_EARLY_FAILURES} failures in a row before training begins, or {MAX_LATER_FAILURES} "
    "before it makes progress. Not supported with --nodes.",
    "max_preemptions": "Maximum number of restarts after preemption: processes exit with code 75 and none fails, or an "
    "external SIGTERM ends one. Defaults to 0, or to no limit for MIN:MAX. Not supported with --nodes.",
    "restart_backoff_seconds": "Seconds to wait before a restart. Doubles with each failure, up to 60, and with each "
    "preemption before training begins.",
    "hosts": "For an elastic job: a file of lines NAME:SLOTS, or a program that prints them. Read again every second.",
    "rejoin_seconds": "For an elastic job: seconds before a failed process is replaced. Doubles each time, up to an "
    "hour. 0 replaces it at once, as is always done if fewer than MIN would remain; inf never replaces it. With "
    "parameter servers: seconds after the loss of a worker until all processes save and restart with it.",
    "elastic_timeout_seconds": "For an elastic job: seconds to wait while fewer than MIN processes can run. 0 waits forever.",
}
_TOPICS = {"processes": "Processes", "nodes": "Several hosts", "max_restarts": "Restarts", "hosts": "Elastic jobs"}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Job)} | {"processes": "2"}  # N or MIN:MAX


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags: the fields of a `Job`."""
    topic = ""
    for name, text in _HELP.items():
        topic, default = _TOPICS.get(name, topic), _DEFAULTS[name]
        kind = int if default is None else type(default)
        choices = tuple(ENGINES) if name == "launcher" else ()  # validated by `Job`
        define_flag(values, topic, kind, name, default, text, choices)


def main(arguments: list[str], values: flags.FlagValues) -> int:
    """Runs the job described by the flags.

    Returns:
      The exit code of the process that caused a failure, or 0; 130 if Ctrl-C interrupted a job that saved a checkpoint.
    """
    if not arguments:
        raise InputError("The command to start must follow the flags: tfdist launch --processes=2 -- tfdist train ...")
    fields: dict[str, Any] = {name: values[name].value for name in _HELP}
    fields |= parse_processes(fields["processes"])
    job = Job(**fields | {"processes": fields["processes"] + fields["servers"]})
    directory = os.path.dirname(os.path.abspath(sys.executable))
    os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    check_program(arguments[0])
    received_signals: list[int] = []
    outcome = job_runner.run(job, lambda rank: arguments, os.environ, signals=received_signals, say=_print_line)
    is_ctrl_c = outcome.code == ExitCode.PREEMPTED and received_signals[:1] == [signal.SIGINT] and is_at_terminal()
    if is_ctrl_c:
        _print_line("Interrupted: all ranks have saved. Resume with the same command and the same --output_dir.")
    elif outcome.code:
        _print_line(f"{outcome.reason}." + (f" Its log: {outcome.log}" if outcome.log else ""))
    command.flush(ignore_errors=True)  # the exit code is the job's even if its output could not be written
    return command.INTERRUPTED if is_ctrl_c else outcome.code


def parse_processes(text: str) -> dict[str, int]:
    """Parses --processes, N or MIN:MAX, and returns the fields of a `Job`."""
    minimum, _, maximum = text.rpartition(":")
    if not maximum.isdecimal() or not (minimum.isdecimal() or maximum == text):
        raise InputError(f'--processes must be a number, or MIN:MAX. Received: "{text}".')
    if minimum and int(minimum) < 1:
        raise InputError(f'--processes=MIN:MAX needs a MIN of at least 1. Received: "{text}".')
    return {"processes": int(maximum), "min_processes": int(minimum or 0)}


def _print_line(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"tfdist launch: {line}", file=sys.stderr, flush=True)


_EXAMPLES = (
    "tfdist launch --processes=2 -- tfdist train --model=mlp --epochs=2 --output_dir=runs/two",
    "tfdist launch --launcher=horovod -- tfdist train --model=mlp --epochs=2 --output_dir=runs/ring",
)

if __name__ == "__main__":
    about = __doc__.partition(":")[0] + "."
    sys.exit(command.run("launch", define_flags, main, about=about, arguments="-- COMMAND", examples=_EXAMPLES))
