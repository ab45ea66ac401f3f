"""Side effects of a step: state that layers assign, and variables that no replica may assign."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.step import randomness
from tfdist.step.averaged_values import means_over_replicas
from tfdist.step.validation import statistics_of_all_replicas

# Refuses steps that assign a `tf.Variable` that all replicas of a process share.
# A Keras variable has a copy on each replica. A `tf.Variable` that is created outside of a strategy's scope has none: each
# replica assigns it, so that a counter, for example, counts every step once per replica.


def refuse_shared_variables(model: keras.Model, strategy: Strategy, operations: int) -> None:
    """Raises `InputError` if a step assigns a shared `tf.Variable` of the model, its layers or its metrics.

    Call it in a replica function, after the step is traced; `operations` is their number before the step.
    """
    if len(strategy.local_replicas) < 2 or tf.executing_eagerly():
        return
    shared = list(_shared_variables(model))
    assigned = keras_internals.assigned_since(operations, [variable for _, variable in shared])
    for (owner, variable), is_assigned in zip(shared, assigned, strict=True):
        if is_assigned:
            raise InputError(
                "A variable that a step assigns must be a Keras variable, with a copy on each replica. Received: a tf.Variable "
                f"of {owner}, {variable.name}, which {len(strategy.local_replicas)} replicas would assign one after "
                "another. Create it with add_weight, or with add_variable in a metric."
            )


def _shared_variables(model: keras.Model) -> Iterator[tuple[str, tf.Variable]]:
    """Returns each `tf.Variable` without copies in an attribute of the model, a layer or a metric, with the owner's name."""
    variables: dict[int, tf.Variable] = {}
    for owner in (model, *keras_internals.layers_of(model), *keras_internals.metrics_of(model)):
        for attribute in list(vars(owner).values()):
            for variable in _variables_in(attribute):
                if id(variable) not in variables:
                    variables[id(variable)] = variable
                    yield owner.name, variable


def _variables_in(attribute: object) -> Iterator[tf.Variable]:
    if isinstance(attribute, list | tuple | dict):
        for part in attribute.values() if isinstance(attribute, dict) else attribute:
            yield from _variables_in(part)
    elif isinstance(attribute, tf.Variable) and not isinstance(attribute, tf.distribute.DistributedValues):
        yield attribute


class Values(NamedTuple):
    """Values of a replica's variables before a forward pass.

    Attributes:
      own: of moving statistics and metrics.
      others: of all other variables, of which most forward passes assign none.
      operations: number of operations that were traced before.
    """

    own: list[tf.Tensor]
    others: list[tf.Tensor]
    operations: int


