"""List the checkpoints of a run and verify every byte: which of them a run can resume from. Changes nothing."""

import sys
import time
from typing import Any

from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, checkpoints_at
from tfdist.checkpoint.format.manifest import NAME
from tfdist.cli import command
from tfdist.errors import CheckpointError, ExitCode, InputError
from tfdist.storage import StoragePath, storage_of


def main(run: str) -> int:
    """Prints a line for each checkpoint, the newest first; returns the exit code."""
    found = [path for path in checkpoints_at(run) if storage_of(path).exists(path)]
    if not found:
        raise InputError(f"The directory must be that of a run with checkpoints, or of a checkpoint. Received: {run}.")
    problems = [_looked_at(path) for path in found]
    return ExitCode.FAILED if any(problems) else ExitCode.DONE


def _looked_at(path: StoragePath) -> str:
    """Prints a description of a checkpoint; returns what is wrong with it, or ""."""
    problem, described = "", ""
    try:
        checkpoint = Checkpoint.open(path)
        described = _described(checkpoint)
        checkpoint.verify()
    except CorruptCheckpointError as damaged:
        problem = f"{str(damaged.path).rpartition('/')[2]}: {damaged.problem}"
    except (CheckpointError, InputError, OSError) as error:
        problem = str(error)
    if problem and not storage_of(path).exists(path):  # a running job has removed it meanwhile
        return ""
    print(f"{path.name}  {'bad ' if problem else 'good'}  {described}".rstrip())
    if problem:
        print(f"  {problem}")
    return problem


def _described(checkpoint: Checkpoint) -> str:
    path, storage = checkpoint.path, storage_of(checkpoint.path)
    files = {entry.name: storage.info(path / entry.name) for entry in storage.entries(path)}
    manifest = files[NAME]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.modified if manifest else 0))
    size = sum(file.size for file in files.values() if file)
    parts = [written, f"{size / 1e6:.1f} MB", f"{len(checkpoint.tensors)} tensors"]
    if strategy := checkpoint.flags.get("strategy"):
        parts.append(f"by {strategy}")
    return "  ".join(parts)


def _run(values: Any, arguments: list[str]) -> int:
    return main(command.only(arguments, "tfdist.checkpoints takes one directory.", "Give the directory of a run."))


if __name__ == "__main__":
    sys.exit(command.run("checkpoints", lambda values: None, _run, about=__doc__ or "", arguments="RUN"))
