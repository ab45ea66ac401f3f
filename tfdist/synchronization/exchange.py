"""One exchange: the mean change of the replicas updates the global weights, with which they continue.

With x the global weights, w_r the weights of replica r and n_r the rows that it has trained on since the last exchange,

    d = sum over r of n_r (x - w_r) / sum over r of n_r,        x' = outer(x, d),        w_r = x'

A reducer sums d, which may be compressed, with error feedback. Without an outer optimizer, x' = x - d is the mean of the
replicas' weights.

Cost of an exchange: one all-reduce of P + 2 numbers for P trainable parameters. Over a ring, each of N replicas sends
2 P b (N - 1) / N bytes, with b bytes per number: 1 / period of that per step on average. Averages of the optimizer's state
and of moving statistics take one more all-reduce each. Memory: the global weights and the outer optimizer's state.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, Recording
from tfdist.config.spec import parse
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Reducer, Sum
from tfdist.optimizers.catalog import create_optimizer
from tfdist.step.layer_state import TemporaryValues, assign, replica_means
from tfdist.step.local_step import ROWS
from tfdist.step.reduction import Reduction, square_norms
from tfdist.step.settings import named_specs
from tfdist.step.state_store import StateStore


class GlobalWeights:
    """A copy of the trainable weights that is equal on all replicas; memory: one variable per trainable variable.

    Attributes:
      copies: the copies, in the order of the weights.
      variables: the copies and the outer optimizer's state.
    """

    def __init__(self, weights: Sequence[keras.Variable], strategy: Strategy, outer: str):
        """Creates variables for the trainable variables `weights`, initialized to zero; see `assign`.

        `outer` is the outer optimizer, as in `--optimizer`, with its learning rate; "" for none.
        """
        self._strategy, self._weights = strategy, list(weights)
        with strategy.scope():
            self.copies = [zeros_like(variable, "global") for variable in weights]
            self._optimizer = outer_optimizer(outer)
            if self._optimizer is not None:
                self._optimizer.build(self.copies)
        self.variables = [*self.copies, *(self._optimizer.variables if self._optimizer else [])]

    @property
    def optimizer_variables(self) -> list[keras.Variable]:
        """Variables of the outer optimizer."""
        return self.variables[len(self.copies) :]

    def values(self) -> list[tf.Tensor]:
        """Returns the global weights. In a replica function."""
        return read_variables(self.copies)

    def assign(self, values: Sequence[tf.Tensor]) -> None:
        """Assigns values that are equal on all replicas. In a replica function."""
        assign(self.copies, values)

    def take_weights(self, weights: Sequence[keras.Variable]) -> None:
        """Assigns the replicas' weights, which must be equal on all replicas. In a replica function."""
        self.assign(read_variables(weights))

    def update(self, changes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Updates the global weights and returns them. In a replica function.

        Args:
          changes: global weights minus the mean of the replicas' weights: the outer optimizer's gradient.
        """
        if self._optimizer is None:
            self.assign([value - change for value, change in zip(self.values(), changes, strict=True)])
        else:
            self._strategy.apply(self._optimizer, changes, self.copies)
        if any(variable.constraint is not None for variable in self._weights):
            self.assign(apply_constraints(self._weights, self.values()))
        return self.values()


def apply_constraints(weights: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Applies the constraints of the weights, such as `non_neg`, to values; a mean or a step may violate them."""
    pairs = zip(weights, values, strict=True)
    return [x if v.constraint is None else tf.convert_to_tensor(v.constraint(x)) for v, x in pairs]


def zeros_like(variable: keras.Variable, prefix: str) -> keras.Variable:
    """Creates a non-trainable variable of the same shape and dtype, whose name starts with `prefix`."""
    name = f"{prefix}_{variable.path.replace('/', '_')}"
    return keras.Variable("zeros", shape=variable.shape, dtype=variable.dtype, trainable=False, name=name)


def read_variables(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Returns this replica's values of variables. In a replica function."""
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def outer_optimizer(text: str) -> keras.Optimizer | None:
    """Creates the outer optimizer that `text` describes, or returns None for an empty text.

    Raises:
      InputError: the optimizer or an argument is unknown, or its state is initialized with a copy of the weights.
    """
    if not text:
        return None
    optimizer = create_optimizer(text, parse(text).args["learning_rate"], flag="--sync: outer")
    if keras_internals.begins_at_weights(optimizer):
        raise InputError(
            "The state of an outer optimizer cannot begin as a copy of the weights, which it receives later. Received: "
            f"outer={text}. Use another optimizer, such as adam."
        )
    return optimizer


class ExchangeResult(NamedTuple):
    """The result of an exchange, on each replica.

    Attributes:
      divergence: scalar; root mean square over replicas of the distance to their mean, over the norm of the mean.
      rows: scalar; rows on which all replicas have trained, as a multiple of an equal share.
    """

    divergence: tf.Tensor
    rows: tf.Tensor


def tensor_specs(weights: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    """Returns the specs of an exchange's message: a change per variable, and two scalars."""
    return named_specs(weights, "exchange/rows", "exchange/squares")


class Exchange:
    """Exchanges the weights of one model.

    Attributes:
      rows: scalar per replica; rows on which it has trained since the last exchange.
      reduction: sums messages over replicas.
      recording: the calls of the latest trace.
    """

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        optimizer: keras.Optimizer,
        strategy: Strategy,
        reducer: Reducer,
        global_weights: GlobalWeights,
        store: StateStore,
        *,
        optimizer_state: str = "local",
        statistics: Sequence[keras.Variable] = (),
    ):
        """Initializes the exchange of trainable variables `weights`, whose changes `reducer` sums over replicas.

        `optimizer_state` is "local", "averaged" or "reset"; `statistics` are variables to average.
        """
        self._strategy, self._global_weights = strategy, global_weights
        self._weights = list(weights)
        self._slots = [] if optimizer_state == "local" else keras_internals.slots(optimizer)
        self._statistics = list(statistics)
        self._initial_slots = InitialState(optimizer) if optimizer_state == "reset" else None
        [self.rows] = store.variables([ROWS])
        self.reduction = Reduction(reducer, tensor_specs(weights), store, "exchange/")
        self.recording: Recording | None = None

    def exchange(self, expected_rows: tf.Tensor) -> ExchangeResult:
        """Exchanges the weights. A replica function.

        Args:
          expected_rows: scalar of dtype floatx; rows since the last exchange of a replica with an equal share.
        """
        self.recording = Recording(self._strategy.step_collectives)
        # Relative to an equal share, which preserves the magnitude of changes for lossy dtypes.
        rows = tf.cast(tf.convert_to_tensor(self.rows), expected_rows.dtype) / expected_rows
        local_weights = self.local_weights()
        reduction = self.reduction.reduce(self._message(local_weights, rows), self.recording, name="exchange")
        weights, result = self._update(local_weights, reduction.totals)
        state = self.new_state(rows, result.rows, self._strategy.step_collectives)
        self.assign(weights, state, reduction.state)
        self.rows.assign(tf.zeros([], self.rows.dtype))
        return result

    def _message(self, weights: Sequence[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the message of a replica with these weights; see `message_of`."""
        return message_of(self._global_weights.values(), weights, rows)

    def _update(
        self, weights: Sequence[tf.Tensor], totals: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], ExchangeResult]:
        """Updates the global weights with the sum of all messages; returns the replica's new weights."""
        return update_global_weights(self._global_weights, totals)

    def local_weights(self) -> list[tf.Tensor]:
        """Returns this replica's weights. In a replica function."""
        return read_variables(self._weights)

    def new_state(self, rows: tf.Tensor, all_rows: tf.Tensor, collectives: Collectives) -> list[tf.Tensor]:
        """Returns the optimizer's new state, unless it stays local, and the averaged statistics. A replica function."""
        means = replica_means(read_variables(self._statistics), rows, collectives, name="exchange/statistics")
        return [*self._new_slots(rows, all_rows, collectives), *means]

    def _new_slots(self, rows: tf.Tensor, all_rows: tf.Tensor, collectives: Collectives) -> list[tf.Tensor]:
        if self._initial_slots is not None:
            return self._initial_slots.tensors()
        slots = read_variables(self._slots)
        return weighted_mean(slots, rows, all_rows, collectives) if slots else []

    def assign(
        self, weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor], reducer_state: Sequence[tf.Tensor]
    ) -> None:
        """Assigns this replica's weights, its `new_state` and the reducer's new state. In a replica function."""
        variables = [*self._weights, *self._slots, *self._statistics]
        with self._strategy.own_copies(variables):
            assign(variables, [*weights, *state])
        self.reduction.assign(reducer_state)


def message_of(global_weights: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
    """Returns a replica's message: its changes, weighted by `rows`, and two scalars; see `tensor_specs`.

    `rows` is a scalar of dtype floatx: the replica's rows since the last exchange as a multiple of an equal share.
    """
    changes = [x - w for x, w in zip(global_weights, weights, strict=True)]
    return [*(change * tf.cast(rows, change.dtype) for change in changes), rows, rows * square_norm(changes)]


def update_global_weights(
    global_weights: GlobalWeights, totals: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor], ExchangeResult]:
    """Updates the global weights with the sum of all messages; returns them and the result of the exchange."""
    *changes, rows, squares = totals
    mean = [tf.math.divide_no_nan(change, tf.cast(rows, change.dtype)) for change in changes]
    weights = global_weights.update(mean)
    spread = tf.math.divide_no_nan(squares, rows) - square_norm(mean)
    return weights, ExchangeResult(tf.sqrt(tf.maximum(spread, 0)) / tf.sqrt(square_norm(weights)), rows)


def weighted_mean(
    values: Sequence[tf.Tensor], rows: tf.Tensor, all_rows: tf.Tensor, collectives: Collectives
) -> list[tf.Tensor]:
    """Returns the exact mean of each tensor over replicas, weighted by their rows. In a replica function."""
    weighted_values = [local_value * tf.cast(rows, local_value.dtype) for local_value in values]
    totals = Bucketed(Sum()).reduce(weighted_values, [], collectives, name="exchange/state").totals
    return [
        tf.where(all_rows > 0, tf.math.divide_no_nan(total, tf.cast(all_rows, total.dtype)), local_value)
        for total, local_value in zip(totals, values, strict=True)
    ]


def replica_mean(
    variables: Sequence[keras.Variable], strategy: Strategy, rows: Callable[[], tf.Tensor]
) -> TemporaryValues:
    """Returns a context in which variables have their mean over the replicas. Cost: one all-reduce of the variables.

    Args:
      variables: variables with a separate value on each replica.
      strategy: strategy of the replicas.
      rows: replica function that returns the replica's weight, a scalar; if all are zero, the mean is unweighted.
    """

    def means(values: list[tf.Tensor]) -> list[tf.Tensor]:
        own_rows = tf.cast(rows(), keras.config.floatx())
        [total] = strategy.collectives.all_reduce([own_rows], name="replica_mean/rows")
        weight = tf.where(total > 0, own_rows / tf.maximum(total, 1), 1 / strategy.replicas)
        return weighted_mean(values, weight, tf.ones_like(weight), strategy.collectives)

    return TemporaryValues(variables, strategy, means, values_differ=lambda: strategy.replicas > 1)


class InitialState:
    """The initial state of an optimizer, for resets; memory: one number per variable."""

    def __init__(self, optimizer: keras.Optimizer):
        """Stores the values of a built optimizer before the first update.

        Raises:
          InputError: the initial state is not constant, or has already changed.
        """
        self._slots = keras_internals.slots(optimizer)
        values = keras_internals.initial_slot_values(optimizer)
        if values is None:
            raise InputError(
                "The optimizer's state, which is reset, must begin at constants. Received: "
                f"{type(optimizer).__name__}, whose state begins as a copy of the weights, at other values, or has "
                "already been updated. Use a new optimizer, such as AdamW, or a sync that does not reset it."
            )
        self._values = values

    def tensors(self) -> list[tf.Tensor]:
        """Returns the values of `keras_internals.slots` of the optimizer. In a replica function."""
        pairs = zip(self._slots, self._values, strict=True)
        return [tf.fill(slot.shape, tf.cast(number, slot.dtype)) for slot, number in pairs]


def square_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of the squares of all elements, in floatx."""
    return tf.add_n(square_norms(tensors))
