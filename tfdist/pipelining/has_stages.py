"""`HasStages`: the interface of a strategy that trains the stages of a model in different processes."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.config.layouts import ProcessGrid
from tfdist.coordination import Group
from tfdist.coordination.group import raise_on_all_members
from tfdist.data import check_batch_size
from tfdist.distribution.strategy import Strategy
from tfdist.pipelining.activation_compression import ActivationCompression
from tfdist.pipelining.schedule import Schedule
from tfdist.pipelining.stage_devices import StageDevices


class HasStages(Strategy):
    """A strategy whose replicas are pipelines: each process of a replica trains one stage.

    `collectives` connects the processes with the same stage, which reduce its gradients; `peers` is their group.
    """

    trains_whole_model = False
    grid: ProcessGrid  # the processes of the job
    pipeline_rank: int  # rank of this process in its pipeline
    schedule: Schedule
    cut: str  # where to cut the model into stages, as in `--cut`
    activation_compression: ActivationCompression  # between stages, during training
    job: Collectives  # collectives of all processes
    pipeline_collectives: Collectives  # of the processes of this replica's pipeline, in the order of their stages
    stage_devices: StageDevices | None = None  # the devices over which this process's stages are spread, if several

    @functools.cached_property
    def peers(self) -> Group:
        """See base class. Returns the group of the processes with the same stage."""
        return self.group.subgroup(self.grid.ranks_of_stage(self.pipeline_rank))

    def raise_on_all_members(self, name: str) -> contextlib.AbstractContextManager[None]:
        """See base class. A model may be invalid in some stages only."""
        return raise_on_all_members(self.group, name)

    def trace_together(self, function: Any, *args: Any) -> None:
        with self.raise_on_all_members("trace"):
            function.get_concrete_function(*args)

    @property
    def job_collectives(self) -> Collectives:
        return self.job

    @property
    def total_devices(self) -> int:
        """See base class. Includes the devices of the axis `model` in each process."""
        return self.cluster.size * self.grid.devices

    def check_batch_size(self, batch_size: int, micro_steps: int = 1) -> None:
        """See base class. A step has micro-batches instead of micro-steps."""
        check_batch_size(batch_size, self.replicas, self.micro_batches, equal=True, name="micro-batches")

    @property
    def micro_batches(self) -> int:
        return self.schedule.micro_batches

    @property
    def is_last(self) -> bool:
        """Whether this process has the last stage, which computes outputs and the loss."""
        return self.pipeline_rank == self.grid.stages - 1

    def full_values(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Returns the full values of variables of this process as tensors on the host. Call it eagerly."""
        values = [tf.convert_to_tensor(keras_internals.value_of(variable)) for variable in variables]
        devices = self.stage_devices
        return values if devices is None else [devices.devices.full_tensor(value) for value in values]


def pipeline_of(strategy: Strategy) -> HasStages | None:
    """Returns the strategy if it is a pipeline, else None."""
    return strategy if isinstance(strategy, HasStages) else None
