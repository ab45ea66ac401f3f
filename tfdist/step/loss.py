"""Computes the loss of a global batch that is split over replicas, from separate numerators and denominators.

Keras's loss of a batch is sum(values * weights) / count. If replicas have different numbers of rows, masks or sample
weights, it differs from the mean of the replicas' losses. Here each replica computes its numerator, the denominators
are summed over replicas, and the sum over replicas of (numerator / total denominator) is Keras's loss of the whole
batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.errors import InputError

DENOMINATORS = "loss/denominators"  # name of the call that sums them over replicas


class Term(NamedTuple):
    """One replica's part of one loss."""

    numerator: tf.Tensor  # scalar; sum of weighted values over this replica's rows
    denominator: tf.Tensor  # scalar; this replica's part of the divisor of the sum of numerators
    # Number or scalar; the denominator per row if it is equal for all rows, so that the total is known without
    # communication; None if the denominator depends on the data; 0 if training uses the sum
    per_row: int | tf.Tensor | None
    weight: float  # weight of this loss among the model's losses
    # Scalar; number of values per row for a loss without reduction, whose mean is recorded; None for other losses
    values_per_row: tf.Tensor | None = None

    @property
    def is_sum(self) -> bool:
        """Whether the sum over rows is both differentiated and recorded, as with `reduction="sum"`."""
        return self.uses_sum and self.values_per_row is None

    @property
    def uses_sum(self) -> bool:
        """Whether training uses the sum over rows."""
        return isinstance(self.per_row, int) and self.per_row == 0


def terms(model: keras.Model, y_true: Any, y_pred: Any, sample_weight: Any) -> list[Term]:
    """Returns one replica's parts of the losses with which the model was compiled."""
    flat_losses = keras_internals.flat_losses(model)
    if flat_losses:
        y_true, y_pred = keras_internals.match_structures(model, y_true, y_pred)
    parts = []
    for path, loss, weight in flat_losses:
        weights = value_at_path(sample_weight, path) if keras.tree.is_nested(sample_weight) else sample_weight
        labels, outputs = value_at_path(y_true, path), value_at_path(y_pred, path)
        parts.append(_term(loss, labels, outputs, weights, 1.0 if weight is None else weight))
    return parts


def totals(parts: list[Term], batch_size: int | tf.Tensor, collectives: Collectives) -> list[tf.Tensor]:
    """Returns the denominators of the global batch, of `batch_size` rows, one per term.

    `parts` is the result of `terms` for all of this replica's rows. Denominators that depend on the data are summed with
    one all-reduce.
    """
    indices = [i for i, part in enumerate(parts) if part.per_row is None]
    denominators = [
        (0 if part.per_row is None else part.per_row) * tf.cast(batch_size, part.numerator.dtype) for part in parts
    ]
    if indices:
        sums = collectives.all_reduce([parts[i].denominator[None] for i in indices], name=DENOMINATORS)
        for i, total in zip(indices, sums, strict=True):
            denominators[i] = total[0]
    return denominators


def total_of(summands: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of a model's losses, or of shares of them; raises `InputError` if there are none."""
    if not summands:
        raise InputError(
            "Training a model requires a loss. Received no loss. Pass `loss=`, or use `add_loss` in a layer."
        )
    return sum(summands[1:], start=summands[0])


def training_losses(
    layer_losses: tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]],
    parts: list[Term],
    totals: list[tf.Tensor],
    rows: tf.Tensor,
    batch_size: int | tf.Tensor,
    add: Callable[[Sequence[tf.Tensor]], tf.Tensor] = total_of,
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
    """Returns shares of the loss to differentiate, of the recorded loss, and of each loss with which the model was compiled.

    The sum of the shares of all replicas and micro-steps is the global batch's loss. The first two are the same tensor unless
    a loss has no reduction: for such a loss, which is a vector, Keras differentiates the sum and records the mean.

    `layer_losses` are the losses added by layers in the forward pass, which are means over this share's rows, and the
    regularization losses of weights; `parts` and `totals` are the results of `terms` and `totals`. This share has `rows`, a
    scalar integer, of the `batch_size` rows of the global batch. `add` sums shares of losses.
    """
    share, (data_losses, weight_losses) = to_floatx(rows) / to_floatx(batch_size), layer_losses

    def weighted_sum(parts: list[Term], totals: list[tf.Tensor]) -> tf.Tensor:
        regularization = [tf.reduce_sum(loss) * tf.cast(share, loss.dtype) for loss in weight_losses]
        return add(_data_loss_shares(data_losses, parts, totals, share) + regularization)

    value = recorded_value = weighted_sum(parts, totals)
    if any(part.values_per_row is not None for part in parts):
        totals = [
            total if part.values_per_row is None else part.values_per_row * tf.cast(batch_size, part.numerator.dtype)
            for part, total in zip(parts, totals, strict=True)
        ]
        parts = [part if part.values_per_row is None else part._replace(per_row=None) for part in parts]
        recorded_value = weighted_sum(parts, totals)
    return value, recorded_value, loss_shares(parts, totals)


