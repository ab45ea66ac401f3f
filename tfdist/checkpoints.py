"""List the checkpoints of a run, and verify every byte of them. Changes nothing."""

import sys
import time
from typing import Any, NamedTuple

from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, checkpoints_at
from tfdist.checkpoint.format.manifest import NAME
from tfdist.cli import command
from tfdist.cli.output import TEXT, Output
from tfdist.errors import CheckpointError, ExitCode, InputError
from tfdist.errors.formatting import byte_size
from tfdist.storage import StoragePath, path_of, storage_of


class CheckpointSummary(NamedTuple):
    """The state of a checkpoint.

    Attributes:
      name: name of its directory.
      problem: description of the damage; None if it is valid.
      step: its step; this and the following values are None if they cannot be read.
      write_time: when its manifest was written, in seconds since 1970.
      bytes: total size of its files.
      tensors: number of tensors.
      strategy: strategy of the run that wrote it; None if unknown.
    """

    name: str
    problem: str | None = None
    step: int | None = None
    write_time: float | None = None
    bytes: int | None = None
    tensors: int | None = None
    strategy: str | None = None


def main(run: str, output: Output = TEXT) -> int:
    """Prints a line for each checkpoint, the newest first; returns the exit code."""
    paths = [path for path in checkpoints_at(run) if storage_of(path).exists(path)]
    if not paths:
        exists = storage_of(path_of(run)).exists(path_of(run))
        raise InputError(
            f"The directory must be that of a run with checkpoints, or of a checkpoint. Received: {run}, which "
            f"{'has none. Train with --checkpoint_every' if exists else 'does not exist. Give the directory of a run'}."
        )
    checkpoints = []
    for path in paths:
        summary = _verify(path)
        if summary.problem and not storage_of(path).exists(path):  # a running job has removed it meanwhile
            continue
        checkpoints.append(summary)
        output.line(f"{summary.name}  {'bad ' if summary.problem else 'good'}  {_describe(summary)}".rstrip())
        if summary.problem:
            output.line(f"  {summary.problem}")
    output.result({"run": run, "checkpoints": [_facts(summary) for summary in checkpoints]})
    return ExitCode.FAILED if any(summary.problem for summary in checkpoints) else ExitCode.DONE


def _verify(path: StoragePath) -> CheckpointSummary:
    summary = CheckpointSummary(path.name)
    try:
        checkpoint = Checkpoint.open(path)
        summary = _read(checkpoint)
        checkpoint.verify()
    except CorruptCheckpointError as error:
        return summary._replace(problem=f"{str(error.path).rpartition('/')[2]}: {error.problem}")
    except (CheckpointError, InputError, OSError) as error:
        return summary._replace(problem=str(error))
    return summary


def _read(checkpoint: Checkpoint) -> CheckpointSummary:
    path, storage = checkpoint.path, storage_of(checkpoint.path)
    files = {entry.name: storage.info(path / entry.name) for entry in storage.entries(path)}
    manifest = files[NAME]
    return CheckpointSummary(
        path.name,
        step=checkpoint.step,
        write_time=manifest.modified_time if manifest else 0,
        bytes=sum(file.size for file in files.values() if file),
        tensors=len(checkpoint.tensors),
        strategy=checkpoint.flags.get("strategy"),
    )


def _describe(summary: CheckpointSummary) -> str:
    if summary.bytes is None:
        return ""
    write_time = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.write_time))
    parts = [write_time, byte_size(summary.bytes), f"{summary.tensors} tensors"]
    return "  ".join([*parts, f"by {summary.strategy}"] if summary.strategy else parts)


def _facts(summary: CheckpointSummary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "good": not summary.problem,
        "problem": summary.problem,
        "step": summary.step,
        "written_unix_seconds": summary.write_time,
        "bytes": summary.bytes,
        "tensors": summary.tensors,
        "strategy": summary.strategy,
    }


_EXAMPLES = ("tfdist checkpoints runs/one", "tfdist checkpoints runs/one/checkpoints/step-000000040")

if __name__ == "__main__":
    sys.exit(command.run("checkpoints", None, main, about=__doc__, arguments="RUN", has_json=True, examples=_EXAMPLES))
