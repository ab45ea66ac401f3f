"""Export the model of a run from its newest valid checkpoint, or a given one, as .keras, SavedModel or safetensors."""

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.cli import command, flags, tensorflow_import, weights
from tfdist.config.fields import OUTPUT, check_fields, flag_field
from tfdist.config.strategy_registry import REFERENCE
from tfdist.config.trained_config import TrainedConfig, WeightsConfig
from tfdist.errors import InputError
from tfdist.reporting.file_errors import cause, must_write_output
from tfdist.storage import StoragePath, path_of, storage_of

if TYPE_CHECKING:
    from tfdist.trainer.trainer import Trainer

# A SavedModel is a directory of any name.
_ENDINGS = {"keras": ".keras", "saved_model": "", "safetensors": ".safetensors"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(WeightsConfig):
    """Weights, format and destination of an export."""

    format: str = flag_field("keras", OUTPUT, "Format: keras, saved_model or safetensors.", choices=tuple(_ENDINGS))
    output: str = flag_field(
        "", OUTPUT, "Path to write, which must not exist. Defaults to a name with the step in the directory of the run."
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def on_one_device(self) -> TrainedConfig:
        """The configuration that opens the run for an export."""
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(WeightsConfig)}
        return TrainedConfig(strategy=REFERENCE, **common)


def main(run: str, config: ExportConfig) -> int:
    """Exports the model and prints its path; returns the exit code."""
    sources = weights.sources(run, config.checkpoint)  # reports errors without delay
    default = weights.folder_of(sources[0]) / f"export-STEP{_ENDINGS[config.format]}"
    _check_output(path_of(config.output) if config.output else default, config.format)
    tensorflow_import.load_tensorflow()  # imported late, so that flags are parsed and help is printed before
    from tfdist.cli import trained_run

    with trained_run.open_run(run, config.on_one_device) as trained:
        number = "" if trained.step is None else f"-{trained.step:09d}"
        default = trained.directory / f"export{number}{_ENDINGS[config.format]}"
        path = path_of(config.output) if config.output else default
        _check_output(path, config.format)
        _write(trained.trainer, config.format, path)
    step = "" if trained.step is None else f"step {trained.step}, "
    print(f"{path}  {step}from {trained.source}")
    return 0


def _check_output(path: StoragePath, kind: str) -> None:
    """Checks that a model could be written, without creating anything."""
    ending, others = _ENDINGS[kind], tuple(filter(None, _ENDINGS.values()))
    suffix, storage = os.path.splitext(path.name)[1], storage_of(path)
    has_ending = suffix == ending if ending else suffix not in others
    with must_write_output(path):
        if storage.exists(path) or not has_ending:
            rule = f"ending in {ending}" if ending else f"not ending in {' or '.join(others)}"
            raise InputError(
                f"--output must be a path {rule} that does not exist yet. Received: {path}. Give another --output."
            )
        storage.check_writable(path.parent)


def _write(trainer: "Trainer", kind: str, path: StoragePath) -> None:
    """Writes to a temporary directory, then renames, so that the path never has an incomplete model."""
    write = {"keras": _keras, "saved_model": _saved_model, "safetensors": _safetensors}[kind]
    with must_write_output(path):
        storage = storage_of(path)
        storage.make_directory(path.parent)
        with storage.staged(path) as staged, _system_errors(staged), trainer.averaged_weights():
            write(trainer, staged)


@contextlib.contextmanager
def _system_errors(staged: Path) -> Iterator[None]:
    """Turns TensorFlow's errors in writing here, as on a full disk, into system errors."""
    from tensorflow import errors

    try:
        yield
    except errors.OpError as error:
        if str(staged.parent) not in str(error):
            raise  # not about a file
        raise OSError(errno.EIO, cause(error)) from error


def _keras(trainer: "Trainer", path: Path) -> None:
    trainer.save(str(path))


def _saved_model(trainer: "Trainer", path: Path) -> None:
    trainer.model.export(str(path), format="tf_saved_model", verbose=False)


def _safetensors(trainer: "Trainer", path: Path) -> None:
    """Writes weights and moving statistics by their names in checkpoints, which are Keras's paths."""
    import keras
    import numpy as np

    from tfdist.checkpoint.format import Part, write_shard
    from tfdist.config.spec import unique_names
    from tfdist.step import randomness

    seeds = {id(state) for state in randomness.seed_states(trainer.model)}
    own = [v for v in trainer.model.variables if id(v) not in seeds]
    named = unique_names((v.path, v) for v in own)
    parts = [Part.full(name, np.array(keras.ops.convert_to_numpy(v))) for name, v in named.items()]
    [name] = write_shard(path.parent, 0, parts).shards
    (path.parent / name).rename(path)


def _run(values: Any, arguments: list[str]) -> int:
    run = command.only_argument(
        arguments, "tfdist export takes one directory.", "Give the directory of a run or of a checkpoint."
    )
    return main(run, flags.config(values, ExportConfig))


def _define(values: Any) -> None:
    values.set_gnu_getopt(True)  # flags may follow the directory
    flags.define(values, ExportConfig)


_EXAMPLES = (
    "tfdist export runs/one",
    "tfdist export runs/one/checkpoints/step-000000040 --format=saved_model --output=served",
)

if __name__ == "__main__":
    sys.exit(command.run("export", _define, _run, about=__doc__ or "", arguments="RUN", examples=_EXAMPLES))
