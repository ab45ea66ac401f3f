"""Pipeline parallelism: each process trains one stage of the model, and micro-batches flow through the stages."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.environment import HOROVOD_LAUNCHERS, Cluster
from tfdist.config.layouts import parse_grid, parse_layout
from tfdist.config.pipeline import check_model_axis, check_without_flush
from tfdist.coordination import Group
from tfdist.distribution.factory import create
from tfdist.distribution.sharded_optimizer import optimizer_shards
from tfdist.distribution.strategy import Variables
from tfdist.errors import InputError
from tfdist.layers.mesh_layouts import MeshLayouts
from tfdist.pipelining.activation_compression import METHODS
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.spread_stage import SpreadUpdate
from tfdist.pipelining.stage_devices import StageDevices, StageLayouts, devices_of_process, prepare
from tfdist.pipelining.stage_parts import StageBlocks, StageParts, synchronize_replicas

_HOROVOD_LIBRARIES = ("gloo", "mpi")


class Pipeline(HasStages):
    """Processes on the axes `stage` and `data`, which communicate through Horovod or TensorFlow."""

    name = "pipeline"

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        mesh_shape: str = "",
        pipeline_schedule: str = "1f1b",
        micro_batches: int = 1,
        cut: str = "auto",
        layout: str = "",
        activation_compression: str = "none",
        shard: str = "none",
        communication: str = "auto",
        intra_op_threads: int = 0,
        start_timeout_seconds: float = 120.0,
    ):
        """Starts the engine: Horovod under its launchers or with one of its libraries, otherwise TensorFlow.

        Options are those of the flags. TensorFlow's servers wait up to `start_timeout_seconds` for each other.
        """
        self.grid = parse_grid(mesh_shape, cluster.size, layout)
        self.schedule = make_schedule(pipeline_schedule, self.grid.stages, micro_batches)
        check_without_flush(pipeline_schedule, shard=shard, activation_compression=activation_compression)
        self.cut, self.activation_compression = cut, METHODS[activation_compression]()
        self.pipeline_rank, replica = self.grid.coordinates(cluster.rank)
        options: dict[str, Any] = {"intra_op_threads": intra_op_threads, "groups": self.grid.groups()}
        if communication != "auto":
            options["communication"] = communication
        if self.grid.devices > 1:
            check_model_axis(shard=shard, schedule=pipeline_schedule)
            prepare(self.grid.devices)
        if cluster.source in HOROVOD_LAUNCHERS or communication in _HOROVOD_LIBRARIES:
            if communication not in ("auto", *_HOROVOD_LIBRARIES):
                raise InputError(
                    "Under Horovod's launcher, communication must be auto, gloo or mpi. Received: "
                    f"communication={communication}, which is TensorFlow's. Use gloo or mpi, or another launcher."
                )
            self._engine: Any = create("horovod", cluster, join, options)
        elif cluster.size > 1:
            options["start_timeout_seconds"] = start_timeout_seconds
            self._engine = create("multiworker", cluster, join, options)
        else:
            self._engine = create("single", cluster, join)
        self.cluster, self.group = self._engine.cluster, self._engine.group
        self.group.roles = {rank: self.grid.role(rank) for rank in range(cluster.size)}
        self.communication = self._engine.communication
        self.job = self._engine.process_collectives
        self.collectives = self.job.group(self.grid.ranks_of_stage(self.pipeline_rank))
        self.pipeline_collectives = self.job.group(self.grid.ranks_of_replica(replica))
        self.replicas, self.local_replicas = self.grid.replicas, range(replica, replica + 1)
        self.optimizer_shards = optimizer_shards(shard, self)
        if self.grid.devices > 1:  # over which the stages of this process are spread
            devices = devices_of_process(self.grid.devices, self.cluster, self._engine.name == "multiworker")
            rules = parse_layout(layout, devices.mesh)
            layouts = MeshLayouts(devices, rules, gathers_parameters=False)
            with self.process_device():
                self.stage_devices = StageDevices(devices, rules, layouts)
            self.layouts = StageLayouts(self.stage_devices)

    @property
    def blocks(self) -> StageBlocks:
        return StageBlocks(self)

    @property
    def needs_equal_rows(self) -> bool:
        return True

    @property
    def parts(self) -> StageParts:
        return StageParts(self)

    def process_device(self) -> contextlib.AbstractContextManager:
        return self._engine.process_device()

    def _placement(self) -> contextlib.AbstractContextManager:
        """See base class. Weights get their values after the model is cut."""
        keras_internals.reject_training(
            "A model of a pipeline is trained by tfdist.Trainer, which gives each process the weights of its stages. "
            "Received: Keras's own fit or train_on_batch, and {path}, which has no value yet. Pass the model and the "
            "arguments of compile to tfdist.Trainer, and call the trainer's fit."
        )
        scopes = contextlib.ExitStack()
        scopes.enter_context(keras_internals.deferred_weights())
        if self.stage_devices is not None:
            scopes.enter_context(self.stage_devices.creation())
        return scopes

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.process_device():
            return self.replica_function(function)(*args)

    def synchronize(self, variables: Sequence[keras.Variable]) -> None:
        """See base class. Synchronizes the replicas of this stage."""
        synchronize_replicas(self, variables)

    def apply(self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Variables) -> None:
        if self.stage_devices is None:
            super().apply(optimizer, gradients, variables)
            return
        SpreadUpdate(optimizer, variables, self.stage_devices).apply(gradients)

    def compile_for_variables(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See base class. If the stages are spread over devices, the function runs on the devices."""
        if self.stage_devices is None:
            return super().compile_for_variables(function)
        return self.stage_devices.compile(self.replica_function(function))

    def close(self) -> None:
        self._engine.close()


STRATEGY = Pipeline
