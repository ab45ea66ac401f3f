"""Checks of `tfdist doctor` that run in separate processes: frameworks, and smoke tests of engines."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.cli.doctor_machine import Finding, Status
from tfdist.cluster import keras_backend
from tfdist.config.strategy_registry import DECLARATIONS, SmokeTest
from tfdist.errors import SIGNAL_OFFSET, ExitCode, TfdistError
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_runner import CapturedJobs, last_line, read_log
from tfdist.launcher.supervision import deadline


class ProgramResult(NamedTuple):
    """The result of running a program."""

    code: int  # exit code of the process that caused a failure, or 0
    reason: str  # reason of a failure, as one line; empty for success
    text: str  # output of the process that caused a failure, or of rank 0
    seconds: float  # duration


class ModuleRunner(CapturedJobs):
    """Runs modules of tfdist in processes, one module at a time. Removes all processes and files on exit."""

    def __init__(self) -> None:
        super().__init__("tfdist-doctor-")

    def run_module(
        self,
        module: str,
        arguments: Sequence[str],
        processes: int,
        timeout_seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        """Runs `python -m MODULE ...` in the processes of a job, waits for them, and kills them after `timeout_seconds`.

        `variables` are added to the environment.
        """
        start, job = time.monotonic(), Job(processes=processes)
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, **(variables or {})}
        with self.new_directory() as logs:
            try:
                outcome = self.run(job, logs, lambda rank: command, environment, [deadline(timeout_seconds)])
            except (TfdistError, OSError) as error:  # the program could not be started
                outcome = Outcome(ExitCode.FAILED, str(error))
            text = read_log(outcome.log or logs / "rank-0.log")
        # The last line of output of the failed process, unless it was killed.
        has_own_reason = outcome.code and outcome.rank is not None and outcome.code <= SIGNAL_OFFSET
        reason = (last_line(text) if has_own_reason else "") or outcome.reason
        return ProgramResult(outcome.code, reason, text, time.monotonic() - start)


_PROCESSES = 2  # number of processes for which the choice of `--communication=auto` is reported
_SIGILL_CODE = 132  # exit code: killed by SIGILL
_REBUILD = "tfdist install_horovod --force"
_REBUILD_FOR_OLD_CPUS = f'HOROVOD_BUILD_ARCH_FLAGS="-march=x86-64-v2" {_REBUILD}'


class Frameworks(NamedTuple):
    """The state of TensorFlow and Horovod."""

    problem: str  # why TensorFlow cannot be used; empty if it can
    gpus: int  # number of TensorFlow's GPUs
    # The output of `horovod_probe`; None if Horovod is not installed or cannot be imported.
    horovod: Mapping[str, Any] | None
    horovod_problem: Finding | None  # why Horovod cannot be used, if it is installed

    def missing_requirement(self, test: SmokeTest) -> Finding | None:
        """Returns why a smoke test cannot run, or None if it can."""
        if not test.package:
            return None
        if self.horovod_problem:
            return self.horovod_problem
        if self.horovod is None:
            return Finding(Status.MISSING, "Horovod is not installed", add_build_tools(test.install))
        if test.library not in self.horovod["libraries"]:
            return Finding(Status.MISSING, f"Horovod was built without {test.library}", add_build_tools(test.install))
        if test.library == "MPI" and not self.horovod["starts_without_mpirun"]:
            text = f"not tested: processes that use {self.horovod['mpi_library']} can be started only by mpirun"
            return Finding(Status.MISSING, text, f"{add_build_tools(test.install)} --force")
        return None


def probe(runner: ModuleRunner, timeout_seconds: float) -> tuple[Frameworks, list[Finding]]:
    """Imports TensorFlow and Horovod in other processes, each with a deadline in seconds."""
    problem, remedy = keras_backend.problem(), keras_backend.REMEDY
    devices: list[str] = []
    if not problem:
        program = runner.run_module("tfdist.cli.tensorflow_probe", (), 1, timeout_seconds)
        devices, problem = [] if program.code else last_json_object(program.text)["gpus"], program.reason
        remedy = "pip install --force-reinstall tensorflow keras"
    horovod, horovod_problem = (None, None) if problem else _horovod(runner, timeout_seconds)
    findings = [_device_finding(devices), *_horovod_findings(horovod), *filter(None, [horovod_problem])]
    if problem:
        findings = [Finding(Status.FAILED, f"TensorFlow and Keras cannot be used: {problem}", remedy)]
    return Frameworks(problem, len(devices), horovod, horovod_problem), findings


def add_build_tools(install: str) -> str:
    """Returns a command that installs missing build tools and then runs `install`."""
    missing = [tool for tool in ("g++", "make") if not shutil.which(tool)]
    return f"apt install {' '.join(missing)} && {install}" if missing else install


def _device_finding(gpus: Sequence[str]) -> Finding:
    if gpus:
        return Finding(Status.OK, f"TensorFlow's GPUs: {', '.join(gpus)}")
    if os.path.exists("/proc/driver/nvidia/version"):
        text = "this machine has NVIDIA's driver, but TensorFlow finds no GPU"
        return Finding(Status.WARNING, text, "pip install 'tensorflow[and-cuda]'")
    return Finding(Status.OK, "TensorFlow can be imported, and finds no GPU")


def _has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def _horovod(runner: ModuleRunner, timeout_seconds: float) -> tuple[dict[str, Any] | None, Finding | None]:
    if not _has_horovod():
        return None, None
    program = runner.run_module("tfdist.cli.horovod_probe", [str(_PROCESSES)], 1, timeout_seconds)
    if program.code:
        remedy = _REBUILD_FOR_OLD_CPUS if program.code == _SIGILL_CODE else _REBUILD
        return None, Finding(Status.FAILED, f"Horovod cannot be imported: {program.reason}", add_build_tools(remedy))
    return last_json_object(program.text), None


def _horovod_findings(horovod: Mapping[str, Any] | None) -> list[Finding]:
    if horovod is None:
        return []
    names = [horovod["mpi_library"] if name == "MPI" else name for name in horovod["libraries"]]
    choice = horovod["automatic"]
    if not choice["library"]:
        return [Finding(Status.WARNING, choice["reason"])]
    text = f"for {_PROCESSES} processes here, --communication=auto selects {choice['library']}, {choice['reason']}"
    return [Finding(Status.OK, f"Horovod was built with {', '.join(names)}"), Finding(Status.OK, text)]


def last_json_object(text: str) -> dict[str, Any]:
    """Returns the last line that is a JSON object; frameworks may print other lines."""
    result: dict[str, Any] = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    return result


_MODULE = "tfdist.verify"
_ARGUMENTS = ("--model=mlp(hidden=(8,))", "--dataset=synthetic:4x4x1", "--batch_size=8", "--steps=2")


class SmokeTestResult(NamedTuple):
    """The result of a smoke test."""

    strategy: str
    test: SmokeTest | None  # the test; None if the strategy has none
    status: Status  # whether the strategy works
    reason: str = ""  # why the test failed or was not run, as one line; empty if it passed
    remedy: str = ""  # the command that fixes a problem, if known
    command: str = ""  # the command that repeats the test; empty if it was not run
    seconds: float | None = None  # its duration; None if it was not run

    def finding(self) -> Finding:
        """Returns the line of the report."""
        duration = [] if self.seconds is None else [f"{self.seconds:.1f} s"]
        hint = f"To see its output: {self.command}" if self.status == Status.FAILED and self.command else ""
        parts = [f"{self.strategy} over {self.test.library}" if self.test and self.test.library else self.strategy]
        if self.test:
            parts += [f"{self.test.processes} processes"] if self.test.processes > 1 else []
            parts += [f"{self.test.devices} devices"] if self.test.devices > 1 else []
            parts += ["sharded"] if "shard" in self.test.options else []
        text = "  ".join([f"{', '.join(parts):<39}", *duration, self.reason]).rstrip()
        return Finding(self.status, text, self.remedy or hint)

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        test = self.test
        return {
            "strategy": self.strategy,
            "library": test.library or None if test else None,
            "processes": test.processes if test else None,
            "devices_per_process": test.devices if test else None,
            "flags": shlex.join(_flags(self.strategy, test)) if test else None,
            "status": str(self.status),
            "seconds": self.seconds,
            "reason": self.reason or None,
            "remedy": self.remedy or None,
            "command": self.command or None,
        }


def run_smoke_tests(
    runner: ModuleRunner, frameworks: Frameworks, names: Sequence[str], timeout_seconds: float
) -> Iterator[SmokeTestResult]:
    """Runs the smoke tests of strategies, each with a deadline in seconds."""
    for declaration in (entry for entry in DECLARATIONS if entry.name in names):
        if not declaration.smoke_tests:
            reason = f"not tested here: it runs on {declaration.help}"
            yield SmokeTestResult(declaration.name, None, Status.MISSING, reason)
        for test in declaration.smoke_tests:
            yield _run_smoke_test(runner, frameworks, declaration.name, test, timeout_seconds)


def _run_smoke_test(
    runner: ModuleRunner, frameworks: Frameworks, strategy: str, test: SmokeTest, timeout_seconds: float
) -> SmokeTestResult:
    """Runs `tfdist verify` on an engine, unless a requirement is missing."""
    if missing_requirement := frameworks.missing_requirement(test):
        return SmokeTestResult(strategy, test, *missing_requirement)
    arguments = [*_ARGUMENTS, *_flags(strategy, test)]
    # GPUs are hidden if there are too few for the replicas.
    variables = {"CUDA_VISIBLE_DEVICES": "-1"} if 0 < frameworks.gpus < test.processes * test.devices else {}
    program = runner.run_module(_MODULE, [*arguments, "--json"], test.processes, timeout_seconds, variables)
    launch = f"tfdist launch --processes={test.processes} -- " if test.processes > 1 else ""
    command = f"{launch}{_MODULE.replace('.', ' ')} {shlex.join(arguments)}"
    status = Status.FAILED if program.code else Status.OK
    return SmokeTestResult(strategy, test, status, _reason(program), command=command, seconds=program.seconds)


def _flags(strategy: str, test: SmokeTest) -> list[str]:
    return [f"--strategy={strategy}", *(f"--{name}={value}" for name, value in test.options.items())]


def _reason(program: ProgramResult) -> str:
    if program.code == ExitCode.FAILED and program.reason.startswith("{"):  # the output of `tfdist verify`
        result = json.loads(program.reason)
        difference = "" if result["replicas_equal"] else "its replicas differ; "
        return (
            f"{difference}its weights differ from those of one device by {result['largest_difference']} "
            f"({result['difference_unit']}; tolerance {result['tolerance']})"
        )
    return program.reason
