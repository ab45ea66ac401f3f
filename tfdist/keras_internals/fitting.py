"""Internals of Keras's `fit`: its strategy, its functions, and its running losses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from tensorflow.python.eager import context

from tfdist.errors import InputError


def leave_strategy(model: keras.Model) -> None:
    """Makes a model forget the tf.distribute strategy in whose scope it was created.

    With a strategy, Keras builds the model from the first batch of an additional pass over the data.
    """
    model._distribute_strategy = None


def compilation(model: keras.Model) -> Any:
    """Returns an object that is a new one after each `compile`; None before the first."""
    return model._loss_tracker if model.compiled else None


def initial_epoch(model: keras.Model) -> int:
    """Returns the epoch, restored by a callback, at which `fit` resumes; 0 if there is none."""
    return model._initial_epoch or 0


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Sets the epoch at which a starting `fit` resumes."""
    model._initial_epoch = epoch


@contextlib.contextmanager
def without_optimizer(model: keras.Model) -> Iterator[None]:
    """Context in which a model is built without its optimizer, which is built when it is first applied."""
    optimizer, model.optimizer = model.optimizer, None
    try:
        yield
    finally:
        model.optimizer = optimizer


def forget_functions(model: keras.Model) -> None:
    """Makes Keras recreate the functions that run steps, as `compile` does."""
    model.train_function = model.test_function = model.predict_function = None


def global_seed() -> int | None:
    """Returns the last argument of `tf.random.set_seed`; None if it was not called."""
    return context.global_seed()


def loss_means(model: keras.Model) -> list[keras.metrics.Mean]:
    """Returns Keras's means of losses over batches: of the total loss and, if there are several losses, of each."""
    return [model._loss_tracker, *(model._compile_loss.metrics if model._compile_loss is not None else [])]


def traced_without_effects(function: Callable[..., Any], batch: Any) -> None:
    """Calls a function of one batch with symbolic tensors; changes no variable.

    Args:
      function: function of a batch; called again if the first call fails, e.g. where variables are assigned in a
        condition.
      batch: structure of `tf.TensorSpec`, with None for what is left out.
    """
    symbolic = tf.nest.map_structure(lambda s: None if s is None else keras.KerasTensor(s.shape, s.dtype.name), batch)
    try:
        compute_output_spec(function, symbolic)
    except InputError:
        raise
    except (AttributeError, TypeError, ValueError):
        tf.function(lambda given: tf.nest.flatten(function(given)) and None, autograph=False).get_concrete_function(
            batch
        )
