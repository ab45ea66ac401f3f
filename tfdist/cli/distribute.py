"""Implements `model = tfdist.distribute(model)`, for programs that call Keras's `fit`."""

from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist import keras_fit
from tfdist.cli import command, open_strategy
from tfdist.config.fields import takes_options
from tfdist.config.job_config import RunConfig
from tfdist.distribution import factory, tf_distribute
from tfdist.distribution.strategy import Strategy, strategy_in_use
from tfdist.errors import InputError, names_arguments
from tfdist.gradients.compression import check as check_compression

Model = TypeVar("Model", bound=keras.Model)


@names_arguments
@takes_options(RunConfig)
def distribute(model: Model, strategy: Strategy | None = None, **options: Any) -> Model:
    """Makes a model's `fit`, `evaluate`, `predict` and `..._on_batch` methods run on all replicas.

    N replicas give the same result as one device: weights, losses, metrics and predictions are equal up to rounding.
    The batch size is the global one. Every process passes the same data, of any kind that Keras accepts, reads all of
    it, and keeps the rows of its own replicas from each batch; N processes thus read N times as much data as if each
    process read only its part. Every process must make the same calls; only the chief displays progress and writes the
    files of callbacks.

    The model is modified in place. It must have been created where it will be trained:

    * under `strategy.scope()` of `MirroredStrategy`, `MultiWorkerMirroredStrategy` or a strategy of tfdist;
    * or under no scope: then the environment determines whether this is one process of a Horovod job (`horovodrun`,
    `tfdist launch --launcher=horovod`), or a single process.

    Args:
      model: a Keras model, which need not be built or compiled yet.
      strategy: strategy in whose scope the model was created; detected by default.
      **options: flags of `tfdist run`, such as `compression="fp16"`, which override those in the environment
        variable TFDIST_FLAGS.

    Returns:
      The model.

    Raises:
      InputError: an option is invalid, or the model was not created under the strategy's scope.
    """
    if not isinstance(model, keras.Model):
        raise InputError(f"tfdist.distribute takes a keras.Model. Received: {model!r:.60}, a {type(model).__name__}.")
    if strategy is not None and not isinstance(strategy, Strategy | tf.distribute.Strategy):
        raise InputError(
            f"`strategy` must be a strategy instance. Received: {strategy!r:.60}. Create one with tfdist.load_strategy, and "
            "create the model in its scope."
        )
    config = command.environment_options(options)
    check_compression(config.compression)
    if keras_fit.distribution_of(model) is not None:
        raise InputError(
            f"A model can be distributed only once. Received: {model.name}, which is already distributed. Remove "
            "the second call."
        )
    if config.precision not in ("float32", model.dtype_policy.name):
        raise InputError(
            f"--precision must be the precision with which the model was created. Received: {config.precision} and "
            f"{model.name}, which has {model.dtype_policy.name}. Call keras.config.set_dtype_policy before the model "
            "is created, or use tfdist run."
        )
    model_strategy = strategy or _strategy_of(model, config)
    if isinstance(model_strategy, Strategy) and model_strategy.optimizer_shards.parts > 1:
        raise InputError(
            "Keras's own fit needs the full optimizer state on each replica. Received: a strategy with shard='optimizer'. "
            "Remove shard, or use tfdist.Trainer."
        )
    keras_fit.attach(model, keras_fit.DistributedModel(model, model_strategy, config))
    return model


def _strategy_of(model: keras.Model, config: RunConfig) -> Strategy:
    """Returns the strategy in whose scope a model was created, or this process's strategy if there was no scope."""
    current = strategy_in_use()
    if current is not None:
        return current
    strategies, engine = factory.started_strategies(), model.distribute_strategy
    if tf.distribute.has_strategy() or engine is not tf.distribute.get_strategy():
        matching = [strategy for strategy in strategies if getattr(strategy, "engine", None) is engine]
        return matching[0] if matching else tf_distribute.strategy_of_engine(engine, config.start_timeout_seconds)
    return strategies[-1] if strategies else open_strategy.start_strategy(config)