def loss_shares(parts: list[Term], totals: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns one replica's share of each loss with which the model was compiled, before weighting."""
    return [
        part.numerator if part.uses_sum else tf.math.divide_no_nan(part.numerator, total)
        for part, total in zip(parts, totals, strict=True)
    ]


def mean_over_rows(
    model: keras.Model, parts: list[Term], totals: list[tf.Tensor], rows: tf.Tensor, batch_size: tf.Tensor
) -> tf.Tensor:
    """Returns the loss as a mean over this replica's rows; the row-weighted mean over replicas is the global loss.

    Single-device code may assume that the loss of a batch is a mean over its rows.
    """
    own_rows, all_rows = to_floatx(rows), to_floatx(batch_size)
    share = tf.math.divide_no_nan(own_rows, all_rows)
    summands = _data_loss_shares(keras_internals.data_losses(model), parts, totals, share)
    summands = [tf.math.divide_no_nan(summand * all_rows, own_rows) for summand in summands]
    return total_of([*summands, *(tf.reduce_sum(loss) for loss in keras_internals.weight_losses(model))])


def evaluation_sums(model: keras.Model, parts: list[Term], rows: tf.Tensor, batch_size: int | tf.Tensor) -> tf.Tensor:
    """Returns one replica's numerators and denominators of a batch, as a vector that can be summed.

    `evaluation_loss` takes the sum over batches and replicas. It must be called after the model's forward pass, which
    updates the losses added by layers. `parts` is the result of `terms`, `rows` is a scalar integer, the number of this
    replica's rows, and `batch_size` is the number of rows of all replicas.
    """
    count = tf.cast(rows, tf.float64)
    layer_losses = [tf.cast(tf.reduce_sum(loss), tf.float64) * count for loss in keras_internals.data_losses(model)]
    pairs = [(tf.cast(part.numerator, tf.float64), tf.cast(part.denominator, tf.float64)) for part in parts]
    weight = tf.cast(batch_size, tf.float64)  # the weight of a batch in Keras's mean of the batches' sums
    pairs = [(pair[0] * weight, pair[1]) if part.is_sum else pair for part, pair in zip(parts, pairs, strict=True)]
    layer_loss = tf.add_n(layer_losses) if layer_losses else count * 0
    return tf.stack([number for pair in [*pairs, (layer_loss, count)] for number in pair])


def layer_loss_sums(sums: tf.Tensor) -> tf.Tensor:
    """Keeps only the losses added by layers in `evaluation_sums`, for a process with layers but without the outputs."""
    return tf.concat([tf.zeros_like(sums[:-2]), sums[-2:-1], tf.zeros_like(sums[-1:])], axis=0)


def evaluation_loss(model: keras.Model, sums: Any, regularization: float) -> float:
    """Returns the loss of the whole dataset as one batch, given summed `evaluation_sums`.

    A loss with `reduction="sum"` is, as in Keras, the mean of the batches' sums, weighted by their rows.
    """
    layer_loss, rows = float(sums[-2]), float(sums[-1])
    weights = [1.0 if flat.weight is None else flat.weight for flat in keras_internals.flat_losses(model)]
    value = sum(weight * loss for weight, loss in zip(weights, evaluation_losses(sums), strict=True))
    value += layer_loss / rows if rows else 0.0
    return value + regularization


def evaluation_losses(sums: Any) -> list[float]:
    """Returns each loss with which the model was compiled, before weighting, for summed `evaluation_sums`."""
    pairs = [(float(a), float(b)) for a, b in zip(sums[:-2:2], sums[1:-2:2], strict=True)]
    return [a / b if b else 0.0 for a, b in pairs]


def _term(loss: keras.Loss, y_true: Any, y_pred: Any, sample_weight: Any, weight: float) -> Term:
    values, mask = keras_internals.loss_values(loss, y_true, y_pred)
    rows = tf.shape(keras.tree.flatten(y_pred)[0])[0]
    # A scalar result of a user's function is assumed to be a mean over the rows.
    if values.shape.rank == 0:
        count = tf.cast(rows, values.dtype)
        return Term(values * count, count, 1, weight)
    values_per_row = tf.cast(tf.size(values) / rows, loss.dtype)  # a function may return values of any shape
    numerator = keras_internals.weighted_sum(values, sample_weight, mask, loss.dtype)
    term = Term(numerator, *_denominator(loss, values, values_per_row, sample_weight, mask), weight)
    return term._replace(values_per_row=values_per_row) if loss.reduction in (None, "none") else term


def _denominator(
    loss: keras.Loss, values: tf.Tensor, values_per_row: tf.Tensor, sample_weight: Any, mask: tf.Tensor | None
) -> tuple[tf.Tensor, int | tf.Tensor | None]:
    if loss.reduction in (None, "none", "sum"):
        count = tf.shape(values)[0] if loss.reduction == "sum" else tf.size(values)
        return tf.cast(count, loss.dtype), 0
    if loss.reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        return keras_internals.sum_of_weights(sample_weight, mask, loss.dtype), None
    if mask is not None:
        per_entry = tf.cast(tf.size(values) / tf.maximum(tf.size(mask), 1), loss.dtype)
        return tf.reduce_sum(tf.cast(mask, loss.dtype)) * per_entry, None
    return tf.cast(tf.size(values), loss.dtype), values_per_row


def _data_loss_shares(
    layer_losses: Sequence[tf.Tensor], parts: list[Term], totals: list[tf.Tensor], row_share: tf.Tensor
) -> list[tf.Tensor]:
    """Returns one replica's weighted shares of the losses that depend on its rows."""
    losses = [tf.cast(tf.reduce_sum(loss), keras.config.floatx()) for loss in layer_losses]
    weighted_shares = [
        share if part.weight == 1.0 else share * part.weight
        for part, share in zip(parts, loss_shares(parts, totals), strict=True)
    ]
    return weighted_shares + [value * row_share for value in losses]


def to_floatx(number: int | tf.Tensor) -> tf.Tensor:
    """Casts a number, such as a number of rows, to the dtype of losses."""
    return tf.cast(number, keras.config.floatx())


def value_at_path(structure: Any, path: tuple[Any, ...]) -> Any:
    """Returns the part of a structure at a path of keys and indices."""
    for key in path:
        structure = structure[key]
    return structure