class SideEffects:
    """The variables that a forward pass may assign; the methods are called in replica functions.

    Moving statistics and metrics are always restored. Any other variable, such as an integer that a layer counts with or
    a weight that a layer normalizes, is restored if the traced forward pass assigns it: to keep the values of all weights
    would take the memory of another copy. States of random layers are not restored, because each step sets them. Neither
    are tables of which a step updates some rows, as TensorFlow copies such a table whenever it is read as a whole, and the
    variables of stages that are spread over devices.
    """

    def __init__(
        self,
        model: keras.Model,
        metrics: Sequence[keras.Variable],
        strategy: Strategy,
        sparse: Collection[str] = (),
        averaged: Collection[keras.Variable] = (),
    ):
        """Collects the variables.

        Args:
          model: compiled and built model.
          metrics: variables of its metrics.
          strategy: strategy of the replicas.
          sparse: paths of the tables of which a step updates some rows.
          averaged: statistics with which later steps are known to compute.
        """
        self._model, self._strategy = model, strategy
        self._own = [*keras_internals.moving_statistics(model), *metrics]
        of_all_rows = statistics_of_all_replicas(model)
        self._of_rows = [i for i, variable in enumerate(self._own) if id(variable) not in of_all_rows]
        left_out = {id(variable) for variable in (*self._own, *randomness.seed_states(model))}
        others = model.variables if strategy.layouts.holds_variables else []
        self._others = [v for v in others if id(v) not in left_out and v.path not in sparse]
        self._assigned: list[keras.Variable] = []
        self._of_user, _ = state_of_user(model, strategy)
        self._averaged = list(averaged)

    def begin(self) -> Values:
        """Returns the values before the forward pass."""
        own, others = ([tf.identity(v) for v in variables] for variables in (self._own, self._others))
        return Values(own, others, keras_internals.count_operations())

    def end(self, before: Values) -> list[tf.Tensor]:
        """Returns the values to be restored by `undo`, after the forward pass is traced.

        Raises:
          InputError: the forward pass assigns a variable that replicas share.
        """
        refuse_shared_variables(self._model, self._strategy, before.operations)
        are_assigned = keras_internals.assigned_since(before.operations, self._others)
        self._assigned = [
            variable for variable, is_assigned in zip(self._others, are_assigned, strict=True) if is_assigned
        ]
        return [
            *before.own,
            *(value for value, is_assigned in zip(before.others, are_assigned, strict=True) if is_assigned),
        ]

    def averaged(self, results: Any, before: Values) -> list[keras.Variable]:
        """Returns the statistics to be averaged after the forward pass: it assigns them, and later steps compute with them."""
        known = {id(variable) for variable in self._averaged}
        feedback = fed_back(self._of_user, results, before.operations)
        return [*self._averaged, *(variable for variable in feedback if id(variable) not in known)]

    def undo(self, before: Sequence[tf.Tensor]) -> None:
        """Restores the values that `end` has returned in the same trace."""
        count = len(self._own)
        assign(self._own, before[:count])
        with self._strategy.own_copies(self._assigned):
            assign(self._assigned, before[count:])

    def undo_unless(self, rows: tf.Tensor, before: Values) -> None:
        """Restores what depends on a replica's rows, unless there are any: means over no rows are NaN."""
        restore_unless(rows > 0, [self._own[i] for i in self._of_rows], [before.own[i] for i in self._of_rows])


def state_of_user(model: keras.Model, strategy: Strategy) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Returns the state of a user's layers, floating-point and other; none for stages, of which a process has a part."""
    state = keras_internals.own_state(model) if strategy.trains_whole_model else []
    is_floating = [tf.as_dtype(variable.dtype).is_floating for variable in state]
    floating = [variable for variable, is_one in zip(state, is_floating, strict=True) if is_one]
    return floating, [variable for variable, is_one in zip(state, is_floating, strict=True) if not is_one]


def fed_back(variables: Sequence[keras.Variable], results: Any, operations: int) -> list[keras.Variable]:
    """Returns which variables are assigned, and then computed with, after so many traced operations; in a replica function."""
    if not variables:
        return []
    tensors = [leaf for leaf in tf.nest.flatten(results, expand_composites=True) if isinstance(leaf, tf.Tensor)]
    feeds_back = keras_internals.feeds_back(tensors, operations, variables)
    return [variable for variable, is_used in zip(variables, feeds_back, strict=True) if is_used]


def restore_unless(condition: tf.Tensor, variables: Sequence[keras.Variable], before: Sequence[tf.Tensor]) -> None:
    """Restores variables if a scalar condition does not hold; in a replica function.

    For example, those of a replica without rows of a batch, since its means are NaN.
    """
    assign(variables, selected(condition, [tf.convert_to_tensor(variable) for variable in variables], before))


def selected(condition: tf.Tensor, values: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns values if a scalar condition holds, and the others if not; the condition is spread, or DTensor would crash."""
    return [tf.where(tf.broadcast_to(condition, x.shape), x, y) for x, y in zip(values, others, strict=True)]


def average_over_rows(variables: Sequence[keras.Variable], weight: tf.Tensor, collectives: Collectives) -> None:
    """Replaces variables that replicas have assigned from their rows by their mean over replicas; in a replica function.

    `weight` is the number of the replica's rows, or its part of them.
    """
    assign(variables, means_over_replicas(variables, weight, collectives, name="statistics"))


def assign(variables: Sequence[tf.Variable | keras.Variable], values: Sequence[tf.Tensor]) -> None:
    """Assigns a value to each variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
