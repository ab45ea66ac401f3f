"""Temporary values of a model's variables: the mean of the replicas' statistics, or the average of its weights."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.distribution.strategy import Strategy
from tfdist.gradients import Bucketed, Sum
from tfdist.step.validation import inner_optimizer

# Of means of what replicas or micro-steps have computed from their rows, such as moving statistics. In float64, means of equal
# numbers, such as counters of steps, are exact, and those of the lowest float32 are finite.
MEAN_DTYPE = tf.float64


def weighted_terms(values: Sequence[tf.Tensor | keras.Variable], weight: tf.Tensor) -> list[tf.Tensor]:
    """Returns the summands of weighted means, of `MEAN_DTYPE`: each value times its weight, and the weight.

    Args:
      values: tensors or variables of floating dtypes.
      weight: scalar, such as a number of rows; with weight zero, values may be NaN.
    """
    weight = tf.cast(weight, MEAN_DTYPE)
    return [*(tf.math.multiply_no_nan(tf.cast(value, MEAN_DTYPE), weight) for value in values), weight]


def means_of(sums: Sequence[tf.Tensor], values: Sequence[tf.Tensor | keras.Variable]) -> list[tf.Tensor]:
    """Returns the means, in the dtypes of the values; the values themselves if all weights are zero.

    Args:
      sums: sums of all `weighted_terms`.
      values: the caller's own values.
    """
    *totals, weight = sums
    means = []
    for total, value in zip(totals, values, strict=True):
        has_mean = tf.broadcast_to(weight > 0, value.shape)  # a scalar condition would crash DTensor
        mean = tf.cast(tf.math.divide_no_nan(total, weight), value.dtype)
        means.append(tf.where(has_mean, mean, tf.convert_to_tensor(value)))
    return means


def means_over_replicas(
    values: Sequence[tf.Tensor | keras.Variable], weight: tf.Tensor, collectives: Collectives, *, name: str
) -> list[tf.Tensor]:
    """Returns the weighted means over replicas, as `means_of`; in a replica function.

    Cost: one all-reduce of the values and a scalar, in float64.
    """
    if not values:
        return []
    terms = weighted_terms(values, weight)
    return means_of(Bucketed(Sum()).reduce(terms, [], collectives, name=name).totals, values)


class TemporaryValues:
    """Context in which variables have temporary values; every process must enter it.

    Each replica's own values are restored bit for bit on exit; meanwhile they take memory in addition to the temporary ones.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: Strategy,
        values: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        *,
        are_local: bool = True,
        differ: Callable[[], bool] = lambda: True,
    ):
        """Initializes the context; compiles nothing yet.

        Args:
          variables: variables of the model or the optimizer.
          strategy: strategy of the replicas.
          values: replica function that returns the values to assign, given this replica's own ones.
          are_local: whether each replica has its own values of the variables.
          differ: returns whether the values differ from those of the variables.
        """
        self._variables, self._strategy, self._values = list(variables), strategy, values
        self._are_local, self._differ = are_local, differ
        self._compiled_swap = strategy.compiled_for_variables(self._swap)
        self._compiled_restore = strategy.compiled_for_variables(self._assign)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Returns the context."""
        own = self.assign()
        try:
            yield
        finally:
            if own is not None:
                self._compiled_restore(own)

    def assign(self) -> Any:
        """Assigns the values permanently; returns the replicas' own ones, or None if nothing changes."""
        return self._compiled_swap() if self._variables and self._differ() else None

    def _swap(self) -> list[tf.Tensor]:
        """Assigns the values; returns this replica's own ones. A replica function."""
        own = [tf.identity(keras_internals.value_of(variable)) for variable in self._variables]
        values = self._values(own)
        with tf.control_dependencies(own):
            self._assign(values)
        return own

    def _assign(self, values: Any) -> None:
        """Assigns values of all variables. A replica function."""
        with self._strategy.own_copies(self._variables) if self._are_local else contextlib.nullcontext():
            for variable, value in zip(self._variables, values, strict=True):
                keras_internals.value_of(variable).assign(self._strategy.layouts.stored(variable, value))


def averaged_statistics(model: keras.Model, strategy: Strategy) -> TemporaryValues:
    """Returns a context in which a model's moving statistics are their mean over replicas.

    Cost: one all-reduce of them, in float64.
    """

    def means(own: list[tf.Tensor]) -> list[tf.Tensor]:
        return means_over_replicas(own, tf.ones([]), strategy.collectives, name="statistics")

    statistics = keras_internals.moving_statistics(model)
    return TemporaryValues(statistics, strategy, means, differ=lambda: strategy.training_shares[1] > 1)


def averaged_weights(model: keras.Model, strategy: Strategy) -> TemporaryValues:
    """Returns a context in which the weights of a model are their moving averages; the same on every replica.

    Without an average, or before the first update, nothing changes. Moving statistics, such as those of batch
    normalization, stay as they are: they already are averages.
    """
    optimizer = inner_optimizer(model.optimizer)
    pairs = keras_internals.weight_averages(optimizer)
    weights = [variable for variable, _ in pairs]

    def averages(own: list[tf.Tensor]) -> list[tf.Tensor]:
        stored = [keras_internals.value_of(average) for _, average in pairs]
        # A replica that does not have an average passes the weight in its place.
        values = [
            own_weight if value is None else tf.convert_to_tensor(value)
            for value, own_weight in zip(stored, own, strict=True)
        ]
        return strategy.optimizer_shards.from_owners(weights, values, "averages")

    def is_updated() -> bool:
        return int(strategy.local(keras_internals.value_of(optimizer.iterations))[0]) > 0

    return TemporaryValues(weights, strategy, averages, are_local=False, differ=is_updated)
