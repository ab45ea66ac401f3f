"""Gradients of variables that several stages use, such as tied embeddings: their sum over these stages."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.pipelining.cut import Cut
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.messages import Link


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
    found = list(gradients)
    places = {id(variable): place for place, variable in enumerate(variables)}
    for number, (variable, stages) in enumerate(cut.shared):
        holders = sorted({strategy.schedule.process_of(stage) for stage in stages})
        if id(variable) in places and len(holders) > 1:
            place = places[id(variable)]
            found[place] = _summed(found[place], holders, strategy.pipeline_rank, collectives, f"shared/{number}")
    return found


def _summed(gradient: tf.Tensor, holders: Sequence[int], process: int, collectives: Collectives, tag: str) -> tf.Tensor:
    first, *others = holders
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
