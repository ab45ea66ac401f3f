"""List the checkpoints of a run and verify every byte: which of them a run can resume from. Changes nothing."""

import sys
import time
from typing import Any, NamedTuple

from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, checkpoints_at
from tfdist.checkpoint.format.manifest import NAME
from tfdist.cli import command
from tfdist.cli.output import TEXT, Output
from tfdist.errors import CheckpointError, ExitCode, InputError
from tfdist.errors.numbers import byte_size
from tfdist.storage import StoragePath, path_of, storage_of


class Found(NamedTuple):
    """A checkpoint, as it was found.

    Attributes:
      name: name of its directory.
      problem: what is wrong with it, or None.
      step: its step, or None if it cannot be read, as for the values that follow.
      written: when its manifest was written, in seconds since 1970.
      bytes: size of its files.
      tensors: number of its tensors.
      strategy: strategy of the run that wrote it, or None if it is not known.
    """

    name: str
    problem: str | None = None
    step: int | None = None
    written: float | None = None
    bytes: int | None = None
    tensors: int | None = None
    strategy: str | None = None


def main(run: str, output: Output = TEXT) -> int:
    """Prints a line for each checkpoint, the newest first; returns the exit code."""
    paths = [path for path in checkpoints_at(run) if storage_of(path).exists(path)]
    if not paths:
        there = storage_of(path_of(run)).exists(path_of(run))
        raise InputError(
            f"The directory must be that of a run with checkpoints, or of a checkpoint. Received: {run}, which "
            f"{'has none. Train with --checkpoint_every' if there else 'does not exist. Give the directory of a run'}."
        )
    checkpoints = []
    for path in paths:
        found = _examined(path)
        if found.problem and not storage_of(path).exists(path):  # a running job has removed it meanwhile
            continue
        checkpoints.append(found)
        output.line(f"{found.name}  {'bad ' if found.problem else 'good'}  {_described(found)}".rstrip())
        if found.problem:
            output.line(f"  {found.problem}")
    output.result({"run": run, "checkpoints": [_facts(found) for found in checkpoints]})
    return ExitCode.FAILED if any(found.problem for found in checkpoints) else ExitCode.DONE


def _examined(path: StoragePath) -> Found:
    """Verifies a checkpoint."""
    found = Found(path.name)
    try:
        checkpoint = Checkpoint.open(path)
        found = _opened(checkpoint)
        checkpoint.verify()
    except CorruptCheckpointError as damaged:
        return found._replace(problem=f"{str(damaged.path).rpartition('/')[2]}: {damaged.problem}")
    except (CheckpointError, InputError, OSError) as error:
        return found._replace(problem=str(error))
    return found


def _opened(checkpoint: Checkpoint) -> Found:
    path, storage = checkpoint.path, storage_of(checkpoint.path)
    files = {entry.name: storage.info(path / entry.name) for entry in storage.entries(path)}
    manifest = files[NAME]
    return Found(
        path.name,
        step=checkpoint.step,
        written=manifest.modified if manifest else 0,
        bytes=sum(file.size for file in files.values() if file),
        tensors=len(checkpoint.tensors),
        strategy=checkpoint.flags.get("strategy"),
    )


def _described(found: Found) -> str:
    if found.bytes is None:
        return ""
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.written))
    parts = [written, byte_size(found.bytes), f"{found.tensors} tensors"]
    return "  ".join([*parts, f"by {found.strategy}"] if found.strategy else parts)


def _facts(found: Found) -> dict[str, Any]:
    return {
        "name": found.name,
        "good": not found.problem,
        "problem": found.problem,
        "step": found.step,
        "written_unix_seconds": found.written,
        "bytes": found.bytes,
        "tensors": found.tensors,
        "strategy": found.strategy,
    }


def _run(values: Any, arguments: list[str], output: Output) -> int:
    run = command.only_argument(arguments, "tfdist checkpoints takes one directory.", "Give the directory of a run.")
    return main(run, output)


_EXAMPLES = (
    "tfdist checkpoints runs/one",
    "tfdist checkpoints runs/one/checkpoints/step-000000040",
)

if __name__ == "__main__":
    about = __doc__ or ""
    sys.exit(
        command.run(
            "checkpoints", lambda values: None, _run, about=about, arguments="RUN", examples=_EXAMPLES, has_json=True
        )
    )
