"""Jobs of the tests of Horovod's API: how their ranks are started, and the results that they print."""

import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests import processes

Outcomes = list[dict[str, Any]]  # of each rank

ENVIRONMENT = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
STALL_SECONDS = 30  # with Horovod; under load, a rank may lag the others by more than 8 seconds
FLOATS = ("float16", "bfloat16", "float32", "float64")
REDUCED = ("uint8", "int8", "int32", "int64", *FLOATS)
MOVED = (*REDUCED, "uint16", "int16", "bool", "uint32")
IN_GRAPHS = ("bfloat16", "float32", "int64", "bool")  # others only eagerly: a graph has the same operation

_HERE = pathlib.Path(__file__).parent
WITHOUT_HOROVOD = str(_HERE / "without_horovod.py")
_OPERATIONS = str(_HERE / "operations_worker.py")
_STALL = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_ADDED_SETS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # beside those with which it starts
_OVER_MPI = {"TFDIST_COMMUNICATION": "mpi", **_ADDED_SETS}
_DIFFERS_BY_LIBRARY = ("in_sets", "some_dtypes", "shapes", "process_sets", "joined", "skipped")
_ENGINES: dict[str, tuple[int, list[str], dict[str, str]]] = {
    "horovod": (3, [_OPERATIONS], _ADDED_SETS),
    "mpi": (3, [_OPERATIONS], _OVER_MPI),
    "mpi, in short": (3, [_OPERATIONS, *_DIFFERS_BY_LIBRARY], _OVER_MPI),
    "without": (2, [WITHOUT_HOROVOD, _OPERATIONS], {_STALL: "8"}),
}


def launched(command: Sequence[str], *flags: str, launcher: str = "horovod") -> list[str]:
    """Returns the command that starts two ranks of a command of Python."""
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", f"--launcher={launcher}", *flags, "--"]
    return [*launch, sys.executable, *command]


def results(command: Sequence[str], size: int, variables: Mapping[str, str] | None = None) -> Outcomes:
    """Runs ranks of a command of Python, all of which must succeed; returns what each prints as a line of JSON."""
    ours = {_STALL: str(STALL_SECONDS), "PYTHONPATH": str(_HERE.parents[1])}
    environment = {**ENVIRONMENT, **ours, **(variables or {})}
    with processes.job([sys.executable, *command], size, environment) as job:
        ended = job.wait(300)
    assert [end.code for end in ended] == [0] * size, "\n".join(end.output for end in ended)
    return [json.loads([line for line in end.output.splitlines() if line.startswith("{")][-1]) for end in ended]


@functools.cache
def outcomes(engine: str) -> Outcomes:
    """Runs the operations on an engine, once: "horovod" (over Gloo), "mpi", "mpi, in short" or "without" Horovod."""
    size, command, variables = _ENGINES[engine]
    return results(command, size, variables)
