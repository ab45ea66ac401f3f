"""One exchange: the mean of what replicas have changed updates the global weights, from which they start again.

With x the global weights, w_r the weights of replica r and n_r the rows that it has trained on since the last exchange,

    d = sum over r of n_r (x - w_r) / sum over r of n_r,        x' = outer(x, d),        w_r = x'

d is summed by a reducer, so that it may be compressed, with error feedback. Without an outer optimizer, x' = x - d is
the mean of the replicas' weights.

Cost of an exchange: one all-reduce of P + 2 numbers, with P trainable parameters: over a ring, each of N replicas sends
2 P b (N - 1) / N bytes, with b bytes per number, so that a step sends 1 / period of that on average. Averaging the optimizer's
state takes another all-reduce. Memory: the global weights, and the outer optimizer's state.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, Recording
from tfdist.distribution.strategy import HasCollectives, State
from tfdist.gradients import Bucketed, Reducer, Sum
from tfdist.synchronization.global_weights import GlobalWeights


class ExchangeResult(NamedTuple):
    """The result of an exchange, on each replica.

    Attributes:
      divergence: scalar; root mean square over replicas of the distance to their mean, over the norm of the mean.
      rows: scalar; rows on which all replicas have trained, as a multiple of those of equal shares.
    """

    divergence: tf.Tensor
    rows: tf.Tensor


def specs_of(weights: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    """Returns names, shapes and dtypes of what an exchange reduces: a change per variable, and two scalars."""
    floatx = keras.config.floatx()
    scalars = [tf.TensorSpec([], floatx, f"exchange/{name}") for name in ("rows", "squares")]
    return [*(tf.TensorSpec(v.shape, v.dtype, v.path) for v in weights), *scalars]


class Exchange:
    """Exchanges the weights of one model.

    Attributes:
      reducer: sums changes over replicas.
      reducer_state: variables of its state.
      recording: the calls of the latest trace.
    """

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        optimizer: keras.Optimizer,
        strategy: HasCollectives,
        reducer: Reducer,
        global_weights: GlobalWeights,
        reducer_state: Sequence[tf.Variable],
        rows: tf.Variable,
        *,
        optimizer_state: str,
    ):
        """Initializes the exchange.

        Args:
          weights: trainable variables of the model.
          optimizer: its optimizer.
          strategy: their strategy.
          reducer: sums the changes over replicas.
          global_weights: the global weights.
          reducer_state: variables of the reducer's state.
          rows: scalar per replica; rows on which it has trained since the last exchange.
          optimizer_state: what happens to the optimizer's state: "local", "averaged" or "reset".
        """
        self._strategy = strategy
        self.reducer = reducer
        self._global_weights = global_weights
        self._weights = list(weights)
        self._slots = [] if optimizer_state == "local" else keras_internals.slots(optimizer)
        self._initial = keras_internals.initial_slot_values(optimizer) if optimizer_state == "reset" else None
        self.reducer_state, self._rows = list(reducer_state), rows
        self.recording: Recording | None = None

    def exchange(self, expected_rows: tf.Tensor) -> ExchangeResult:
        """Exchanges the weights. A replica function.

        Args:
          expected_rows: scalar of dtype floatx; rows that a replica with an equal share has had since the last exchange.
        """
        self.recording = Recording(self._strategy.step_collectives)
        floatx = keras.config.floatx()
        # Relative to an equal share, so that changes keep their size, which lossy dtypes may need.
        rows = tf.cast(tf.convert_to_tensor(self._rows), floatx) / expected_rows
        own = [tf.convert_to_tensor(variable.value) for variable in self._weights]
        message = message_of(self._global_weights.values(), own, rows)
        state = [tf.convert_to_tensor(variable) for variable in self.reducer_state]
        reduced = self.reducer.reduce(message, state, self.recording, name="exchange")
        found, result = updated(self._global_weights, reduced.totals)
        self.assign(found, reduced.state, self.new_slots(rows, result.rows, self._strategy.step_collectives))
        self._rows.assign(tf.zeros([], self._rows.dtype))
        return result

    def assign(self, weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor], slots: Sequence[tf.Tensor]) -> None:
        """Assigns this replica's weights, the reducer's new state and `new_slots`. In a replica function."""
        with self._strategy.own_copies([*self._weights, *self._slots]):
            for variable, value in zip([*self._weights, *self._slots], [*weights, *slots], strict=True):
                variable.assign(value)
        for held, value in zip(self.reducer_state, state, strict=True):
            held.assign(value)

    def new_slots(self, rows: tf.Tensor, all_rows: tf.Tensor, collectives: Collectives) -> list[tf.Tensor]:
        """Returns the mean or the initial value of the optimizer's state, of what is exchanged. In a replica function."""
        if self._initial is None:
            return weighted_mean(self._slots, rows, all_rows, collectives) if self._slots else []
        pairs = zip(self._slots, self._initial, strict=True)
        return [tf.fill(slot.shape, tf.cast(initial, slot.dtype)) for slot, initial in pairs]


def message_of(global_weights: Sequence[tf.Tensor], own: Sequence[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
    """Returns what a replica sends: its changes, weighted by its rows, and two scalars; see `specs_of`.

    Args:
      global_weights: global weights.
      own: the replica's weights.
      rows: scalar of dtype floatx; rows on which the replica has trained, as a multiple of an equal share.
    """
    changes = [x - w for x, w in zip(global_weights, own, strict=True)]
    return [*(change * tf.cast(rows, change.dtype) for change in changes), rows, rows * square_norm(changes)]


def updated(global_weights: GlobalWeights, totals: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], ExchangeResult]:
    """Updates the global weights by the sum of all replicas' messages; returns them, and what is known of the exchange."""
    *changes, rows, squares = totals
    mean = [tf.math.divide_no_nan(change, tf.cast(rows, change.dtype)) for change in changes]
    found = global_weights.update(mean)
    spread = tf.math.divide_no_nan(squares, rows) - square_norm(mean)
    return found, ExchangeResult(tf.sqrt(tf.maximum(spread, 0)) / tf.sqrt(square_norm(found)), rows)


def weighted_mean(
    variables: Sequence[keras.Variable], rows: tf.Tensor, all_rows: tf.Tensor, collectives: Collectives
) -> list[tf.Tensor]:
    """Returns the exact mean of each variable over replicas, weighted by their rows. In a replica function."""
    mine = [tf.convert_to_tensor(variable.value) for variable in variables]
    weighted = [value * tf.cast(rows, value.dtype) for value in mine]
    totals = Bucketed(Sum()).reduce(weighted, [], collectives, name="exchange/state").totals
    return [
        tf.where(all_rows > 0, tf.math.divide_no_nan(total, tf.cast(all_rows, total.dtype)), value)
        for total, value in zip(totals, mine, strict=True)
    ]


def states_of(reducer: Reducer, specs: Sequence[tf.TensorSpec], prefix: str = "exchange") -> list[State]:
    """Returns the state that a reducer of changes needs; it is separate from that of a reducer of gradients."""
    return [dataclasses.replace(state, name=f"{prefix}/{state.name}") for state in reducer.state(specs)]


def square_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of the squares of all elements, in floatx."""
    floatx = keras.config.floatx()
    return tf.add_n([tf.cast(tf.reduce_sum(tf.square(tensor)), floatx) for tensor in tensors])
