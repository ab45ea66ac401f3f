"""Keras's own `fit`: how it finds its strategy, and what it keeps of losses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from tensorflow.python.eager import context

from tfdist.errors import InputError


def leave_strategy(model: keras.Model) -> None:
    """Makes a model forget the strategy of tf.distribute in whose scope it was made.

    With one, Keras builds the model by the first batch of a pass over the data that it begins for that alone.
    """
    model._distribute_strategy = None


def compilation(model: keras.Model) -> Any:
    """Something that is another object after each `compile`; None before the first."""
    return model._loss_tracker if model.compiled else None


def initial_epoch(model: keras.Model) -> int:
    """The epoch that a callback has restored, from which `fit` goes on; 0 for none."""
    return model._initial_epoch or 0


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Makes a `fit` that begins go on from an epoch."""
    model._initial_epoch = epoch


@contextlib.contextmanager
def without_optimizer(model: keras.Model) -> Iterator[None]:
    """Inside, a model is built without its optimizer, which is built for the variables that it is applied to first."""
    optimizer, model.optimizer = model.optimizer, None
    try:
        yield
    finally:
        model.optimizer = optimizer


def forget_functions(model: keras.Model) -> None:
    """Makes Keras create anew what runs the steps of a model's calls, as `compile` does."""
    model.train_function = model.test_function = model.predict_function = None


def global_seed() -> int | None:
    """What `tf.random.set_seed` was given last; None if it was not called."""
    return context.global_seed()


def loss_means(model: keras.Model) -> list[keras.metrics.Mean]:
    """Keras's means of the losses of batches: of the whole loss and, where there are several losses, of each."""
    return [model._loss_tracker, *(model._compile_loss.metrics if model._compile_loss is not None else [])]


def traced_without_effects(function: Callable[..., Any], batch: Any) -> None:
    """Calls a function of one batch with symbolic tensors; no variable changes.

    Args:
      function: of a batch; it is called twice if the first call fails, as where variables are assigned in a condition.
      batch: structure of `tf.TensorSpec`.
    """
    symbolic = tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), batch)
    try:
        compute_output_spec(function, symbolic)
    except InputError:
        raise
    except (AttributeError, TypeError, ValueError):
        tf.function(lambda given: tf.nest.flatten(function(given)) and None, autograph=False).get_concrete_function(
            batch
        )
