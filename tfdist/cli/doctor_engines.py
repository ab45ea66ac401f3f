"""Checks of `tfdist doctor` that run in separate processes: frameworks, smoke tests of engines, and their speeds."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.cli.doctor_machine import Finding, Section, Status
from tfdist.cluster import keras_backend
from tfdist.config.strategy_registry import DECLARATIONS, SmokeTest
from tfdist.errors import SIGNAL_OFFSET, ExitCode, TfdistError, byte_size
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_runner import CapturedJobs, last_line, read_log
from tfdist.launcher.supervision import deadline


class ProgramResult(NamedTuple):
    """The result of running a program.

    Attributes:
      code: exit code of the process that caused a failure, or 0.
      reason: reason of a failure, as one line; empty for success.
      text: output of the process that caused a failure, or of rank 0.
      seconds: duration.
    """

    code: int
    reason: str
    text: str
    seconds: float


class Children(CapturedJobs):
    """Runs modules of tfdist, one at a time; removes all processes and files on exit."""

    def __init__(self) -> None:
        super().__init__("tfdist-doctor-")

    def run_module(
        self,
        module: str,
        arguments: Sequence[str],
        processes: int,
        seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        """Runs `python -m MODULE ...` in the processes of a job, which are killed after `seconds`, and waits for them.

        `variables` are added to the environment.
        """
        start = time.monotonic()
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, **(variables or {})}
        with self.new_directory() as logs:
            try:
                outcome = self.run(
                    Job(processes=processes), logs, lambda rank: command, environment, [deadline(seconds)]
                )
            except (TfdistError, OSError) as error:  # the program could not be started
                outcome = Outcome(ExitCode.FAILED, str(error))
            text = read_log(outcome.log or logs / "rank-0.log")
        reason = _failure_reason(outcome, text) if outcome.code else ""
        return ProgramResult(outcome.code, reason, text, time.monotonic() - start)


def _failure_reason(outcome: Outcome, text: str) -> str:
    """Returns the reason of a failure: the last line of output of the failed process, unless it was killed."""
    if outcome.rank is None or outcome.code > SIGNAL_OFFSET:
        return outcome.reason
    return last_line(text) or outcome.reason


_PROCESSES = 2  # number of processes for which the choice of `--communication=auto` is reported
_SIGILL_CODE = 132  # exit code: killed by SIGILL
_REBUILD = "tfdist install_horovod --force"
_REBUILD_FOR_OLD_CPUS = f'HOROVOD_BUILD_ARCH_FLAGS="-march=x86-64-v2" {_REBUILD}'


class Frameworks(NamedTuple):
    """The state of TensorFlow and Horovod.

    Attributes:
      problem: why TensorFlow cannot be used; empty if it can.
      gpus: number of TensorFlow's GPUs.
      horovod: the output of `horovod_probe`; None if Horovod is not installed or cannot be imported.
      horovod_problem: why Horovod cannot be used, if it is installed.
    """

    problem: str
    gpus: int
    horovod: Mapping[str, Any] | None
    horovod_problem: Finding | None

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
            text = f"not tried: only mpirun can start {self.horovod['mpi_library']}"
            return Finding(Status.MISSING, text, f"{add_build_tools(test.install)} --force")
        return None


def probe(children: Children, seconds: float) -> tuple[Frameworks, Section]:
    """Imports TensorFlow and Horovod in other processes, each with a deadline in seconds."""
    problem, remedy = keras_backend.problem(), keras_backend.REMEDY
    devices: list[str] = []
    if not problem:
        devices, problem = _devices(children, seconds)
        remedy = "pip install --force-reinstall tensorflow keras"
    horovod, horovod_problem = (None, None) if problem else _horovod(children, seconds)
    findings = [_device_finding(devices), *_horovod_findings(horovod), *filter(None, [horovod_problem])]
    if problem:
        findings = [Finding(Status.FAILED, f"TensorFlow and Keras cannot be used: {problem}", remedy)]
    return Frameworks(problem, len(devices), horovod, horovod_problem), Section("frameworks", findings)


def add_build_tools(install: str) -> str:
    """Returns a command that installs missing build tools and then runs `install`."""
    missing = [tool for tool in ("g++", "make") if not shutil.which(tool)]
    return f"apt install {' '.join(missing)} && {install}" if missing else install


def _devices(children: Children, seconds: float) -> tuple[list[str], str]:
    program = children.run_module("tfdist.cli.tensorflow_probe", (), 1, seconds)
    return ([], program.reason) if program.code else (last_json_object(program.text)["gpus"], "")


def _device_finding(gpus: Sequence[str]) -> Finding:
    if gpus:
        return Finding(Status.OK, f"TensorFlow's GPUs: {', '.join(gpus)}")
    if os.path.exists("/proc/driver/nvidia/version"):
        text = "this machine has NVIDIA's driver, but TensorFlow finds no GPU"
        return Finding(Status.WARNING, text, "pip install 'tensorflow[and-cuda]'")
    return Finding(Status.OK, "TensorFlow can be imported, and finds no GPU")


def _has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def _horovod(children: Children, seconds: float) -> tuple[dict[str, Any] | None, Finding | None]:
    if not _has_horovod():
        return None, None
    program = children.run_module("tfdist.cli.horovod_probe", [str(_PROCESSES)], 1, seconds)
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
    return [
        Finding(Status.OK, f"Horovod was built with {', '.join(names)}"),
        Finding(
            Status.OK,
            f"for {_PROCESSES} processes here, --communication=auto takes {choice['library']}, {choice['reason']}",
        ),
    ]


def last_json_object(text: str) -> dict[str, Any]:
    """Returns the last line that is a JSON object; frameworks may print other lines."""
    result: dict[str, Any] = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    return result


_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "-1"}


class SmokeTestResult(NamedTuple):
    """The result of a smoke test.

    Attributes:
      strategy: name of the strategy.
      test: the test; None if the strategy has none.
      status: whether the strategy works.
      reason: why the test failed or was not run, as one line; empty if it passed.
      remedy: the command that fixes a problem, if known.
      command: the command that repeats the test; empty if it was not run.
      program: the result of the command; None if it was not run.
    """

    strategy: str
    test: SmokeTest | None
    status: Status
    reason: str = ""
    remedy: str = ""
    command: str = ""
    program: ProgramResult | None = None

    @property
    def engine(self) -> str:
        """The strategy, with the library of its collectives if there are several."""
        return f"{self.strategy} over {self.test.library}" if self.test and self.test.library else self.strategy

    @property
    def flags(self) -> str:
        """The flags that select the engine; empty if it has no test."""
        return shlex.join(_flags(self.strategy, self.test)) if self.test else ""

    def finding(self, *columns: str) -> Finding:
        """Returns the line of the report that begins with `columns`, followed by the reason."""
        hint = f"To see its output: {self.command}" if self.status == Status.FAILED and self.command else ""
        return Finding(self.status, "  ".join([*columns, self.reason]).rstrip(), self.remedy or hint)

    def facts(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        test = self.test
        return {
            "strategy": self.strategy,
            "library": test.library or None if test else None,
            "processes": test.processes if test else None,
            "devices_per_process": test.devices if test else None,
            "flags": self.flags or None,
            "status": str(self.status),
            "seconds": self.program.seconds if self.program else None,
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

    `hidden_arguments` are passed to the command, but left out of `SmokeTestResult.command`.
    """
    if missing_requirement := frameworks.missing_requirement(test):
        return SmokeTestResult(
            strategy,
            test,
            missing_requirement.status,
            reason=missing_requirement.text,
            remedy=missing_requirement.remedy,
        )
    module, *arguments = [*command, *_flags(strategy, test)]
    all_arguments = [*arguments, *hidden_arguments, "--json"]
    program = children.run_module(module, all_arguments, test.processes, seconds, _variables(test, frameworks))
    launch = f"tfdist launch --processes={test.processes} -- " if test.processes > 1 else ""
    repeat_command = f"{launch}{module.replace('.', ' ')} {shlex.join(arguments)}"
    status = Status.FAILED if program.code else Status.OK
    return SmokeTestResult(strategy, test, status, program.reason, command=repeat_command, program=program)


