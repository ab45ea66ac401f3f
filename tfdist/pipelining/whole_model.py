"""The whole model of a pipelined job on the chief, with the values of all stages, to save it."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.messages import Link
from tfdist.pipelining.staged_model import StagedModel


@contextlib.contextmanager
def whole_model(strategy: HasStages, model: StagedModel) -> Iterator[keras.Model]:
    """Yields the model; on the chief, all its variables have values, which need as much memory as the model on one device.

    Every process must enter it. The first replica's stages send their variables to the chief, one stage after the other.

    Args:
      strategy: the strategy.
      model: this process's part of the model.
    """
    missing: list[keras.Variable] = []
    values: list[tf.Tensor] = []
    if strategy.local_replicas.start == 0:
        for process in range(1, strategy.grid.stages):
            variables = _variables_of(strategy, model, process)
            if strategy.pipeline_rank == 0:
                missing += variables
                values += _received(strategy, variables, process)
            elif strategy.pipeline_rank == process:
                _send(strategy, variables)
    # States of random layers have values everywhere; they are set anew in every step.
    without = [(v, value) for v, value in zip(missing, values, strict=True) if keras_internals.value_of(v) is None]
    with keras_internals.with_values([v for v, _ in without], [value for _, value in without]):
        yield model.whole


def _variables_of(strategy: HasStages, model: StagedModel, process: int) -> list[keras.Variable]:
    """Returns the variables of a process that no process before it has."""
    stages = model.cut.stages
    before = {
        id(variable)
        for earlier in range(process)
        for number in strategy.schedule.stages_of(earlier)
        for variable in stages[number].variables.all
    }
    own = {id(v): v for number in strategy.schedule.stages_of(process) for v in stages[number].variables.all}
    return [variable for key, variable in own.items() if key not in before]


def _received(strategy: HasStages, variables: list[keras.Variable], process: int) -> list[tf.Tensor]:
    specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    with strategy.process_device():
        return tf.function(
            lambda: Link(strategy.pipeline_collectives, process).receive(specs, f"save/{process}"), autograph=False
        )()


def _send(strategy: HasStages, variables: list[keras.Variable]) -> None:
    def send() -> None:
        values = [tf.identity(keras_internals.value_of(variable)) for variable in variables]
        Link(strategy.pipeline_collectives, 0).send(values, f"save/{strategy.pipeline_rank}")

    with strategy.process_device():
        tf.function(send, autograph=False)()
