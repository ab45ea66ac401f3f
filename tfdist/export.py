"""Export the model of a run from its newest valid checkpoint, or from another, as .keras, SavedModel or safetensors."""

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.cli import command, weights
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.fields import check_fields, output_flag
from tfdist.config.strategy_registry import REFERENCE
from tfdist.config.trained_config import TrainedConfig, WeightsConfig
from tfdist.errors import InputError
from tfdist.reporting.file_errors import cause, reraise_as_output_error
from tfdist.storage import StoragePath, path_of, storage_of

if TYPE_CHECKING:
    from tfdist.trainer.trainer import Trainer

# A SavedModel is a directory with any name.
_ENDINGS = {"keras": ".keras", "saved_model": "", "safetensors": ".safetensors"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(WeightsConfig):
    """Weights, format and destination of an export."""

    format: str = output_flag("keras", "Format: keras, saved_model or safetensors.", choices=tuple(_ENDINGS))
    output: str = output_flag(
        "", "Path to write, which must not exist. Defaults to a name with the step in the directory of the run."
    )

    def __post_init__(self) -> None:
        check_fields(self)


def main(run: str, config: ExportConfig) -> int:
    """Exports the model and prints its path; returns the exit code."""
    files = weights.weight_files(run, config.checkpoint)  # reports errors before TensorFlow is loaded
    default = weights.run_directory_of(files[0]) / f"export-STEP{_ENDINGS[config.format]}"
    _check_output(path_of(config.output) if config.output else default, config.format)
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.cli.trained_run import open_run

    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(WeightsConfig)}
    with open_run(run, TrainedConfig(strategy=REFERENCE, **options)) as trained_run:
        step_suffix = "" if trained_run.step is None else f"-{trained_run.step:09d}"
        default = trained_run.directory / f"export{step_suffix}{_ENDINGS[config.format]}"
        path = path_of(config.output) if config.output else default
        _check_output(path, config.format)
        _write(trained_run.trainer, config.format, path)
    step = "" if trained_run.step is None else f"step {trained_run.step}, "
    print(f"{path}  {step}from {trained_run.source}")
    return 0


def _check_output(path: StoragePath, kind: str) -> None:
    """Checks that a model can be written, without creating anything."""
    ending, other_endings = _ENDINGS[kind], tuple(filter(None, _ENDINGS.values()))
    suffix, storage = os.path.splitext(path.name)[1], storage_of(path)
    has_ending = suffix == ending if ending else suffix not in other_endings
    with reraise_as_output_error(path):
        if storage.exists(path) or not has_ending:
            rule = f"ending in {ending}" if ending else f"not ending in {' or '.join(other_endings)}"
            raise InputError(
                f"--output must be a path {rule} that does not exist yet. Received: {path}. Pass another --output."
            )
        storage.check_writable(path.parent)


def _write(trainer: "Trainer", kind: str, path: StoragePath) -> None:
    """Writes a model atomically: to a temporary directory, which is then renamed."""
    with reraise_as_output_error(path):
        storage = storage_of(path)
        storage.make_directory(path.parent)
        with storage.staged(path) as staged_path, _reraise_as_system_error(staged_path), trainer.averaged_weights():
            if kind == "safetensors":
                _write_safetensors(trainer, staged_path)
            elif kind == "keras":
                trainer.save(str(staged_path))
            else:
                trainer.model.export(str(staged_path), format="tf_saved_model", verbose=False)


@contextlib.contextmanager
def _reraise_as_system_error(staged_path: Path) -> Iterator[None]:
    """Reraises TensorFlow's errors when writing to a path, such as on a full disk, as `OSError`."""
    from tensorflow import errors

    try:
        yield
    except errors.OpError as error:
        if str(staged_path.parent) not in str(error):
            raise
        raise OSError(errno.EIO, cause(error)) from error


def _write_safetensors(trainer: "Trainer", path: Path) -> None:
    """Writes weights and moving statistics under their names in checkpoints, which are Keras's paths."""
    import keras
    import numpy as np

    from tfdist.checkpoint.format import TensorBlock, write_shard
    from tfdist.config.spec import unique_names
    from tfdist.step import randomness

    seeds = {id(state) for state in randomness.seed_states(trainer.model)}
    variables = [v for v in trainer.model.variables if id(v) not in seeds]
    variables_by_name = unique_names((v.path, v) for v in variables)
    parts = [TensorBlock.full(name, np.array(keras.ops.convert_to_numpy(v))) for name, v in variables_by_name.items()]
    [name] = write_shard(path.parent, 0, parts).shards
    (path.parent / name).rename(path)


_EXAMPLES = (
    "tfdist export runs/one",
    "tfdist export runs/one/checkpoints/step-000000040 --format=saved_model --output=served",
)

if __name__ == "__main__":
    sys.exit(command.run("export", ExportConfig, main, about=__doc__, arguments="RUN", examples=_EXAMPLES))
