"""Opens a trained run: its flags, its model, and the weights of one of its checkpoints."""

import contextlib
import dataclasses
import json
import tempfile
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist import data, keras_internals
from tfdist.checkpoint.format import first_readable_checkpoint
from tfdist.cli import run as training
from tfdist.cli import weights
from tfdist.config.conflicts import flag_text
from tfdist.config.fields import field_names, unsafe_fields
from tfdist.config.strategy_registry import strategy_declaration
from tfdist.config.train_config import TrainConfig
from tfdist.config.trained_config import TrainedConfig
from tfdist.coordination.group import long_timeout
from tfdist.data import DatasetSplits, Examples
from tfdist.errors import CheckpointError, InputError, one_line
from tfdist.parameter_server.dynamic_embedding_tables import keyed_layers
from tfdist.reporting import RunDirectory
from tfdist.storage import StoragePath, path_of, storage_of
from tfdist.trainer.trainer import Trainer

_MODULES = ("None", "builtins", "keras", "tfdist")  # allowed in a model file in safe mode
_TRAINING_ONLY = ("accumulate_steps", "check_sync_every")


class TrainedRun(NamedTuple):
    """A run whose trained model is loaded on a strategy."""

    trainer: Trainer  # trainer with the weights
    step: int | None  # step at which the weights were saved; None if unknown
    source: str  # checkpoint or file with the weights
    data: DatasetSplits  # dataset of the command or, by default, of the run
    batch_size: int  # examples per batch, over all replicas
    directory: StoragePath  # of the run

    def examples(self, split: str) -> Examples:
        """Returns the examples of a split, train or test; raises `InputError` if there are none."""
        examples = self.data.test if split == "test" else self.data.train
        if examples is None:
            raise InputError(
                f"--split=test needs a dataset with test examples. Received: {self.data.name}, which has none. Add "
                "--split=train, or pass another --dataset."
            )
        return examples

    def describe(self, split: str) -> dict[str, Any]:
        """Describes the model and the data of a split, as JSON values."""
        strategy = self.trainer.strategy
        return {
            "checkpoint": self.source,
            "step": self.step,
            "dataset": f"{self.data.name}, {split}",
            "examples": self.examples(split).size,
            "strategy": strategy.name,
            "replicas": strategy.replicas,
        }


@contextlib.contextmanager
def open_run(run: str, config: TrainedConfig) -> Iterator[TrainedRun]:
    """Starts the strategy, builds the model of a run and loads its weights; every process must enter the context.

    Raises:
      InputError: the run or its weights do not exist, or it names code that safe mode does not allow.
    """
    files = weights.weight_files(run, config.checkpoint)
    flags = _saved_flags(files, run)
    train_config = adapt_flags(flags, files[0], config)
    with training.open_session(train_config) as session:
        splits = data.load(config.dataset, config.data_dir) if config.dataset else session.data
        trainer = training.make_trainer(session, session.strategy)
        trainer.build(session.data.train)
        source = _load_weights(trainer, run, config)
        step = _last_step(run, source) if source.endswith(weights.MODEL_SUFFIX) else trainer.step
        yield TrainedRun(
            trainer, step, source, splits, train_config.batch_size, weights.run_directory_of(path_of(source))
        )


def _load_weights(trainer: Trainer, run: str, config: TrainedConfig) -> str:
    """Loads the weights and returns their path; retries once, because a training job may remove a checkpoint meanwhile."""
    group = trainer.strategy.group
    for attempt in ("trained", "trained again"):
        files = weights.weight_files(run, config.checkpoint)
        with long_timeout("its data or its model") as deadline:
            paths = group.broadcast(attempt, [str(path) for path in files], deadline)
        if paths[0].endswith(weights.MODEL_SUFFIX):
            _load_model_file(trainer, path_of(paths[0]), config.safe_mode)
            return paths[0]
        try:
            trainer.resume_from(paths, rename_damaged=False)
            return trainer.train_state.resumed_from
        except CheckpointError:
            all_exist = all(storage_of(path_of(path)).exists(path_of(path)) for path in paths)
            if attempt != "trained" or group.broadcast("checkpoints are there", all_exist):
                raise
    raise AssertionError("The second attempt returns or raises.")


def _saved_flags(files: Sequence[StoragePath], run: str) -> dict[str, Any]:
    """Returns the flags in a checkpoint or, for a model file, those of the run's last attempt."""
    if files[0].name.endswith(weights.MODEL_SUFFIX):
        flags = _parse_flags(RunDirectory(path_of(run)).last_flags())
    else:
        flags = dict(first_readable_checkpoint(files).flags)
    if not {"model", "dataset"} <= flags.keys():
        raise InputError(
            "A run must have been saved by tfdist train, with its flags. Received: "
            f"{files[0]}, which has no flags, because a program wrote it. In that program, build the trainer, call "
            f"trainer.resume({run!r}), then trainer.evaluate, predict or save."
        )
    return flags


