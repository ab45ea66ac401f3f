"""Finds the state that layers assign in a step, averages it over replicas, and restores it if the step is skipped."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Sum
from tfdist.step import randomness
from tfdist.step.settings import Settings
from tfdist.step.validation import inner_optimizer, statistics_of_all_replicas


# A Keras variable has a copy on each replica. A `tf.Variable` that is created outside of a strategy's scope has no copies:
# every replica assigns it, so a counter, for example, is incremented once per replica in every step.
def refuse_shared_variables(model: keras.Model, strategy: Strategy, operations: int) -> None:
    """Raises `InputError` if a step assigns a shared `tf.Variable` of the model, its layers or its metrics.

    It must be called in a replica function, after the step is traced. `operations` is the number of operations before it.
    """
    if len(strategy.local_replicas) < 2 or tf.executing_eagerly():
        return
    owners = (model, *keras_internals.layers_of(model), *keras_internals.metrics_of(model))
    owned_variables = [(owner.name, v) for owner in owners for v in _shared_variables([*vars(owner).values()])]
    are_assigned = keras_internals.find_assigned(operations, [variable for _, variable in owned_variables])
    for owner_name, variable in itertools.compress(owned_variables, are_assigned):
        raise InputError(
            "A variable that a step assigns must be a Keras variable, with a copy on each replica. Received: a tf.Variable "
            f"of {owner_name}, {variable.name}, which {len(strategy.local_replicas)} replicas would assign one after "
            "another. Create the variable with add_weight, or with add_variable in a metric."
        )


def _shared_variables(attribute: object) -> Iterator[tf.Variable]:
    """Yields each `tf.Variable` without copies in an attribute."""
    if isinstance(attribute, list | tuple | dict):
        for part in attribute.values() if isinstance(attribute, dict) else attribute:
            yield from _shared_variables(part)
    elif isinstance(attribute, tf.Variable) and not isinstance(attribute, tf.distribute.DistributedValues):
        yield attribute


class Values(NamedTuple):
    """Values of a replica's variables before a forward pass."""

    tracked: list[tf.Tensor]  # values of moving statistics and metrics
    untracked: list[tf.Tensor]  # values of all other variables, which most forward passes do not assign
    operations: int  # number of previously traced operations


class SideEffects:
    """The variables that a forward pass may assign; the methods are called in replica functions.

    Moving statistics and metrics are always restored. Any other variable, such as a layer's counter or normalized weight,
    is restored only if the traced forward pass assigns it, because keeping the values of all weights would need the memory
    of another copy. States of random layers are not restored, because each step sets them. Tables in which a step
    updates only some rows are not restored either, because TensorFlow copies such a table whenever it is read as a whole;
    nor are variables of stages that are spread over devices.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, settings: Settings, metrics: Sequence[keras.Variable]):
        """Collects the variables of a compiled and built model, and of its metrics."""
        self._model, self._strategy = model, strategy
        self._tracked = [*keras_internals.moving_statistics(model), *metrics]
        global_statistics = statistics_of_all_replicas(model)
        self._row_indices = [i for i, variable in enumerate(self._tracked) if id(variable) not in global_statistics]
        excluded_ids = {id(variable) for variable in (*self._tracked, *randomness.seed_states(model))}
        candidates = model.variables if strategy.layouts.holds_variables else []
        self._untracked = [v for v in candidates if id(v) not in excluded_ids and v.path not in settings.sparse]
        self._assigned_variables: list[keras.Variable] = []
        self._user_state, _ = user_state(model, strategy)
        self._averaged_statistics = list(settings.averaged_statistics)

    def begin(self) -> Values:
        """Returns the values before the forward pass."""
        tracked, untracked = ([tf.identity(v) for v in variables] for variables in (self._tracked, self._untracked))
        return Values(tracked, untracked, keras_internals.count_operations())

    def end(self, initial: Values) -> list[tf.Tensor]:
        """Returns the values that `undo` restores; must be called after the forward pass is traced.

        Raises `InputError` if the forward pass assigns a variable that replicas share.
        """
        refuse_shared_variables(self._model, self._strategy, initial.operations)
        are_assigned = keras_internals.find_assigned(initial.operations, self._untracked)
        self._assigned_variables = [*itertools.compress(self._untracked, are_assigned)]
        return [*initial.tracked, *itertools.compress(initial.untracked, are_assigned)]

    def statistics_to_average(self, results: Any, initial: Values) -> list[keras.Variable]:
        """Returns the statistics to average: those that the forward pass assigns and that later steps use."""
        known_ids = {id(variable) for variable in self._averaged_statistics}
        feedback = feedback_variables(self._user_state, results, initial.operations)
        return [*self._averaged_statistics, *(variable for variable in feedback if id(variable) not in known_ids)]

    def undo(self, initial_values: Sequence[tf.Tensor]) -> None:
        """Restores the values that `end` returned in the same trace."""
        count = len(self._tracked)
        assign(self._tracked, initial_values[:count])
        with self._strategy.own_copies(self._assigned_variables):
            assign(self._assigned_variables, initial_values[count:])

    def undo_if_empty(self, rows: tf.Tensor, initial: Values) -> None:
        """Restores variables that depend on a replica's rows if it has no rows, because means over no rows are NaN."""
        variables = [self._tracked[i] for i in self._row_indices]
        restore_unless(rows > 0, variables, [initial.tracked[i] for i in self._row_indices])


