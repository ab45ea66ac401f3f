"""Jobs whose processes are workers in this directory."""

import os
import pathlib
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from tests import processes


def command(worker: str, strategy: str, directory: str | os.PathLike[str], *arguments: str) -> list[str]:
    """Returns the command of each process; see `main.py`."""
    main = pathlib.Path(__file__).with_name("main.py")
    return [sys.executable, str(main), worker, strategy, str(directory), *arguments]


def launched(
    worker: str,
    strategy: str,
    size: int,
    directory: str | os.PathLike[str],
    *arguments: str,
    seconds: float,
    launcher: str = "tensorflow",
) -> list[Any]:
    """Runs a job of `tfdist launch`, as `outcomes` runs one."""
    launch = [sys.executable, "-m", "tfdist.launch", f"--processes={size}", f"--launcher={launcher}"]
    of_worker = command(worker, strategy, directory, *arguments)
    with processes.job([*launch, f"--log_dir={directory}", "--", *of_worker], 1) as job:
        [end] = job.wait(seconds)
    assert end.code == 0, end.output
    return read(directory, size)


def read(directory: str | os.PathLike[str], size: int) -> list[Any]:
    return [pickle.loads(pathlib.Path(directory, f"{rank}.pickle").read_bytes()) for rank in range(size)]


def outcomes(
    worker: str,
    strategy: str,
    size: int,
    directory: str | os.PathLike[str],
    *arguments: str,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs a job that must succeed within a time limit; returns the result of each rank."""
    with processes.job(command(worker, strategy, directory, *arguments), size, environment) as job:
        failed = [end.output for end in job.wait(seconds) if end.code]
    assert not failed, "\n".join(failed)
    return read(directory, size)
