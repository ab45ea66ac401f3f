"""TensorFlow and Horovod on this machine: whether they can be imported, their devices, and the choice of `auto`."""

import importlib.util
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.cluster import keras_backend
from tfdist.config.strategy_registry import SmokeTest
from tfdist.machine.children import Children
from tfdist.machine.report import Finding, Section, Status

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
    ended = children.run_module("tfdist.machine.tensorflow_probe", (), 1, seconds)
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
    ended = children.run_module("tfdist.machine.horovod_probe", [str(_PROCESSES)], 1, seconds)
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
