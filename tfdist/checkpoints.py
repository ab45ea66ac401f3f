"""List the checkpoints of a run and verify every byte: which of them a run can resume from. Changes nothing."""

import sys
import time
from pathlib import Path
from typing import Any

from tfdist.checkpoint.storage import Checkpoint, Damaged, checkpoints_at
from tfdist.checkpoint.storage.manifest import NAME
from tfdist.cli import command
from tfdist.errors import CheckpointError, ExitCode, InputError


def main(run: str) -> int:
    """Prints a line for each checkpoint, the newest first; returns the exit code."""
    found = [path for path in checkpoints_at(run) if path.exists()]
    if not found:
        raise InputError(
            f"A run is looked at that has checkpoints. Received: {run}. Give its directory, or that of one checkpoint."
        )
    problems = [_looked_at(path) for path in found]
    return ExitCode.FAILED if any(problems) else ExitCode.DONE


def _looked_at(path: Path) -> str:
    """Prints a description of a checkpoint; returns what is wrong with it, or ""."""
    problem, described = "", ""
    try:
        checkpoint = Checkpoint.open(path)
        described = _described(checkpoint)
        checkpoint.verify()
    except Damaged as damaged:
        problem = f"{Path(damaged.path).name}: {damaged.problem}"
    except (CheckpointError, InputError, OSError) as error:
        problem = str(error)
    if problem and not path.exists():  # a running job has removed it meanwhile
        return ""
    print(f"{path.name}  {'bad ' if problem else 'good'}  {described}".rstrip())
    if problem:
        print(f"  {problem}")
    return problem


def _described(checkpoint: Checkpoint) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((checkpoint.path / NAME).stat().st_mtime))
    size = sum(file.stat().st_size for file in checkpoint.path.iterdir())
    parts = [written, f"{size / 1e6:.1f} MB", f"{len(checkpoint.tensors)} tensors"]
    if strategy := checkpoint.flags.get("strategy"):
        parts.append(f"by {strategy}")
    return "  ".join(parts)


def _run(values: Any, arguments: list[str]) -> int:
    return main(command.only(arguments, "One run is looked at.", "Give the directory of a run."))


if __name__ == "__main__":
    sys.exit(command.run("checkpoints", lambda values: None, _run, about=__doc__ or "", arguments="RUN"))
