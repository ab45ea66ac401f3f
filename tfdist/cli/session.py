"""Creates strategy, data, model and trainer from a configuration, for the commands."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from tfdist import data, models
from tfdist.cli.early_checks import Place
from tfdist.cli.open_strategy import opened_strategy
from tfdist.config.train_config import TrainConfig
from tfdist.data import steps_in_epochs
from tfdist.data.augmentation import parse_augmentations
from tfdist.data.batch_schedule import GLOBAL
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.strategy_selection import Detection
from tfdist.gradients import Clip, parse_loss_scale
from tfdist.gradients.compression import check
from tfdist.layers.recompute import recompute
from tfdist.optimizers import make_learning_rate
from tfdist.optimizers.catalog import create_loss, create_metrics, create_optimizer
from tfdist.synchronization.federated import owned_by_clients
from tfdist.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Session:
    """What a command works with after startup, before training."""

    config: Any
    detection: Detection
    strategy: Strategy
    data: data.DataSet


@contextmanager
def opened(config: TrainConfig, place: Place | None = None) -> Iterator[Session]:
    """Starts the strategy, checks that all processes have the same flags and versions, and loads the data.

    The way in which the session ends is reported to the other processes; if one of them is lost, this one exits with
    code 5.
    """
    _gradient_options(config)  # reports invalid ones before anything starts
    parse_augmentations(config.augment)
    with opened_strategy(config, place) as (config, detection, strategy):
        # With elastic_batch=replica, the batch size depends on the size with which the run began. Clients' batches are whole.
        if config.elastic_batch == GLOBAL and not config.parsed.sync.trains_clients:
            strategy.check_batch_size(config.batch_size, config.accumulate_steps)
        yield Session(config, detection, strategy, _data(config))


def _data(config: TrainConfig) -> data.DataSet:
    """Loads the data set, and augments its training part."""
    found = data.load(config.dataset, config.data_dir)
    return dataclasses.replace(found, train=data.augmented(found.train, config.augment))


def with_clients(session: Session) -> Session:
    """Returns the session with the training data as clients own it, if `--sync` has clients."""
    config, found = session.config, session.data
    sync, balance = config.parsed.sync, config.parsed.balance.kind
    train = owned_by_clients(sync, found.train, config.batch_size, config.seed, config.elastic_batch, balance)
    return dataclasses.replace(session, data=dataclasses.replace(found, train=train))


def make_trainer(session: Session, strategy: Strategy) -> Trainer:
    """Creates the model and the optimizer in a strategy's scope, with the configured seed."""
    config = session.config
    keras.utils.clear_session(free_memory=False)
    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    keras.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = models.build(config.model, *sizes(session.data))
        if config.batch_norm == "synchronized":
            model = models.with_batch_norm(model, "synchronized")
        recompute(model, config.recompute)
        return Trainer(
            model,
            optimizer=create_optimizer(config.optimizer, _learning_rate(session), config.momentum_correction),
            loss=create_loss(config.loss),
            metrics=create_metrics(config.metrics),
            seed=config.seed,
            jit_compile=config.jit_compile,
            ema=config.ema,
            sync=config.parsed.sync,
            balance=config.balance,
            **_gradient_options(config),
        )


def _learning_rate(session: Session) -> Any:
    """Returns the learning rate, scaled to the batch size, with warmup and decay if configured."""
    config = session.config
    size = session.data.train.size
    steps = config.steps or steps_in_epochs(
        config.epochs, size, config.parsed.sync.examples_per_step(size, config.batch_size)
    )
    return make_learning_rate(
        config.learning_rate,
        scaling=config.lr_scaling,
        base_batch_size=config.base_batch_size,
        batch_size=config.batch_size,
        warmup_steps=config.warmup_steps,
        warmup_start=config.warmup_start,
        decay=config.decay,
        total_steps=steps,
    )


def _gradient_options(config: TrainConfig) -> dict[str, Any]:
    """Returns the trainer's arguments about gradients."""
    check(config.compression)
    return {
        "accumulate_steps": config.accumulate_steps,
        "loss_scale": parse_loss_scale(config.loss_scale),
        "max_skipped_steps": config.max_skipped_steps,
        "clip": Clip(norm=config.clip_norm, value=config.clip_value),
        "compression": config.compression,
        "compression_min_bytes": config.compression_min_bytes,
        "bucket_bytes": int(config.bucket_mb * 2**20),
        "bucket_order": config.bucket_order,
    }


def sizes(whole: data.DataSet) -> tuple[Any, Any]:
    """Returns input shape and classes for the model; a data set for a user's own model may not know them."""
    return whole.input_shape, whole.classes
