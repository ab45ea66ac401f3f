"""Refuses steps that assign a `tf.Variable` that all replicas of a process share.

A Keras variable has a copy on each replica. A `tf.Variable` that is created outside of a strategy's scope has none: each
replica assigns it, so that a counter, for example, counts every step once per replica.
"""

from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError


def refuse_shared_variables(model: keras.Model, strategy: Strategy, operations: int) -> None:
    """Raises `InputError` if a step assigns a shared `tf.Variable` of the model, its layers or its metrics.

    Call it in a replica function, after the step is traced.

    Args:
      model: compiled and built model.
      strategy: strategy on which it runs.
      operations: result of `keras_internals.count_operations` before the step.
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
    found: dict[int, tf.Variable] = {}
    for owner in (model, *keras_internals.layers_of(model), *keras_internals.metrics_of(model)):
        for attribute in list(vars(owner).values()):
            for variable in _variables_in(attribute):
                if id(variable) not in found:
                    found[id(variable)] = variable
                    yield owner.name, variable


def _variables_in(attribute: object) -> Iterator[tf.Variable]:
    if isinstance(attribute, list | tuple | dict):
        for part in attribute.values() if isinstance(attribute, dict) else attribute:
            yield from _variables_in(part)
    elif isinstance(attribute, tf.Variable) and not isinstance(attribute, tf.distribute.DistributedValues):
        yield attribute
