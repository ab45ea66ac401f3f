"""Checks of `tfdist doctor` that run in processes of their own: frameworks, a smoke test of each engine, and their speeds."""

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

from tfdist.cli.doctor_report import Finding, Section, Status
from tfdist.cluster import keras_backend
from tfdist.config.strategy_registry import DECLARATIONS, SmokeTest
from tfdist.errors import ExitCode, TfdistError, exceptions
from tfdist.errors.formatting import byte_size
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_runner import CapturedJobs, last_line, read_log
from tfdist.launcher.supervision import deadline


class Ended(NamedTuple):
    """The end of the processes of a program.

    Attributes:
      code: exit code of the process that caused a failure, or 0.
      reason: reason of a failure, as one line; empty if there is none.
      text: output of the process that caused a failure; that of rank 0 if none failed.
      seconds: duration.
    """

    code: int
    reason: str
    text: str
    seconds: float


class Children(CapturedJobs):
    """Runs programs of tfdist, one after the other; leaves no process and no file behind."""

    def __init__(self) -> None:
        super().__init__("tfdist-doctor-")

    def run_module(
        self,
        module: str,
        arguments: Sequence[str],
        processes: int,
        seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> Ended:
        """Runs `python -m MODULE ...` in one or several processes of a job, and waits for their end.

        Args:
          module: name of the module.
          arguments: its arguments.
          processes: number of processes.
          seconds: deadline, after which they are ended.
          variables: environment variables to add.
        """
        start = time.monotonic()
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, **(variables or {})}
        with self.new_directory() as logs:
            try:
                outcome = self.run(
                    Job(processes=processes), logs, lambda rank: command, environment, [deadline(seconds)]
                )
            except (TfdistError, OSError) as error:  # it could not be started
                outcome = Outcome(ExitCode.FAILED, str(error))
            text = read_log(outcome.log or logs / "rank-0.log")
        reason = _reason(outcome, text) if outcome.code else ""
        return Ended(outcome.code, reason, text, time.monotonic() - start)


def _reason(outcome: Outcome, text: str) -> str:
    """Returns the reason of a failure: the last line of the process that caused it, unless it was ended from outside."""
    if outcome.rank is None or outcome.code > exceptions.SIGNAL_OFFSET:
        return outcome.reason
    return last_line(text) or outcome.reason


_PROCESSES = 2  # for which the choice of `auto` is reported
_ILLEGAL = 132  # exit code: killed by SIGILL
_REBUILD = "tfdist install_horovod --force"
_REBUILD_FOR_OLDER = f'HOROVOD_BUILD_ARCH_FLAGS="-march=x86-64-v2" {_REBUILD}'


class Frameworks(NamedTuple):
    """TensorFlow and Horovod, as the engines use them.

    Attributes:
      problem: why TensorFlow cannot be used; empty if it can.
      gpus: number of its GPUs.
      horovod: what `horovod_probe` prints; None if Horovod is not installed or cannot be imported.
      horovod_problem: why Horovod cannot be used, if it is installed.
    """

    problem: str
    gpus: int
    horovod: Mapping[str, Any] | None
    horovod_problem: Finding | None

    def obstacle(self, test: SmokeTest) -> Finding | None:
        """Returns why a smoke test cannot be run, or None if it can."""
        if not test.package:
            return None
        if self.horovod_problem:
            return self.horovod_problem
        if self.horovod is None:
            return Finding(Status.MISSING, "Horovod is not installed", with_tools(test.install))
        if test.library not in self.horovod["libraries"]:
            return Finding(Status.MISSING, f"Horovod was built without {test.library}", with_tools(test.install))
        if test.library == "MPI" and not self.horovod["starts_without_mpirun"]:
            text = f"not tried: only mpirun can start {self.horovod['mpi_library']}"
            return Finding(Status.MISSING, text, f"{with_tools(test.install)} --force")
        return None


def probe(children: Children, seconds: float) -> tuple[Frameworks, Section]:
    """Imports TensorFlow and Horovod in other processes.

    Args:
      children: starts the processes.
      seconds: deadline of each import.
    """
    problem, remedy = keras_backend.problem(), keras_backend.REMEDY
    devices: list[str] = []
    if not problem:
        devices, problem = _devices(children, seconds)
        remedy = "pip install --force-reinstall tensorflow keras"
    horovod, horovod_problem = (None, None) if problem else _horovod(children, seconds)
    findings = [_device_finding(devices), *_horovod_findings(horovod), *filter(None, [horovod_problem])]
    if problem:
        findings = [Finding(Status.FAILED, f"TensorFlow and Keras cannot be used: {problem}", remedy)]
    facts = {
        "tensorflow_problem": problem or None,
        "gpus": devices,
        "horovod": horovod,
        "horovod_problem": horovod_problem.text if horovod_problem else None,
    }
    return Frameworks(problem, len(devices), horovod, horovod_problem), Section("frameworks", facts, findings)


def with_tools(install: str) -> str:
    """Returns a command that installs Horovod, after one that installs the missing tools of its build, if any."""
    missing = [tool for tool in ("g++", "make") if not shutil.which(tool)]
    return f"apt install {' '.join(missing)} && {install}" if missing else install


def _devices(children: Children, seconds: float) -> tuple[list[str], str]:
    """Returns the names of TensorFlow's GPUs, and why TensorFlow cannot be used, if it cannot."""
    ended = children.run_module("tfdist.cli.tensorflow_probe", (), 1, seconds)
    return ([], ended.reason) if ended.code else (last_object(ended.text)["gpus"], "")


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
    ended = children.run_module("tfdist.cli.horovod_probe", [str(_PROCESSES)], 1, seconds)
    if ended.code:
        remedy = _REBUILD_FOR_OLDER if ended.code == _ILLEGAL else _REBUILD
        return None, Finding(Status.FAILED, f"Horovod cannot be imported: {ended.reason}", with_tools(remedy))
    return last_object(ended.text), None


