"""Export the model of a run from its newest valid checkpoint, or a given one, as .keras, SavedModel or safetensors."""

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.cli import command, flags, tensorflow_import
from tfdist.config.fields import check_fields, flag_field, names
from tfdist.config.strategy_registry import REFERENCE
from tfdist.config.topics import CHECKS, OUTPUT
from tfdist.config.train_config import TrainConfig
from tfdist.errors import CheckpointError, InputError
from tfdist.storage import StoragePath, path_of, storage_of

if TYPE_CHECKING:
    from tfdist.trainer.trainer import Trainer

# A SavedModel is a directory of any name.
_ENDINGS = {"keras": ".keras", "saved_model": "", "safetensors": ".safetensors"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Format and destination of an export, and whether code that the checkpoint names may be run."""

    format: str = flag_field("keras", OUTPUT, "Format: keras, saved_model or safetensors.", choices=tuple(_ENDINGS))
    output: str = flag_field(
        "", OUTPUT, "Path to write, which must not exist. Defaults to a name with the step in the directory of the run."
    )
    data_dir: str | None = flag_field(None, OUTPUT, "Directory of the data set, if it has moved since the run.")
    safe_mode: bool = flag_field(
        True,
        CHECKS,
        "Refuse a run whose model, data set, loss or optimizer is a package.module:function, instead of importing it.",
    )

    def __post_init__(self) -> None:
        """Validates all fields."""
        check_fields(self)


def main(run: str, config: ExportConfig) -> int:
    """Exports the model and prints its path; returns the exit code."""
    tensorflow_import.load_tensorflow()  # imported late, so that flags are parsed and help is printed before
    from tfdist.checkpoint.format import checkpoints_at
    from tfdist.cli import session

    found = checkpoints_at(run)
    trained = _trained(found, run, config)
    given = path_of(config.output) if config.output else None
    _check_output(given or _folder(found) / f"export-STEP{_ENDINGS[config.format]}", config.format)
    with session.opened(trained) as opened:
        trainer = session.make_trainer(opened, opened.strategy)
        trainer.build(opened.data.train)
        _restore(trainer, run)
        path = given or _folder(found) / f"export-{trainer.step:09d}{_ENDINGS[config.format]}"
        _check_output(path, config.format)
        _write(trainer, config.format, path)
    print(f"{path}  step {trainer.step}, from {trainer.train_state.resumed_from}")
    return 0


def _trained(found: list[StoragePath], run: str, config: ExportConfig) -> TrainConfig:
    """Returns the flags of the run, adapted to one device."""
    from tfdist.checkpoint.restore import first_readable

    _check_any(found, run)
    saved = first_readable(found)
    if not {"model", "dataset"} <= saved.flags.keys():
        raise InputError(
            "A run is exported with the flags that python -m tfdist.train saves in its checkpoints. Received: "
            f"{saved.path}, which has none: a program wrote it. In that program, with its trainer built: "
            f"trainer.resume({run!r}), then trainer.save('model.keras') or trainer.model.export('served')."
        )
    known = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    given = {name: value for name, value in saved.flags.items() if name in known}
    not_exported = (*names(TrainConfig, "is_option"), *names(TrainConfig, "training_only"))
    given |= {name: known[name] for name in not_exported} | {"strategy": REFERENCE}
    trained = TrainConfig(**given | ({"data_dir": config.data_dir} if config.data_dir else {}))
    if config.safe_mode:
        from tfdist.cli.trained_run import check_runs_nothing

        check_runs_nothing(trained, saved.path)
    return trained


def _check_any(found: list[StoragePath], run: str) -> None:
    if not found:
        raise InputError(
            f"A run has checkpoints if it was started with --checkpoint_every. Received: {run}, which has none. Give "
            "another run, or use its model.keras."
        )


def _restore(trainer: "Trainer", run: str) -> None:
    """Restores the newest checkpoint; retries once, as a running job may remove checkpoints while they are read."""
    from tfdist.checkpoint.format import checkpoints_at

    for is_last in (False, True):
        found = checkpoints_at(run)
        _check_any(found, run)
        try:
            trainer.resume_from([str(path) for path in found], sets_aside=False)
            return
        except CheckpointError:
            if is_last or all(storage_of(path).exists(path) for path in found):
                raise


def _folder(found: list[StoragePath]) -> StoragePath:
    """Returns the directory of the run, given that of the run, of its checkpoints or of one checkpoint."""
    folder = found[0].parent
    return folder.parent if folder.name == "checkpoints" else folder


def _check_output(path: StoragePath, kind: str) -> None:
    """Checks that a model could be written, without creating anything."""
    ending, others = _ENDINGS[kind], tuple(filter(None, _ENDINGS.values()))
    suffix, storage = os.path.splitext(path.name)[1], storage_of(path)
    is_one = suffix == ending if ending else suffix not in others
    with _must_write(path):
        if storage.exists(path) or not is_one:
            wanted = f"ending in {ending}" if ending else f"not ending in {' or '.join(others)}"
            raise InputError(
                f"--output must be a path {wanted} that does not exist yet. Received: {path}. Give another --output."
            )
        storage.check_writable(path.parent)


def _write(trainer: "Trainer", kind: str, path: StoragePath) -> None:
    """Writes to a temporary directory, then renames, so that the path never has an incomplete model."""
    write = {"keras": _keras, "saved_model": _saved_model, "safetensors": _safetensors}[kind]
    with _must_write(path):
        storage = storage_of(path)
        storage.make_directory(path.parent)
        with storage.staged(path) as written, _system_errors(written), trainer.averaged_weights():
            write(trainer, written)


@contextlib.contextmanager
def _must_write(path: StoragePath) -> Iterator[None]:
    from tfdist.reporting.file_errors import cause

    try:
        yield
    except OSError as error:
        raise _unwritable(path, cause(error)) from error


@contextlib.contextmanager
def _system_errors(written: Path) -> Iterator[None]:
    """Turns TensorFlow's errors about what it writes here, as on a full disk, into those of the system."""
    from tensorflow import errors

    from tfdist.reporting.file_errors import cause

    try:
        yield
    except errors.OpError as error:
        if str(written.parent) not in str(error):
            raise  # not about a file
        raise OSError(errno.EIO, cause(error)) from error


def _unwritable(path: StoragePath, why: str) -> InputError:
    return InputError(
        f"--output must be a writable path. Received: {path} ({why}). Give another --output, or free space or fix the "
        "permissions there."
    )


def _keras(trainer: "Trainer", path: Path) -> None:
    trainer.save(str(path))


def _saved_model(trainer: "Trainer", path: Path) -> None:
    trainer.model.export(str(path), format="tf_saved_model", verbose=False)


def _safetensors(trainer: "Trainer", path: Path) -> None:
    """Writes weights and moving statistics by their names in checkpoints, which are Keras's paths."""
    import keras
    import numpy as np

    from tfdist.checkpoint.format import Part, write_shard
    from tfdist.grammar.unique_names import unique_names
    from tfdist.step import randomness

    seeds = {id(state) for state in randomness.seed_states(trainer.model)}
    own = [v for v in trainer.model.variables if id(v) not in seeds]
    named = unique_names((v.path, v) for v in own)
    parts = [Part.full(name, np.array(keras.ops.convert_to_numpy(v))) for name, v in named.items()]
    [name] = write_shard(path.parent, 0, parts).shards
    (path.parent / name).rename(path)


def _run(values: Any, arguments: list[str]) -> int:
    remedy = "Give the directory of a run or of a checkpoint after the flags."
    return main(command.only(arguments, "The model of one run is written.", remedy), flags.config(values, ExportConfig))


_EXAMPLES = (
    "python -m tfdist.export runs/one",
    "python -m tfdist.export --format=saved_model --output=served runs/one/checkpoints/step-000000040",
)

if __name__ == "__main__":
    sys.exit(
        command.run(
            "export",
            lambda values: flags.define(values, ExportConfig),
            _run,
            about=__doc__ or "",
            arguments="RUN",
            examples=_EXAMPLES,
        )
    )
