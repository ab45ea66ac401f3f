"""The whole model of a pipelined job on the chief, which reads the weights of other stages one at a time, to save it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.messages import Link
from tfdist.pipelining.staged_model import StagedModel

_NEXT, _END = "save/next", -1


@contextlib.contextmanager
def full_model(strategy: HasStages, model: StagedModel) -> Iterator[keras.Model]:
    """Yields the model, whose weights the chief can read: the process of its stage sends each one when it is read.

    The chief keeps none of them, as it need not have the memory for the whole model. Every process must enter it. Those of the
    first replica's other stages yield when the chief has left it.

    Args:
      strategy: the strategy.
      model: this process's part of the model.
    """
    if strategy.local_replicas.start != 0:
        yield model.whole
        return
    reads = _Reads(strategy, model)
    if strategy.pipeline_rank != 0:
        reads.answer()
        yield model.whole
        return
    try:
        with keras_internals.read_by(reads.missing, reads.read):
            yield model.whole
    finally:
        reads.end()


class _Reads:
    """Reads of variables by the chief, which the processes of its pipeline answer.

    Attributes:
      missing: the variables that the chief does not have.
    """

    def __init__(self, strategy: HasStages, model: StagedModel):
        self._strategy = strategy
        self._group = strategy.group.subgroup(strategy.grid.ranks_of_replica(0))
        self._exchanges: dict[tuple[int, str], Any] = {}
        own = {id(variable) for number in strategy.schedule.stages_of(0) for variable in _of_stage(model, number)}
        holders: dict[int, tuple[keras.Variable, int]] = {}
        for process in range(1, strategy.grid.stages):
            for number in strategy.schedule.stages_of(process):
                for variable in _of_stage(model, number):
                    if id(variable) not in own:
                        holders.setdefault(id(variable), (variable, process))
        self._holders = list(holders.values())
        # States of random layers have values everywhere; they are set anew in every step.
        self._numbers = {
            id(variable): number
            for number, (variable, _) in enumerate(self._holders)
            if keras_internals.value_of(variable) is None
        }

    @property
    def missing(self) -> list[keras.Variable]:
        return [variable for variable, _ in self._holders if id(variable) in self._numbers]

    def read(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value of a variable of another stage; on the chief."""
        number = self._numbers[id(variable)]
        self._group.broadcast(_NEXT, number, LONG_SECONDS)
        with self._strategy.process_device():
            [value] = self._exchange(self._holders[number][1], variable)()
        return value

    def answer(self) -> None:
        """Sends what the chief reads of this process's variables, until the chief has read what it needs."""
        while (number := self._group.broadcast(_NEXT, None, LONG_SECONDS)) != _END:
            variable, process = self._holders[number]
            if process == self._strategy.pipeline_rank:
                with self._strategy.process_device():
                    self._exchange(0, variable)(tf.convert_to_tensor(keras_internals.value_of(variable)))

    def end(self) -> None:
        """Ends the answers of the other processes."""
        self._group.broadcast(_NEXT, _END, LONG_SECONDS)

    def _exchange(self, process: int, variable: keras.Variable) -> Any:
        """Returns what receives the value of a variable from a process, or sends it to the chief; traced once for a shape."""
        shape, dtype = tuple(variable.shape), variable.dtype
        link = Link(self._strategy.pipeline_collectives, process)
        spec, tag = tf.TensorSpec(shape, dtype), f"save/{'x'.join(map(str, shape))}/{dtype}"
        if (process, tag) not in self._exchanges:
            given = [] if self._strategy.pipeline_rank == 0 else [spec]

            def exchange(*values: tf.Tensor) -> list[tf.Tensor]:
                if not values:
                    return link.receive([spec], tag)
                link.send(values, tag)
                return []

            # A concrete function, because TensorFlow warns of retracing if one line makes several functions.
            self._exchanges[process, tag] = tf.function(exchange, autograph=False).get_concrete_function(*given)
        return self._exchanges[process, tag]


def _of_stage(model: StagedModel, number: int) -> tuple[keras.Variable, ...]:
    return model.cut.stages[number].variables.all