def user_state(model: keras.Model, strategy: Strategy) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Returns the floating-point state and the other state of user-defined layers; empty if a process has only some stages."""
    state = keras_internals.user_layer_state(model) if strategy.trains_whole_model else []
    floating = [variable for variable in state if tf.as_dtype(variable.dtype).is_floating]
    return floating, [variable for variable in state if not tf.as_dtype(variable.dtype).is_floating]


def feedback_variables(variables: Sequence[keras.Variable], results: Any, operations: int) -> list[keras.Variable]:
    """Returns the variables that operations after the first `operations` assign and then use. A replica function."""
    if not variables:
        return []
    tensors = [leaf for leaf in tf.nest.flatten(results, expand_composites=True) if isinstance(leaf, tf.Tensor)]
    return [*itertools.compress(variables, keras_internals.find_feedback(tensors, operations, variables))]


def restore_unless(condition: tf.Tensor, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
    """Restores variables if a scalar condition is False, for example on a replica without rows. In a replica function."""
    assign(variables, select(condition, [tf.convert_to_tensor(variable) for variable in variables], values))


def select(condition: tf.Tensor, values: Sequence[tf.Tensor], alternatives: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Selects `values` where a scalar condition is True; it is broadcast because DTensor crashes on scalar conditions."""
    return [tf.where(tf.broadcast_to(condition, x.shape), x, y) for x, y in zip(values, alternatives, strict=True)]


def assign(variables: Sequence[tf.Variable | keras.Variable], values: Sequence[tf.Tensor]) -> None:
    """Assigns a value to each variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


# The dtype of means over replicas or micro-steps, for example of moving statistics. In float64, means of equal numbers, such as
# step counters, are exact, and means of the lowest float32 are finite.
MEAN_DTYPE = tf.float64


def weighted_terms(values: Sequence[tf.Tensor | keras.Variable], weight: tf.Tensor) -> list[tf.Tensor]:
    """Returns the terms of weighted means of floating-point values, in `MEAN_DTYPE`: each value * weight, then the weight.

    `weight` is a scalar, such as a number of rows; if it is zero, values may be NaN.
    """
    weight = tf.cast(weight, MEAN_DTYPE)
    return [*(tf.math.multiply_no_nan(tf.cast(value, MEAN_DTYPE), weight) for value in values), weight]


def weighted_means(sums: Sequence[tf.Tensor], values: Sequence[tf.Tensor | keras.Variable]) -> list[tf.Tensor]:
    """Returns the means from the sums of all `weighted_terms`; this replica's values if all weights are zero."""
    *totals, weight = sums
    pairs = zip(totals, values, strict=True)
    means = [tf.cast(tf.math.divide_no_nan(total, weight), value.dtype) for total, value in pairs]
    return select(weight > 0, means, [tf.convert_to_tensor(value) for value in values])