def _flags(strategy: str, test: SmokeTest) -> list[str]:
    return [f"--strategy={strategy}", *(f"--{name}={value}" for name, value in test.options.items())]


def _variables(test: SmokeTest, frameworks: Frameworks) -> dict[str, str]:
    """Returns environment variables that hide the GPUs if there are too few for the replicas."""
    replicas = test.processes * test.devices
    return _WITHOUT_GPUS if 0 < frameworks.gpus < replicas else {}


_VERIFY = ("tfdist.verify", "--model=mlp(hidden=(8,))", "--dataset=synthetic:4x4x1", "--batch_size=8", "--steps=2")


def run_smoke_tests(
    children: Children, frameworks: Frameworks, names: Sequence[str], seconds: float
) -> Iterator[SmokeTestResult]:
    """Runs the smoke tests of strategies, each with a deadline in seconds."""
    for declaration in DECLARATIONS:
        if declaration.name not in names:
            continue
        if not declaration.smoke_tests:
            yield SmokeTestResult(
                declaration.name, None, Status.MISSING, reason=f"not tried here: it runs on {declaration.help}"
            )
        for test in declaration.smoke_tests:
            result = run_smoke_test(children, frameworks, declaration.name, test, _VERIFY, seconds)
            yield result._replace(reason=_smoke_test_reason(result.program)) if result.program else result


