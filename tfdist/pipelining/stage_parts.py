"""The stages that a process trains of a model."""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.gathering import gathered
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.distribution.model_parts import ModelParts
from tfdist.errors.counts import count_of
from tfdist.pipelining.cut import Graph, cut_model, measure_seconds
from tfdist.pipelining.equal_values import synchronize_shared
from tfdist.pipelining.forward_passes import forward
from tfdist.pipelining.full_model import full_model
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.model_checks import check_stages_of
from tfdist.pipelining.schedules import simulate
from tfdist.pipelining.staged_model import StagedModel, whole_model

_log = logging.getLogger(__name__)
_ROWS = 8  # of the micro-batch with which calls are measured: the batch size is not known yet


class StageParts(ModelParts):
    """The stages of this process; the last stage computes the outputs."""

    def __init__(self, strategy: HasStages):
        """Initializes the parts.

        Args:
          strategy: the strategy.
        """
        super().__init__(strategy.blocks.full_variables)
        self._strategy = strategy
        self.computes_outputs = strategy.is_last

    def trained(self, model: keras.Model) -> StagedModel:
        """See base class."""
        strategy, schedule = self._strategy, self._strategy.schedule
        model = whole_model(model)  # of a stage that another trainer has made
        check_stages_of(model)
        cut = cut_model(model, strategy.cut, schedule.stages, seconds=self._measured)
        with strategy.refused_together("stages"), strategy.process_device():
            part = StagedModel(
                model,
                cut,
                schedule.stages_of(strategy.pipeline_rank),
                functools.partial(forward, strategy),
                strategy.stage_devices,
            )
        synchronize_shared(strategy, cut)
        if strategy.is_chief and strategy.stage_devices is not None:
            for line in strategy.stage_devices.idle(model):
                _log.warning("%s", line)
        return part

    def _measured(self, graph: Graph) -> list[float]:
        """Returns the seconds of each call, as measured on rank 0: all processes must cut alike."""
        mine = measure_seconds(graph, rows=_ROWS) if self._strategy.cluster.rank == 0 else None
        seconds: list[float] = self._strategy.group.broadcast("stages/seconds", mine, LONG_SECONDS)
        return seconds

    def description(self, part: keras.Model) -> str:
        """Returns for example `2, of 416 + 21,258 parameters; 1f1b with 4 micro-batches, 20% of the time idle if ...`."""
        assert isinstance(part, StagedModel)
        counts = [sum(math.prod(variable.shape) for variable in stage.variables.all) for stage in part.cut.stages]
        schedule = self._strategy.schedule
        if schedule.has_flush:
            idle = simulate(schedule, forward=1.0, backward=2.0).bubble
            cost = f"{idle:.0%} of the time idle if stages take equally long"
        else:
            cost = f"gradients of weights {'/'.join(map(str, schedule.delays))} updates old"
        named = f"{schedule.name} with {count_of(schedule.micro_batches, 'micro-batch')}"
        return f"{len(counts)}, of {' + '.join(f'{count:,}' for count in counts)} parameters; {named}, {cost}"

    @contextlib.contextmanager
    def whole(self, part: keras.Model) -> Iterator[keras.Model]:
        """See base class."""
        assert isinstance(part, StagedModel)
        devices = self._strategy.stage_devices
        on_host = contextlib.nullcontext() if devices is None else devices.values_on_host(part.variables)
        with on_host, full_model(self._strategy, part) as model:
            yield model

    def regularization(self, part: keras.Model) -> float:
        """See base class; a shared variable counts once."""
        assert isinstance(part, StagedModel)
        mine = sum(float(tf.reduce_sum(loss)) for stage in part.stages.values() for loss in stage.weight_losses())
        everyone = self._strategy.group.gather("stages/regularization", mine, LONG_SECONDS)
        return math.fsum(everyone[:: self._strategy.grid.replicas])

    def outputs(self, outputs: Any) -> Any:
        """See base class; sent by the last stage to all others."""
        own = tf.nest.map_structure(lambda output: output if self.computes_outputs else output[:0], outputs)
        return gathered(own, self._strategy.pipeline_collectives)
