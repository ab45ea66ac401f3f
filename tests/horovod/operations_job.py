"""The jobs of the tests of operations, one for each engine."""

import functools
import json
import pathlib
import sys
from typing import Any

from tests import processes

Outcomes = list[dict[str, Any]]  # of each rank

STALL_SECONDS = 30  # with Horovod; under load, a rank may lag the others by more than 8 seconds

_HERE = pathlib.Path(__file__).parent
_WORKER = str(_HERE / "operations_worker.py")
_STALL = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_ENVIRONMENT = {
    "PYTHONPATH": str(_HERE.parents[1]),
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    _STALL: str(STALL_SECONDS),
}
_OVER_MPI = {"TFDIST_COMMUNICATION": "mpi"}
_DIFFERS_BY_LIBRARY = ("some_dtypes", "shapes", "process_sets", "joined", "skipped")
_ENGINES: dict[str, tuple[int, list[str], dict[str, str]]] = {
    "horovod": (3, [_WORKER], {}),
    "mpi": (3, [_WORKER], _OVER_MPI),
    "mpi, in short": (3, [_WORKER, *_DIFFERS_BY_LIBRARY], _OVER_MPI),
    "without": (2, [str(_HERE / "without_horovod.py"), _WORKER], {_STALL: "8"}),
}


@functools.cache
def outcomes(engine: str) -> Outcomes:
    """Runs the job of an engine, once: "horovod" (over Gloo), "mpi", "mpi, in short" or "without" Horovod."""
    size, command, variables = _ENGINES[engine]
    with processes.job([sys.executable, *command], size, {**_ENVIRONMENT, **variables}) as job:
        ended = job.wait(300)
    assert [end.code for end in ended] == [0] * size, "\n".join(end.output for end in ended)
    return [json.loads(next(x for x in end.output.splitlines() if x.startswith('{"who"'))) for end in ended]