def smoke_test_finding(result: SmokeTestResult) -> Finding:
    """Returns the finding of a smoke test."""
    duration = [f"{result.program.seconds:.1f} s"] if result.program else []
    return result.finding(f"{_title(result):<39}", *duration)


def _title(result: SmokeTestResult) -> str:
    if result.test is None:
        return result.engine
    processes, devices = result.test.processes, result.test.devices
    parts = [f"{processes} processes"] if processes > 1 else []
    parts += [f"{devices} devices"] if devices > 1 else []
    parts += ["sharded"] if "shard" in result.test.options else []
    return ", ".join([result.engine, *parts])


def _smoke_test_reason(program: ProgramResult) -> str:
    if program.code == ExitCode.FAILED and program.reason.startswith("{"):  # the output of `tfdist verify`
        result = json.loads(program.reason)
        difference = "" if result["replicas_equal"] else "its replicas differ; "
        return (
            f"{difference}its weights differ from those of one device by {result['largest_difference']} "
            f"({result['difference_unit']}; tolerance {result['tolerance']})"
        )
    return program.reason


SIZES = (64 * 2**10, 4 * 2**20, 32 * 2**20)  # bytes: a small layer, a bucket of gradients, a large table
_BUCKET = SIZES[1]
_BENCHMARK = ("tfdist.bench", "collectives", "--operations=all_reduce", f"--sizes={','.join(map(str, SIZES))}")


def measure_speeds(
    children: Children, frameworks: Frameworks, names: Sequence[str], seconds: float
) -> Iterator[SmokeTestResult]:
    """Measures the engines of strategies, each with a deadline in seconds."""
    for declaration in DECLARATIONS:
        if declaration.name in names and "all_reduce" in (declaration.options or ()):
            for test in declaration.smoke_tests:
                if test.processes > 1 and "shard" not in test.options:  # sharding does not change all-reduces
                    with tempfile.TemporaryDirectory() as directory:
                        hidden_arguments = [f"--output_dir={directory}/bench"]
                        yield run_smoke_test(
                            children, frameworks, declaration.name, test, _BENCHMARK, seconds, hidden_arguments
                        )


def speed_finding(speed: SmokeTestResult) -> Finding:
    """Returns the finding of a measurement."""
    times = [f"{byte_size(size)} {1e3 * seconds:.3g} ms" for size, seconds in _all_reduce_seconds(speed).items()]
    return speed.finding(f"{speed.engine:<20}", *(f"{time:<16}" for time in times))


def speed_facts(speed: SmokeTestResult) -> dict[str, Any]:
    """Returns the measurements as JSON values."""
    measurements = [{"bytes": size, "seconds_median": seconds} for size, seconds in _all_reduce_seconds(speed).items()]
    return {**speed.facts(), "measurements": measurements}


def fastest_finding(speeds: Iterable[SmokeTestResult]) -> Finding | None:
    """Returns the fastest engine for a bucket of gradients, with its flags; None for fewer than two engines."""
    ranking = sorted(
        (speed for speed in speeds if _all_reduce_seconds(speed)), key=lambda speed: _all_reduce_seconds(speed)[_BUCKET]
    )
    if len(ranking) < 2:
        return None
    best, second, *_ = ranking
    ratio = _all_reduce_seconds(second)[_BUCKET] / _all_reduce_seconds(best)[_BUCKET]
    text = f"fastest for {byte_size(_BUCKET)}: {best.engine}, {ratio:.2g} times as fast as {second.engine}"
    return Finding(Status.OK, text, f"tfdist launch --processes=2 -- tfdist train {best.flags}")


def _all_reduce_seconds(speed: SmokeTestResult) -> dict[int, float]:
    """Returns the median seconds of an all-reduce for each of `SIZES`; empty without a measurement."""
    if speed.program is None or speed.program.code:
        return {}
    rows = last_json_object(speed.program.text)["measurements"]
    return {size: row["seconds_median"] for size, row in zip(SIZES, rows, strict=True)}
