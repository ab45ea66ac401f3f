"""One line in a program that calls Keras's `fit`: `model = tfdist.distribute(model)`."""

from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist import keras_fit
from tfdist.cli import environment_flags, open_strategy
from tfdist.config.run_config import RunConfig
from tfdist.distribution import registry, tf_distribute
from tfdist.distribution.strategy import Strategy, strategy_in_use
from tfdist.errors import InputError

Model = TypeVar("Model", bound=keras.Model)


def distribute(model: Model, strategy: Strategy | None = None, **options: Any) -> Model:
    """Makes Keras's own `fit`, `evaluate`, `predict` and `..._on_batch` of a model run on all replicas.

    N replicas give the numbers of one device: weights, losses, metrics and predictions, to rounding. The batch size is that of
    the global batch. Every process gives the same data, whatever Keras takes: each reads all of it and keeps its replicas'
    rows of each batch, so reading costs on N processes N times what it would if each read a part. Every process makes the same
    calls; the chief alone shows progress and writes what callbacks write.

    The model is the one that was given. It must have been made where it will train:

    * under `strategy.scope()`, of `MirroredStrategy`, `MultiWorkerMirroredStrategy` or one of tfdist's;
    * or under none: then the environment says whether this is one process of a job that speaks Horovod (`horovodrun`,
      `tfdist.launch --launcher=horovod`), or alone.

    Args:
      model: built or not, compiled or not yet.
      strategy: in whose scope it was made; by default it is found.
      **options: flags of `python -m tfdist.run`, such as `compression="fp16"`, which override those in the environment variable
        TFDIST_FLAGS.

    Returns:
      The model.

    Raises:
      InputError: an option is wrong, or the model was not made under the strategy's scope.
    """
    config = environment_flags.options(options)
    if keras_fit.attached(model) is not None:
        raise InputError(f"A model is distributed once. Received: {model.name}, which is. Leave out the second call.")
    if config.precision not in ("float32", model.dtype_policy.name):
        raise InputError(
            f"--precision is a model's from its making on. Received: {config.precision} and {model.name}, which has "
            f"{model.dtype_policy.name}. Call keras.config.set_dtype_policy before the model is made, or use tfdist.run."
        )
    keras_fit.attach(model, keras_fit.Distributed(model, strategy or _found(model, config), config))
    return model


def _found(model: keras.Model, config: RunConfig) -> Strategy:
    """The strategy in whose scope a model was made; for one that was made in none, that of this process."""
    here = strategy_in_use()
    if here is not None:
        return here
    started, engine = registry.started(), model.distribute_strategy
    if tf.distribute.has_strategy() or engine is not tf.distribute.get_strategy():
        ours = [strategy for strategy in started if getattr(strategy, "engine", None) is engine]
        return ours[0] if ours else tf_distribute.adopted(engine, config.start_timeout_seconds)
    return started[-1] if started else open_strategy.load(config)
