"""Equal initial values: of the replicas of a stage, and of the stages that share a variable."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.pipelining.cut import Cut
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.messages import Link


def synchronize_replicas(strategy: HasStages, variables: Sequence[keras.Variable]) -> None:
    """Copies the first replica's values of a stage's floating-point variables to its other replicas."""
    floating = [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]
    if not floating or strategy.grid.replicas == 1:
        return

    def broadcast(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return strategy.collectives.broadcast(values, name="stages/initial_values")

    with strategy.process_device():
        values = tf.function(broadcast, autograph=False)(strategy.full_values(floating))
    for variable, value in zip(floating, values, strict=True):
        variable.assign(value)


def synchronize_shared(strategy: HasStages, cut: Cut) -> None:
    """Copies the first stage's values of shared variables, such as tied embeddings, to the other stages that have them.

    Each pipeline does so by itself; `synchronize_replicas` then makes those of all replicas equal.
    """
    for number, (variable, stages) in enumerate(cut.shared):
        first, *others = sorted({strategy.schedule.process_of(stage) for stage in stages})
        if strategy.pipeline_rank in (first, *others) and others:
            _copy(strategy, variable, first, others, f"shared/{number}/initial_value")


def _copy(strategy: HasStages, variable: keras.Variable, first: int, others: Sequence[int], tag: str) -> None:
    def exchange(values: list[tf.Tensor]) -> list[tf.Tensor]:
        if strategy.pipeline_rank != first:
            return Link(strategy.pipeline_collectives, first).receive(
                [tf.TensorSpec(variable.shape, variable.dtype)], tag
            )
        for other in others:
            Link(strategy.pipeline_collectives, other).send(values, tag)
        return []

    with strategy.process_device():
        received = tf.function(exchange, autograph=False)(strategy.full_values([variable]))
    for value in received:
        variable.assign(value)
