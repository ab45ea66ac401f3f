"""Variables that several stages use, such as tied embeddings: equal initial values, and the sum of their gradients."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.pipelining.activation_compression import Link
from tfdist.pipelining.cutting import Cut
from tfdist.pipelining.has_stages import HasStages


def summed_over_stages(
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    cut: Cut,
    strategy: HasStages,
    collectives: Collectives,
) -> list[tf.Tensor]:
    """Returns the gradients of a process; of a shared variable, the sum over its stages, bitwise equal in each.

    The first process of a variable adds the gradients of the others in their order, and sends them the sum.

    Args:
      gradients: this process's gradients.
      variables: their variables.
      cut: how the model is cut.
      strategy: the strategy.
      collectives: collectives of the pipeline's processes.
    """
    results = list(gradients)
    indices = {id(variable): i for i, variable in enumerate(variables)}
    for number, (variable, stages) in enumerate(cut.shared):
        i, processes = indices.get(id(variable)), strategy.schedule.processes_of(stages)
        if i is not None and len(processes) > 1:
            results[i] = _sum(results[i], processes, strategy.pipeline_rank, collectives, f"shared/{number}")
    return results


def _sum(gradient: tf.Tensor, processes: Sequence[int], process: int, collectives: Collectives, tag: str) -> tf.Tensor:
    first, *others = processes
    spec = [tf.TensorSpec(gradient.shape, gradient.dtype)]
    if process != first:
        link = Link(collectives, first)
        link.send([gradient], f"{tag}/part")
        return link.receive(spec, f"{tag}/sum")[0]
    for other in others:
        gradient += Link(collectives, other).receive(spec, f"{tag}/part")[0]
    for other in others:
        Link(collectives, other).send([gradient], f"{tag}/sum")
    return gradient


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

    Each pipeline copies its own values; `synchronize_replicas` then makes the values of all replicas equal.
    """
    for number, (variable, stages) in enumerate(cut.shared):
        first, *others = strategy.schedule.processes_of(stages)
        if strategy.pipeline_rank in (first, *others) and others:
            _copy(strategy, variable, first, others, f"shared/{number}/initial_value")


def _copy(strategy: HasStages, variable: keras.Variable, first: int, others: Sequence[int], tag: str) -> None:
    def exchange(values: list[tf.Tensor]) -> list[tf.Tensor]:
        if strategy.pipeline_rank != first:
            spec = tf.TensorSpec(variable.shape, variable.dtype)
            return Link(strategy.pipeline_collectives, first).receive([spec], tag)
        for other in others:
            Link(strategy.pipeline_collectives, other).send(values, tag)
        return []

    with strategy.process_device():
        received = tf.function(exchange, autograph=False)(strategy.full_values([variable]))
    for value in received:
        variable.assign(value)