def _parse_flags(texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of flags, without those that this version does not know."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(TrainConfig) if field.name in texts}
    parsers: dict[type, Callable[[str], Any]] = {bool: lambda text: text == "true", int: int, float: float}
    return {name: parsers.get(kind, str)(texts[name]) for name, kind in kinds.items()}


def adapt_flags(flags: Mapping[str, Any], source: StoragePath, config: TrainedConfig) -> TrainConfig:
    """Returns the flags of a run, with those that the command overrides: strategy, data and batch size."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    known_flags = {name: value for name, value in flags.items() if name in defaults}
    is_same_strategy = config.strategy == known_flags.get("strategy")
    overrides: dict[str, Any] = {
        name: defaults[name] for name in (*field_names(TrainConfig, "training_only"), *_TRAINING_ONLY)
    }
    for name, value in config.options.items():
        if not (is_same_strategy and value == defaults[name] and name in field_names(TrainConfig, "is_option")):
            overrides[name] = value
    if source.name.endswith(weights.MODEL_SUFFIX):
        overrides["ema"] = defaults["ema"]  # the weights in the file are the average
    if config.batch_size:
        overrides["batch_size"] = config.batch_size
    if config.data_dir and not config.dataset:
        overrides["data_dir"] = config.data_dir
    if "sync" in strategy_declaration(config.strategy).refuses:
        overrides["sync"] = defaults["sync"]
    train_config = TrainConfig(**known_flags | overrides)
    if config.safe_mode:
        check_safe_mode(train_config, source, overrides)
    return train_config


def check_safe_mode(train_config: TrainConfig, source: StoragePath, own_flags: Container[str] = ()) -> None:
    """Raises `InputError` if flags of the run, except `own_flags` of the command, may name arbitrary code."""
    if unsafe_flags := [name for name in unsafe_fields(train_config) if name not in own_flags]:
        code = " ".join(flag_text(name, getattr(train_config, name)) for name in unsafe_flags)
        raise InputError(
            "The run refers to user code, or to files that name code, which is imported and called only with "
            f"--safe_mode=false. Received: {source}, which names {code}. If you trust that, add --safe_mode=false."
        )


def _last_step(run: str, model: str) -> int | None:
    """Returns the step of the run's model file; None for other files."""
    directory = RunDirectory(path_of(run))
    if path_of(model) != directory.model:
        return None
    records = directory.records()
    return directory.end_record.get("model_step") or (int(records[-1]["step"]) if records else None)


def _load_model_file(trainer: Trainer, path: StoragePath, safe_mode: bool) -> None:
    """Assigns the variables of a saved model to those of the trainer's model."""
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        local_path = Path(folder) / path.name
        try:
            storage_of(path).copy_to(path, local_path)
            if safe_mode:
                _check_modules(local_path)
            saved_model = keras.models.load_model(local_path, compile=False)
        except Exception as error:
            raise InputError(
                f"A saved model must be readable by Keras. Received: {path}: {one_line(str(error)):.300}. Pass a "
                "--checkpoint, which a run with --checkpoint_every saves."
            ) from error
    model, blocks = trainer.model, trainer.strategy.blocks
    model_weights, saved_weights = model.weights, saved_model.weights  # without states of random layers
    if [tuple(v.shape) for v in model_weights] != [tuple(v.shape) for v in saved_weights]:
        raise InputError(
            f"A saved model must be that of the run. Received: {path}, whose variables have different shapes. Pass a "
            "--checkpoint."
        )
    statistics = {id(variable) for variable in keras_internals.moving_statistics(model)}
    for variable, value in zip(model_weights, saved_weights, strict=True):
        per_replica = id(variable) in statistics
        blocks.assign_value(keras_internals.value_of(variable), per_replica, np.asarray(value))
    for layer, saved_layer in zip(keyed_layers(model), keyed_layers(saved_model), strict=True):
        layer.table.restore(saved_layer.table.export(), with_slots=False)


def _check_modules(model: Path) -> None:
    """Raises `ValueError` for modules of other packages, which Keras could import from the current directory."""
    modules: set[str] = set()
    with zipfile.ZipFile(model) as archive:
        json.loads(archive.read("config.json"), object_hook=lambda node: modules.add(str(node.get("module"))))
    if other_modules := [module for module in modules if module.partition(".")[0] not in _MODULES]:
        raise ValueError(f"it names the module {other_modules[0]}, which is imported only with --safe_mode=false")