def replica_means(
    values: Sequence[tf.Tensor | keras.Variable], weight: tf.Tensor, collectives: Collectives, *, name: str
) -> list[tf.Tensor]:
    """Returns the means over replicas, weighted by rows; see `weighted_means`. A replica function.

    Cost: one all-reduce of the values and a scalar, in float64.
    """
    if not values:
        return []
    terms = weighted_terms(values, weight)
    return weighted_means(Bucketed(Sum()).reduce(terms, [], collectives, name=name).totals, values)


class TemporaryValues:
    """Context in which variables have temporary values; every process must enter it.

    Each replica's original values are restored bit for bit on exit; until then, both take memory.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: Strategy,
        compute_values: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        *,
        are_local: bool = True,
        values_differ: Callable[[], bool] = lambda: True,
    ):
        """Initializes the context for variables of the model or the optimizer.

        `compute_values` is a replica function that maps this replica's values to the temporary values, `are_local`
        indicates whether each replica has its own values, and `values_differ` returns whether the temporary values may
        differ from the original values.
        """
        self._variables, self._strategy, self._values = list(variables), strategy, compute_values
        self._are_local, self._values_differ = are_local, values_differ
        self._compiled_swap = strategy.compile_for_variables(self._swap)
        self._compiled_restore = strategy.compile_for_variables(self._assign)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        original_values = self.assign()
        try:
            yield
        finally:
            if original_values is not None:
                self._compiled_restore(original_values)

    def assign(self) -> Any:
        """Assigns the values permanently; returns the replicas' original values, or None if nothing changes."""
        return self._compiled_swap() if self._variables and self._values_differ() else None

    def _swap(self) -> list[tf.Tensor]:
        """Assigns the values and returns this replica's original ones. A replica function."""
        original_values = [tf.identity(keras_internals.value_of(variable)) for variable in self._variables]
        new_values = self._values(original_values)
        with tf.control_dependencies(original_values):
            self._assign(new_values)
        return original_values

    def _assign(self, values: Any) -> None:
        with self._strategy.own_copies(self._variables) if self._are_local else contextlib.nullcontext():
            for variable, value in zip(self._variables, values, strict=True):
                keras_internals.value_of(variable).assign(self._strategy.layouts.to_stored_layout(variable, value))


def averaged_statistics(model: keras.Model, strategy: Strategy) -> TemporaryValues:
    """Returns a context in which a model's moving statistics have their mean over replicas.

    Cost: one all-reduce in float64.
    """

    def means(local_values: list[tf.Tensor]) -> list[tf.Tensor]:
        return replica_means(local_values, tf.ones([]), strategy.collectives, name="statistics")

    statistics = keras_internals.moving_statistics(model)
    return TemporaryValues(statistics, strategy, means, values_differ=lambda: strategy.training_shares[1] > 1)


def averaged_weights(model: keras.Model, strategy: Strategy) -> TemporaryValues:
    """Returns a context in which the weights of a model are their moving averages; the same on every replica.

    Without an average, or before the first update, nothing changes. Moving statistics, such as those of batch
    normalization, are already averages and stay unchanged.
    """
    optimizer = inner_optimizer(model.optimizer)
    pairs = keras_internals.weight_averages(optimizer)
    weights = [variable for variable, _ in pairs]

    def averages(local_weights: list[tf.Tensor]) -> list[tf.Tensor]:
        values = [keras_internals.value_of(average) for _, average in pairs]
        # A replica that does not have an average passes the weight in its place.
        values = [w if v is None else tf.convert_to_tensor(v) for v, w in zip(values, local_weights, strict=True)]
        return strategy.optimizer_shards.gather_from_owners(weights, values, "averages")

    def is_updated() -> bool:
        return int(strategy.local(keras_internals.value_of(optimizer.iterations))[0]) > 0

    return TemporaryValues(weights, strategy, averages, are_local=False, values_differ=is_updated)
