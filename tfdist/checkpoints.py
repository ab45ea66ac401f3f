"""List the checkpoints of a run, and verify every byte of them. Changes nothing."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, checkpoints_at
from tfdist.checkpoint.format.manifest import FILE_NAME
from tfdist.cli import command
from tfdist.cli.output import TEXT, Output
from tfdist.errors import CheckpointError, ExitCode, InputError, byte_size
from tfdist.storage import StoragePath, path_of, storage_of


def main(run: str, output: Output = TEXT) -> int:
    """Prints a line for each checkpoint, the newest first; returns the exit code."""
    paths = [path for path in checkpoints_at(run) if storage_of(path).exists(path)]
    if not paths:
        exists = storage_of(path_of(run)).exists(path_of(run))
        raise InputError(
            f"The directory must be that of a run with checkpoints, or of a checkpoint. Received: {run}, which "
            f"{'has none. Train with --checkpoint_every' if exists else 'does not exist. Pass the directory of a run'}."
        )
    checkpoints = []
    for path in paths:
        record = _verify(path)
        problem = record["problem"]
        if problem and not storage_of(path).exists(path):  # a running job has removed it meanwhile
            continue
        checkpoints.append(record)
        output.line(f"{path.name}  {'bad ' if problem else 'good'}  {_describe(record)}".rstrip())
        if problem:
            output.line(f"  {problem}")
    output.result({"run": run, "checkpoints": checkpoints})
    return ExitCode.FAILED if any(record["problem"] for record in checkpoints) else ExitCode.DONE


def _verify(path: StoragePath) -> dict[str, Any]:
    """Returns the record of a checkpoint; its contents are None if they cannot be read."""
    contents = dict.fromkeys(("step", "written_unix_seconds", "bytes", "tensors", "strategy"))
    problem = None
    try:
        checkpoint = Checkpoint.open(path)
        contents = _contents(checkpoint)
        checkpoint.verify()
    except CorruptCheckpointError as error:
        problem = f"{str(error.path).rpartition('/')[2]}: {error.problem}"
    except (CheckpointError, InputError, OSError) as error:
        problem = str(error)
    return {"name": path.name, "good": not problem, "problem": problem, **contents}


def _contents(checkpoint: Checkpoint) -> dict[str, Any]:
    path, storage = checkpoint.path, storage_of(checkpoint.path)
    files = {entry.name: storage.info(path / entry.name) for entry in storage.entries(path)}
    manifest = files[FILE_NAME]
    return {
        "step": checkpoint.step,
        "written_unix_seconds": manifest.modified_time if manifest else 0,
        "bytes": sum(file.size for file in files.values() if file),
        "tensors": len(checkpoint.tensors),
        "strategy": checkpoint.flags.get("strategy"),
    }


def _describe(record: Mapping[str, Any]) -> str:
    if record["bytes"] is None:
        return ""
    write_time = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["written_unix_seconds"]))
    parts = [write_time, byte_size(record["bytes"]), f"{record['tensors']} tensors"]
    return "  ".join([*parts, f"by {record['strategy']}"] if record["strategy"] else parts)


_EXAMPLES = ("tfdist checkpoints runs/one", "tfdist checkpoints runs/one/checkpoints/step-000000040")

if __name__ == "__main__":
    sys.exit(command.run("checkpoints", None, main, about=__doc__, arguments="RUN", has_json=True, examples=_EXAMPLES))
