"""Staleness: the age of the weights of a gradient, in pipelines without a flush."""

import operator

import keras

from tfdist.distribution.strategy import Strategy
from tfdist.pipelining.has_stages import HasStages, pipeline_of
from tfdist.pipelining.staged_model import StagedModel


def without_flush_of(strategy: Strategy) -> HasStages | None:
    """Returns the strategy if it is a pipeline that does not end each step with a flush, else None."""
    pipeline = pipeline_of(strategy)
    return pipeline if pipeline and not pipeline.schedule.has_flush else None


def staleness(strategy: Strategy, model: keras.Model, step: int) -> dict[str, float]:
    """Returns the field `staleness` of a record; empty if all gradients are those of the newest weights.

    Args:
      strategy: the strategy.
      model: what this process trains.
      step: number of updates done.
    """
    pipeline = without_flush_of(strategy)
    if not pipeline:
        return {}
    assert isinstance(model, StagedModel)
    sizes = [sum(v.shape.num_elements() for v in stage.variables.trainable) for stage in model.cut.stages]
    ages = [min(delay, step - 1) for delay in pipeline.schedule.delays]
    return {"staleness": sum(map(operator.mul, sizes, ages)) / sum(sizes)}
