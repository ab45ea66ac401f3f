"""An exchange: updates the global weights with the mean change of the replicas, which continue with the result.

With x the global weights, w_r the weights of replica r and n_r the rows that it has trained on since the last exchange,

    d = sum over r of n_r (x - w_r) / sum over r of n_r,        x' = outer(x, d),        w_r = x'

A reducer sums d, which may be compressed, with error feedback. Without an outer optimizer, x' = x - d is the mean of the
replicas' weights.

Cost of an exchange: one all-reduce of P + 2 numbers for P trainable parameters. Over a ring, each of N replicas sends
2 P b (N - 1) / N bytes, with b bytes per number: 1 / period of that per step on average. Averages of the optimizer's state
and of moving statistics take one more all-reduce each. Memory: the global weights and the outer optimizer's state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, RecordingCollectives
from tfdist.collectives.forwarding import SequentialCollectives
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

CreateReducer = Callable[[Sequence[tf.TensorSpec]], Reducer]


class GlobalWeights:
    """A copy of the trainable weights that is equal on all replicas; memory: one variable per trainable variable.

    Attributes:
      copies: the copies, in the order of the weights.
      optimizer_variables: the outer optimizer's state.
      variables: the copies and the outer optimizer's state.
    """

    def __init__(self, weights: Sequence[keras.Variable], strategy: Strategy, outer: str):
        """Creates variables for the trainable variables `weights`, initialized to zero; see `assign`.

        `outer` is the outer optimizer, as in `--optimizer`, with its learning rate; "" for none.
        """
        self._strategy, self._weights = strategy, list(weights)
        with strategy.scope():
            self.copies = [zeros_like(variable, "global") for variable in weights]
            self._optimizer = create_outer_optimizer(outer)
            if self._optimizer is not None:
                self._optimizer.build(self.copies)
        self.optimizer_variables = self._optimizer.variables if self._optimizer else []
        self.variables = [*self.copies, *self.optimizer_variables]

    def values(self) -> list[tf.Tensor]:
        """Returns the global weights. Call it in a replica function."""
        return read_variables(self.copies)

    def assign(self, values: Sequence[tf.Tensor]) -> None:
        """Assigns values that are equal on all replicas. Call it in a replica function."""
        assign(self.copies, values)

    def take_weights(self) -> None:
        """Assigns the replicas' weights, which must be equal on all replicas. Call it in a replica function."""
        self.assign(read_variables(self._weights))

    def update(self, changes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Updates the global weights and returns them. Call it in a replica function.

        The outer optimizer's gradients are `changes`: global weights minus the mean of the replicas' weights.
        """
        if self._optimizer is None:
            self.assign([value - change for value, change in zip(self.values(), changes, strict=True)])
        else:
            self._strategy.apply(self._optimizer, changes, self.copies)
        if any(variable.constraint is not None for variable in self._weights):
            self.assign(apply_constraints(self._weights, self.values()))
        return self.values()


def apply_constraints(weights: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Applies the constraints of the weights, such as `non_neg`, to values, which a mean or a step may violate."""
    pairs = zip(weights, values, strict=True)
    return [x if v.constraint is None else tf.convert_to_tensor(v.constraint(x)) for v, x in pairs]


def zeros_like(variable: keras.Variable, prefix: str) -> keras.Variable:
    """Creates a non-trainable variable of the same shape and dtype, whose name starts with `prefix`."""
    name = f"{prefix}_{variable.path.replace('/', '_')}"
    return keras.Variable("zeros", shape=variable.shape, dtype=variable.dtype, trainable=False, name=name)


def read_variables(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Returns this replica's values of variables. Call it in a replica function."""
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def create_outer_optimizer(text: str) -> keras.Optimizer | None:
    """Creates the outer optimizer that `text` describes, or returns None for an empty text.

    Raises:
      InputError: the optimizer or an argument is unknown, or the optimizer initializes its state with the weights.
    """
    if not text:
        return None
    optimizer = create_optimizer(text, parse(text).args["learning_rate"], flag="--sync: outer")
    if keras_internals.state_starts_from_weights(optimizer):
        raise InputError(
            "An outer optimizer receives the weights later, so it must initialize its state to constants. Received: "
            f"outer={text}. Use another optimizer, such as adam."
        )
    return optimizer


class ExchangeResult(NamedTuple):
    """The result of an exchange, on each replica."""

    # Scalar; root mean square over replicas of the distance to their mean, over the norm of the mean.
    divergence: tf.Tensor
    rows: tf.Tensor  # scalar; rows of all replicas, as a multiple of the expected rows of one


def tensor_specs(weights: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    """Returns the specs of the summands of an exchange: a change per variable, and two scalars."""
    return named_specs(weights, "exchange/rows", "exchange/squares")


class Exchange:
    """The exchange of some weights, in three replica functions: `prepare`, `exchange` and `use_result`; or `run` for all.

    With the notation above, weights that were sent at step t are replaced at step u by

        w_r(u) = x'                                         the default
        w_r(u) = mixing w_r(u) + (1 - mixing) x'            Streaming DiLoCo (Douillard et al., arXiv:2501.18512)
        w_r(u) = x' + w_r(u) - w_r(t)                       local SGD with a delay (CoCoD-SGD, Shen et al., arXiv:1906.12043)

    `exchange` neither reads nor changes variables of the steps, so both may run concurrently.

    Attributes:
      own_variables: the weights that each replica sent, if replicas keep their local progress; else empty.
      all_rows: scalar per replica; number of rows that its steps have counted.
      reduction: sums the changes over replicas.
      recording: the collective calls of the latest trace.
    """

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        strategy: Strategy,
        create_reducer: CreateReducer,
        store: StateStore,
        outer: str = "",
        *,
        name: str = "exchange",
        mixing: float | None = 0.0,
        optimizer: keras.Optimizer | None = None,
        optimizer_state: str = "local",
        statistics: Sequence[keras.Variable] = (),
    ):
        """Creates the variables; `name` is the prefix of the names of messages and state.

        See `GlobalWeights` for `outer` and `LocalSGD.effective_mixing` for `mixing`. `optimizer_state` is "local",
        "averaged" or "reset"; only the last two need the `optimizer`. `statistics` are averaged.
        """
        self.weights, self.global_weights = list(weights), GlobalWeights(weights, strategy, outer)
        self.recording: RecordingCollectives | None = None
        self._strategy, self._name, self._mixing = strategy, name, mixing
        self._slots = [] if optimizer_state == "local" else keras_internals.slots(optimizer)
        self._initial_slots = initial_slot_function(optimizer) if optimizer_state == "reset" else None
        self._statistics = list(statistics)
        specs = tensor_specs(weights)
        self.reduction = Reduction(create_reducer(specs), specs, store, f"{name}/")
        # Each exchange has its own count of rows, because fragments of the weights are sent at different steps.
        self.all_rows, self._rows_sent = store.variables([ROWS, dataclasses.replace(ROWS, name=f"{name}/rows_sent")])
        self.own_variables: list[keras.Variable] = []
        if mixing is None:
            with strategy.scope():
                self.own_variables = [zeros_like(variable, "sent") for variable in weights]

    def rows(self) -> tf.Tensor:
        """Returns the number of rows on which the replica has trained since the weights were sent."""
        return tf.convert_to_tensor(self.all_rows) - tf.convert_to_tensor(self._rows_sent)

    def take_weights(self) -> None:
        """Assigns the weights, which are equal on all replicas, to the global weights."""
        self.global_weights.take_weights()
        self._rows_sent.assign(tf.convert_to_tensor(self.all_rows))

    def run(self, expected_rows: tf.Tensor) -> ExchangeResult:
        """Exchanges the weights, the state of the optimizer and the statistics at once; see `prepare`."""
        summands = self.prepare(expected_rows)
        result = self.exchange(summands, self._strategy.step_collectives)
        state = self.new_state(summands[-2], result.rows, self._strategy.step_collectives)
        self.assign(self._new_weights(summands[:-2]), state)
        for variable in (self.all_rows, self._rows_sent):
            variable.assign(tf.zeros([], variable.dtype))
        return result

    def prepare(self, expected_rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors of this replica that `exchange` sums over replicas.

        `expected_rows` is a scalar of dtype floatx: the replica's rows since the last exchange if all had equally many.
        """
        # Relative to the expected rows, which preserves the magnitude of changes for lossy dtypes.
        rows = tf.cast(self.rows(), expected_rows.dtype) / expected_rows
        weights = read_variables(self.weights)
        summands = self._summands(weights, rows)
        with self._strategy.own_copies(self.own_variables):
            assign(self.own_variables, weights if self.own_variables else [])
        self._rows_sent.assign(tf.convert_to_tensor(self.all_rows))
        return summands

    def exchange(self, summands: Sequence[tf.Tensor], collectives: Collectives | None = None) -> ExchangeResult:
        """Sums the results of `prepare` over replicas and updates the global weights.

        By default, the sum is divided into several messages, so that concurrent steps do not wait for all of it.
        """
        self.recording = RecordingCollectives(collectives or SequentialCollectives(self._strategy.step_collectives))
        reduction = self.reduction.reduce(summands, self.recording, name=self._name)
        result = self._update(reduction.totals)
        self.reduction.assign(reduction.state)
        return result

    def use_result(self) -> None:
        """Updates the replica's weights with the result of the exchange."""
        self.assign(self._new_weights(), [])

    def assign(self, weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor]) -> None:
        """Assigns this replica's weights and its `new_state`. Call it in a replica function."""
        variables = [*self.weights, *self._slots, *self._statistics]
        with self._strategy.own_copies(variables):
            assign(variables, [*weights, *state])

    def new_state(self, rows: tf.Tensor, all_rows: tf.Tensor, collectives: Collectives) -> list[tf.Tensor]:
        """Returns the optimizer's new state, unless it is local, and the averaged statistics, in a replica function."""
        if self._initial_slots is not None:
            slots = self._initial_slots()
        else:
            slots = read_variables(self._slots)
            slots = weighted_mean(slots, rows, all_rows, collectives) if slots else []
        means = replica_means(read_variables(self._statistics), rows, collectives, name="exchange/statistics")
        return [*slots, *means]

    def _summands(self, weights: Sequence[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors that a replica with these weights contributes; see `summands_of`."""
        return summands_of(self.global_weights.values(), weights, rows)

    def _update(self, totals: Sequence[tf.Tensor]) -> ExchangeResult:
        """Updates the global weights with the sums over replicas."""
        *changes, rows, squares = totals
        mean = [tf.math.divide_no_nan(change, tf.cast(rows, change.dtype)) for change in changes]
        weights = self.global_weights.update(mean)
        spread = tf.math.divide_no_nan(squares, rows) - square_norm(mean)
        return ExchangeResult(tf.sqrt(tf.maximum(spread, 0)) / tf.sqrt(square_norm(weights)), rows)

    def _new_weights(self, changes: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        """Returns the replica's new weights; `changes` are those that it has just sent, without the scalars."""
        global_weights, local_weights = self.global_weights.values(), read_variables(self.weights)
        if self._mixing is None:
            sent_weights = read_variables(self.own_variables)
            weights = [x + (w - s) for x, w, s in zip(global_weights, local_weights, sent_weights, strict=True)]
        elif self._mixing:
            pairs = zip(global_weights, local_weights, strict=True)
            weights = [self._mixing * w + (1 - self._mixing) * x for x, w in pairs]
        else:
            return global_weights
        return apply_constraints(self.weights, weights)


def summands_of(global_weights: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
    """Returns a replica's changes, weighted by `rows`, and two scalars; see `tensor_specs`.

    `rows` is a scalar of dtype floatx: the replica's rows since the last exchange, as a multiple of the expected rows.
    """
    changes = [x - w for x, w in zip(global_weights, weights, strict=True)]
    return [*(change * tf.cast(rows, change.dtype) for change in changes), rows, rows * square_norm(changes)]


def weighted_mean(
    values: Sequence[tf.Tensor], rows: tf.Tensor, all_rows: tf.Tensor, collectives: Collectives
) -> list[tf.Tensor]:
    """Returns the exact mean of each tensor over replicas, weighted by their rows. Call it in a replica function."""
    weighted_values = [local_value * tf.cast(rows, local_value.dtype) for local_value in values]
    totals = Bucketed(Sum()).reduce(weighted_values, [], collectives, name="exchange/state").totals
    return [
        tf.where(all_rows > 0, tf.math.divide_no_nan(total, tf.cast(all_rows, total.dtype)), local_value)
        for total, local_value in zip(totals, values, strict=True)
    ]


def replica_mean(
    variables: Sequence[keras.Variable], strategy: Strategy, rows: Callable[[], tf.Tensor]
) -> TemporaryValues:
    """Returns a context in which the variables have their mean over replicas. Cost: one all-reduce of the variables.

    `rows` is a replica function that returns the replica's weight, a scalar; if all are zero, the mean is unweighted.
    """

    def means(values: list[tf.Tensor]) -> list[tf.Tensor]:
        own_rows = tf.cast(rows(), keras.config.floatx())
        [total] = strategy.collectives.all_reduce([own_rows], name="replica_mean/rows")
        weight = tf.where(total > 0, own_rows / tf.maximum(total, 1), 1 / strategy.replicas)
        return weighted_mean(values, weight, tf.ones_like(weight), strategy.collectives)

    return TemporaryValues(variables, strategy, means, values_differ=lambda: strategy.replicas > 1)


def initial_slot_function(optimizer: keras.Optimizer) -> Callable[[], list[tf.Tensor]]:
    """Returns a replica function that returns the initial `keras_internals.slots` of a built optimizer, for resets.

    Memory: one number per variable.

    Raises:
      InputError: the initial state is not constant, or has already changed.
    """
    slots, values = keras_internals.slots(optimizer), keras_internals.initial_slot_values(optimizer)
    if values is None:
        raise InputError(
            "The optimizer's state, which is reset, must begin at constants. Received: "
            f"{type(optimizer).__name__}, whose state begins as a copy of the weights, at other values, or has "
            "already been updated. Use a new optimizer, such as AdamW, or a sync that does not reset it."
        )
    pairs = list(zip(slots, values, strict=True))
    return lambda: [tf.fill(slot.shape, tf.cast(value, slot.dtype)) for slot, value in pairs]


def square_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of the squares of all elements, in floatx."""
    return tf.add_n(square_norms(tensors))
