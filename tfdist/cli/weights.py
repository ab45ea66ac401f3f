"""Finds the files from which commands read trained weights, and writes the files of their results."""

import errno
from collections.abc import Sequence

from tfdist.checkpoint.format import Checkpoint, checkpoints_at, step_of
from tfdist.config.trained_config import BEST, NEWEST
from tfdist.errors import InputError
from tfdist.reporting import RunDirectory
from tfdist.reporting.file_errors import reraise_as_access_error, reraise_as_output_error
from tfdist.storage import StoragePath, path_of, storage_of

MODEL_SUFFIX = ".keras"


@reraise_as_access_error()
def weight_files(run: str, checkpoint: str) -> list[StoragePath]:
    """Returns the checkpoints to try, the newest first, or a single model file; raises `InputError` if there is none."""
    directory = path_of(run)
    if not storage_of(directory).exists(directory):
        raise InputError(
            f"A run must be an existing directory. Received: {run}, which does not exist. Pass the directory of a run."
        )
    if not storage_of(directory).is_directory(directory):
        remedy = "Pass the directory of a run."
        if directory.name.endswith(MODEL_SUFFIX):
            remedy = f"Pass the directory of the run as the argument, and this file as --checkpoint={run}."
        raise InputError(f"A run must be a directory. Received: {run}, which is a file. {remedy}")
    if checkpoint == NEWEST:
        model = RunDirectory(directory).model
        files = checkpoints_at(run) or ([model] if storage_of(model).exists(model) else [])
        if not files:
            raise InputError(
                f"A run must have finished, or saved a checkpoint. Received: {run}, which has neither "
                f"checkpoints nor {model.name}. Pass the directory of another run, or train with --checkpoint_every."
            )
        return files
    if checkpoint == BEST:
        files = _best(checkpoints_at(run))
        if not files:
            raise InputError(
                f"--checkpoint=best needs a run that has kept its best checkpoint. Received: {run}, which has none. Use "
                "--checkpoint=newest or the path of a checkpoint."
            )
        return files
    path = path_of(checkpoint)
    files = [path] if path.name.endswith(MODEL_SUFFIX) else checkpoints_at(checkpoint)
    if not files or not storage_of(files[0]).exists(files[0]):
        raise InputError(
            f"--checkpoint must be newest, best, or the path of a checkpoint or of a .keras file. Received: {checkpoint}, "
            "where none was found."
        )
    return files


def _best(checkpoints: Sequence[StoragePath]) -> list[StoragePath]:
    """Returns the checkpoint of the best step, which the newest checkpoint names, if it still exists."""
    best = Checkpoint.open(checkpoints[0]).values.get("best") if checkpoints else None
    steps = [best[-1]] if isinstance(best, list) and best else []
    return [path for path in checkpoints if step_of(path) in steps]


def run_directory_of(source: StoragePath) -> StoragePath:
    """Returns the directory of the run to which a checkpoint or a model file belongs."""
    folder = source.parent
    return folder.parent if folder.name == "checkpoints" else folder


def write_output(path: StoragePath, contents: bytes) -> None:
    """Writes a result atomically; raises `InputError` if it cannot be written."""
    with reraise_as_output_error(path):
        storage_of(path).make_directory(path.parent)
        storage_of(path).replace(path, contents)


def check_output(output: str) -> None:
    """Checks that a file can be written, without creating anything; it may exist."""
    path = path_of(output)
    with reraise_as_output_error(path):
        if storage_of(path).is_directory(path):
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        storage_of(path).check_writable(path.parent)