def _horovod_findings(horovod: Mapping[str, Any] | None) -> list[Finding]:
    if horovod is None:
        return []
    names = [horovod["mpi_library"] if name == "MPI" else name for name in horovod["libraries"]]
    automatic = horovod["automatic"]
    if not automatic["library"]:
        return [Finding(Status.WARNING, automatic["reason"])]
    return [
        Finding(Status.OK, f"Horovod was built with {', '.join(names)}"),
        Finding(
            Status.OK,
            f"for {_PROCESSES} processes here, --communication=auto takes {automatic['library']}, {automatic['reason']}",
        ),
    ]


def last_object(text: str) -> dict[str, Any]:
    """Returns the JSON object in the last line that has one; a framework may print other lines."""
    result: dict[str, Any] = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    return result


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


_VERIFY = ("tfdist.verify", "--model=mlp(hidden=(8,))", "--dataset=synthetic:4x4x1", "--batch_size=8", "--steps=2")


def run_smoke_tests(
    children: Children, frameworks: Frameworks, names: Sequence[str], seconds: float
) -> Iterator[SmokeTestResult]:
    """Tests strategies one after the other.

    Args:
      children: starts the processes.
      frameworks: TensorFlow and Horovod on this machine.
      names: names of the strategies.
      seconds: deadline of each smoke test.
    """
    for declaration in DECLARATIONS:
        if declaration.name not in names:
            continue
        if not declaration.smoke_tests:
            yield SmokeTestResult(
                declaration.name, None, Status.MISSING, reason=f"not tried here: it runs on {declaration.help}"
            )
        for test in declaration.smoke_tests:
            result = run_smoke_test(children, frameworks, declaration.name, test, _VERIFY, seconds)
            yield result._replace(reason=_smoke_test_reason(result.ended)) if result.ended else result


def smoke_test_finding(result: SmokeTestResult) -> Finding:
    """Returns the line of a smoke test in the report."""
    duration = [f"{result.ended.seconds:.1f} s"] if result.ended else []
    return result.finding(f"{_title(result):<39}", *duration)


def _title(result: SmokeTestResult) -> str:
    """Returns the engine, and the processes and devices of its test."""
    if result.test is None:
        return result.engine
    processes, devices = result.test.processes, result.test.devices
    parts = [f"{processes} processes"] if processes > 1 else []
    parts += [f"{devices} devices"] if devices > 1 else []
    parts += ["sharded"] if "shard" in result.test.options else []
    return ", ".join([result.engine, *parts])


def _smoke_test_reason(ended: Ended) -> str:
    if ended.code == ExitCode.FAILED and ended.reason.startswith("{"):  # it has ended with its result
        result = json.loads(ended.reason)
        equal = "" if result["replicas_equal"] else "its replicas differ; "
        return (
            f"{equal}its weights differ from those of one device by {result['largest_difference']} "
            f"({result['difference_unit']}; tolerance {result['tolerance']})"
        )
    return ended.reason


SIZES = (64 * 2**10, 4 * 2**20, 32 * 2**20)  # bytes: a small layer, a bucket of gradients, a large table
_BUCKET = SIZES[1]
_BENCHMARK = ("tfdist.bench", "collectives", "--operations=all_reduce", f"--sizes={','.join(map(str, SIZES))}")


def measure_speeds(
    children: Children, frameworks: Frameworks, names: Sequence[str], seconds: float
) -> Iterator[SmokeTestResult]:
    """Measures one engine after the other, with two processes each.

    Args:
      children: starts the processes.
      frameworks: TensorFlow and Horovod on this machine.
      names: names of the strategies.
      seconds: deadline of each measurement.
    """
    for declaration in DECLARATIONS:
        if declaration.name in names and "all_reduce" in (declaration.options or ()):
            for test in declaration.smoke_tests:
                if test.processes > 1 and "shard" not in test.options:  # which does not change an all-reduce
                    with tempfile.TemporaryDirectory() as directory:
                        hidden = [f"--output_dir={directory}/bench"]
                        yield run_smoke_test(children, frameworks, declaration.name, test, _BENCHMARK, seconds, hidden)


def speed_finding(speed: SmokeTestResult) -> Finding:
    """Returns a measurement's line of the report."""
    times = [f"{byte_size(size)} {1e3 * each:.3g} ms" for size, each in _all_reduce_seconds(speed).items()]
    return speed.finding(f"{speed.engine:<20}", *(f"{time:<16}" for time in times))


def speed_facts(speed: SmokeTestResult) -> dict[str, Any]:
    """Returns values of JSON."""
    measurements = [{"bytes": size, "seconds_median": each} for size, each in _all_reduce_seconds(speed).items()]
    return {**speed.facts(), "measurements": measurements}


def fastest(speeds: Iterable[SmokeTestResult]) -> Finding | None:
    """Returns the fastest engine for a bucket of gradients, with its flags; None if there is no choice."""
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
    """Returns the median seconds of an all-reduce for each of `SIZES`; empty if it failed or was not measured."""
    if speed.ended is None or speed.ended.code:
        return {}
    rows = last_object(speed.ended.text)["measurements"]
    return {size: row["seconds_median"] for size, row in zip(SIZES, rows, strict=True)}
