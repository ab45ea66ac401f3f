"""State that layers assign in a step: which variables, how replicas average them, and how a skipped step undoes them."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Sum
from tfdist.step import randomness
from tfdist.step.validation import inner_optimizer, statistics_of_all_replicas


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
    return TemporaryValues(statistics, strategy, means, differ=lambda: strategy.replicas > 1)


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
