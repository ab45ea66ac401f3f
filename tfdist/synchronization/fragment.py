"""A fragment of the weights that is exchanged by itself, in three parts: what is sent, the exchange, and its use.

With the notation of `exchange`, of the weights of one fragment, sent at step t and used at step u = t + delay:

    d = sum over r of n_r (x - w_r(t)) / sum over r of n_r,        x' = outer(x, d)
    w_r(u) = mixing w_r(u) + (1 - mixing) x'            Streaming DiLoCo (Douillard et al., arXiv:2501.18512)
    w_r(u) = x' + w_r(u) - w_r(t)                       local SGD with a delay (CoCoD-SGD, Shen et al., arXiv:1906.12043)

The exchange neither reads nor changes what steps use, so that both may run at the same time.
"""

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.collectives import Recording
from tfdist.collectives.in_turn import InTurn
from tfdist.distribution.strategy import State, Strategy
from tfdist.gradients import Reducer
from tfdist.step.local_step import ROWS
from tfdist.step.reduction import Reduction
from tfdist.step.side_effects import assign
from tfdist.step.state_store import StateStore
from tfdist.synchronization.exchange import ExchangeResult, message_of, specs_of, updated
from tfdist.synchronization.global_weights import GlobalWeights, constrained


class Fragment:
    """The functions of one fragment, to be run on each replica.

    Attributes:
      weights: trainable variables of the model.
      global_weights: the global weights.
      own_variables: the weights as each replica has sent them, if it keeps its progress.
      recording: the calls of the exchange's latest trace.
    """

    def __init__(
        self,
        number: int,
        weights: Sequence[keras.Variable],
        strategy: Strategy,
        make_reducer: Callable[[Sequence[tf.TensorSpec]], Reducer],
        store: StateStore,
        outer: str,
        mixing: float | None,
    ):
        """Creates the variables.

        Args:
          number: names the fragment.
          weights: trainable variables of the model.
          strategy: their strategy.
          make_reducer: returns a reducer for these tensors.
          store: store of the state.
          outer: the optimizer of the global weights; "" for none.
          mixing: `effective_mixing` of `LocalSGD`.
        """
        self.weights = list(weights)
        self.global_weights = GlobalWeights(weights, strategy, outer)
        self.recording: Recording | None = None
        self._strategy, self._mixing = strategy, mixing
        self._name = f"exchange/{number}"
        specs = specs_of(weights)
        self._reduction = Reduction(make_reducer(specs), specs, store, f"{self._name}/")
        # Steps count all rows; the fragments are sent at different steps.
        counted = State(f"{self._name}/rows_sent", (), tf.float64, per_replica=True)
        self._all_rows, self._rows_sent = store.variables([ROWS, counted])
        self.own_variables: list[keras.Variable] = []
        if mixing is None:
            with strategy.scope():
                self.own_variables = [
                    keras.Variable(
                        "zeros", shape=v.shape, dtype=v.dtype, trainable=False, name=f"sent_{v.path.replace('/', '_')}"
                    )
                    for v in weights
                ]

    def rows(self) -> tf.Tensor:
        """Returns the number of rows on which the replica has trained since the fragment was sent."""
        return tf.convert_to_tensor(self._all_rows) - tf.convert_to_tensor(self._rows_sent)

    def take_over(self) -> None:
        """Assigns the weights, which are equal on all replicas, to the global ones."""
        self.global_weights.take_over(self.weights)
        self._rows_sent.assign(tf.convert_to_tensor(self._all_rows))

    def prepare(self, expected_rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns what the replica sends.

        Args:
          expected_rows: scalar of dtype floatx; rows that a replica with an equal share has had since the last exchange.
        """
        rows = tf.cast(self.rows(), expected_rows.dtype) / expected_rows
        own = self._own()
        message = message_of(self.global_weights.values(), own, rows)
        with self._strategy.own_copies(self.own_variables):
            assign(self.own_variables, own if self.own_variables else [])
        self._rows_sent.assign(tf.convert_to_tensor(self._all_rows))
        return message

    def exchange(self, message: Sequence[tf.Tensor]) -> ExchangeResult:
        """Sums the messages of all replicas and updates the global weights."""
        self.recording = Recording(InTurn(self._strategy.step_collectives))
        reduced = self._reduction.reduce(message, self.recording, name=self._name)
        _, result = updated(self.global_weights, reduced.totals)
        self._reduction.assign(reduced.state)
        return result

    def use(self) -> None:
        """Replaces the replica's weights by those with which it continues."""
        global_weights = self.global_weights.values()
        own = self._own()
        if self._mixing is None:
            sent = [tf.convert_to_tensor(variable.value) for variable in self.own_variables]
            found = constrained(self.weights, [x + (w - s) for x, w, s in zip(global_weights, own, sent, strict=True)])
        elif self._mixing:
            mixed = [self._mixing * w + (1 - self._mixing) * x for x, w in zip(global_weights, own, strict=True)]
            found = constrained(self.weights, mixed)
        else:
            found = global_weights
        with self._strategy.own_copies(self.weights):
            assign(self.weights, found)

    def _own(self) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(variable.value) for variable in self.weights]


def fragments_of(weights: Sequence[keras.Variable], count: int) -> list[list[keras.Variable]]:
    """Splits variables into fragments of about equal size.

    The largest variable comes first, and each goes to the smallest fragment so far. Layers of equal size are therefore
    allocated to the fragments in turn, which trains better than fragments of consecutive layers (arXiv:2501.18512).

    Args:
      weights: at least `count` variables.
      count: number of fragments.

    Returns:
      Variables of each fragment, in the given order.
    """
    sizes = [bytes_of([variable]) for variable in weights]
    members: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for i in sorted(range(len(weights)), key=lambda i: -sizes[i]):
        smallest = min(range(count), key=lambda p: (filled[p], len(members[p])))
        members[smallest].append(i)
        filled[smallest] += sizes[i]
    return [[weights[i] for i in sorted(each)] for each in members]


def bytes_of(weights: Sequence[keras.Variable]) -> int:
    """Returns the number of bytes of all weights."""
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in weights)
