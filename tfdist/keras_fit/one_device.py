"""Replaces Keras's methods in code written for one device: a custom `train_step`, `test_step` or `compute_loss`.

Such code assumes that a loss is the mean over the rows of its batch. The sum of the replicas' means, weighted by their numbers
of rows, is the mean over the global batch, and the same holds for gradients. `compute_loss` scales losses that are divided by
sums of weights or masks accordingly.
"""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.distribution.strategy import strategy_in_use
from tfdist.step import loss as losses
from tfdist.step.metrics import track_outputs, weight_scalars

Apply = Callable[[keras.Optimizer, Sequence[Any], Sequence[keras.Variable]], None]


class Replica(NamedTuple):
    """A replica whose code is running."""

    collectives: Collectives
    rows: tf.Tensor  # scalar int32; number of rows of the replica that count in losses and metrics
    batch_size: tf.Tensor  # scalar int32; number of rows of the global batch
    # Replacement of an optimizer's `apply`, called with the optimizer, gradients of the mean over the replica's rows,
    # and the variables; None for no replacement
    apply: Apply | None = None
    has_all_rows: bool = False  # whether the rows are the global batch, so that Keras's results are correct
    scales_losses: bool = True  # whether a `LossScaleOptimizer` scales losses; if so, its `apply` gets scaled gradients


_current: contextvars.ContextVar[Replica | None] = contextvars.ContextVar("replica", default=None)


current_replica = _current.get  # () -> the replica whose code is running in this thread; None if there is none


@contextlib.contextmanager
def replica_context(replica: Replica | None) -> Iterator[None]:
    """Context in which the code of a replica runs; with None, Keras's methods are the original ones."""
    weight = None
    if replica is not None and not replica.has_all_rows:
        weight = losses.to_floatx(replica.rows) / losses.to_floatx(replica.batch_size)
    with keras_internals.context_value(_current, replica), weight_scalars(weight):
        yield


def compute_loss(
    replica: Replica,
    original: Callable[..., Any],
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    y_pred: Any = None,
    sample_weight: Any = None,
    training: bool = True,
) -> tf.Tensor:
    """Returns the global batch's loss as if it were a mean over the replica's rows."""
    keras_internals.build_losses(model, y, y_pred)
    parts = [] if replica.has_all_rows else losses.terms(model, y, y_pred, sample_weight)
    if replica.has_all_rows or any(part.values_per_row is not None for part in parts):  # a loss without reduction
        return original(x, y, y_pred, sample_weight, training)
    totals = losses.totals(parts, replica.batch_size, replica.collectives)
    output_means = keras_internals.loss_means(model)[1:]
    track_outputs(output_means, losses.loss_shares(parts, totals), replica.rows, replica.batch_size)
    return losses.mean_over_rows(model, parts, totals, replica.rows, replica.batch_size)


def train_step(replica: Replica, original: Callable[..., Any], model: keras.Model, data: Any) -> dict[str, Any]:
    """Same as Keras's method, but does not scale losses by the number of replicas."""
    if replica.has_all_rows:
        return original(data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred, loss = _forward(replica, model, x, y, sample_weight, training=True)
        loss = model.optimizer.scale_loss(loss)
    if weights := model.trainable_weights:
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def test_step(replica: Replica, original: Callable[..., Any], model: keras.Model, data: Any) -> dict[str, Any]:
    """Same as Keras's method, but does not scale losses by the number of replicas."""
    if replica.has_all_rows:
        return original(data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred, _ = _forward(replica, model, x, y, sample_weight, training=False)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def scale_loss(replica: Replica, original: Callable[..., Any], optimizer: keras.Optimizer, loss: Any) -> Any:
    """Returns the loss, scaled to avoid underflow in float16 if the replica scales losses."""
    return original(loss) if replica.scales_losses else loss


def apply(
    replica: Replica,
    original: Callable[..., Any],
    optimizer: keras.Optimizer,
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> Any:
    """Sums gradients over replicas and applies them."""
    if replica.apply is None:
        return original(grads, trainable_variables)
    variables = list(trainable_variables or keras_internals.trained_variables(optimizer))
    return replica.apply(optimizer, list(grads), variables)


def _forward(
    replica: Replica, model: keras.Model, x: Any, y: Any, sample_weight: Any, training: bool
) -> tuple[Any, tf.Tensor]:
    """Returns the model's outputs and its loss, which is added to Keras's mean of losses."""
    y_pred, strategy = model(x, training=training), strategy_in_use()
    y_pred = y_pred if strategy is None else strategy.layouts.lay_out_rows(y_pred)
    kwargs = {"training": training} if "training" in inspect.signature(model.compute_loss).parameters else {}
    value = model.compute_loss(x, y, y_pred, sample_weight, **kwargs)  # by position, as in Keras
    keras_internals.loss_means(model)[0].update_state(value, sample_weight=replica.rows)
    return y_pred, value
