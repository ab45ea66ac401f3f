"""A device mesh with named axes, over which DTensor shards the dims of a model's tensors.

Shazeer et al., Mesh-TensorFlow: Deep Learning for Supercomputers, 2018 (arXiv:1811.02084).
"""

import contextlib
import functools
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.devices import share_cores
from tfdist.cluster.environment import Cluster
from tfdist.collectives import OneReplica
from tfdist.config.layouts import Layout, Placement, parse_layout, parse_shard, unused_rule_warnings
from tfdist.config.mesh import mesh_of
from tfdist.coordination import Group
from tfdist.distribution.dtensor_variables import (
    Devices,
    MeshBlocks,
    MeshVariables,
    compile_program,
    initialize_dtensor_mesh,
    place_batch,
)
from tfdist.distribution.mesh_checks import reject_calls_outside_replica_functions, reject_unsafe_operations
from tfdist.distribution.strategy import LossFunction, LossGradients, State, Strategy, Variables
from tfdist.distribution.variable_layouts import dims_of_uninitialized, is_gathered_per_call, placement
from tfdist.layers.mesh_layouts import MeshLayouts, apply_update, placement_of, relayout_gradient
from tfdist.layers.recompute import rematerialize

_log = logging.getLogger(__name__)
_SAME_SEED = (
    "Call keras.utils.set_random_seed with the same seed on every process, because each draws the initial values."
)


class MeshOfDevices(Strategy):
    """One replica on a mesh: the engine shards its tensors and computation, and adds communication."""

    name = "mesh"
    replicas = 1
    local_replicas = range(1)
    compiles_replicas = True
    compiles_loops = False
    sums_gradients = True

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        devices: int = 0,
        mesh_shape: str = "",
        layout: str = "",
        shard: str = "none",
        shard_axis: str = "",
        shard_min_elements: int = 1024,
        intra_op_threads: int = 0,
        start_timeout_seconds: float = 120.0,
    ):
        """Starts the engine, with an equal part of the mesh in each process. Options are those of the flags.

        After all processes have joined, waits up to `start_timeout_seconds` for their servers.
        """
        self.cluster = cluster
        mesh = mesh_of(mesh_shape, devices, cluster.size)
        self.rules = parse_layout(layout, mesh)
        self.shard = parse_shard(shard, shard_axis or self.rules["batch"], shard_min_elements, mesh)
        share_cores(cluster, intra_op_threads)
        # Whether DTensor merges independent all-reduces into one message, which waits for all inputs.
        os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] = str(int(self.shard.combines_all_reduces))
        self.group = join(cluster)
        self.devices = Devices(mesh, initialize_dtensor_mesh(mesh, cluster, self.group, start_timeout_seconds))
        self.collectives = OneReplica()
        self._abstract_model: list[keras_internals.UninitializedVariable] = []
        self._checksums: dict[str, int] = {}
        self.layouts: MeshLayouts = MeshLayouts(self.devices, self.rules, self.shard.stage == "parameters")
        self._warned = False
        reject_calls_outside_replica_functions()

    @property
    def blocks(self) -> MeshBlocks:
        return MeshBlocks(self, self.devices)

    @property
    def adoption(self) -> MeshVariables:
        return MeshVariables(self)

    @contextlib.contextmanager
    def _placement(self) -> Iterator[None]:
        """See base class. Variables with initializers are created on exit, when their dims have been named."""
        try:
            self._initialize_pending()
            with (
                keras_internals.deferred_creation(self._abstract_model, self._initialize),
                tf.variable_creator_scope(self._replicated_variable),
            ):
                yield
            self._initialize_pending()
        except BaseException:
            self._abstract_model.clear()  # variables created before the failure are abandoned
            self._checksums.clear()
            raise

    def _initialize_pending(self) -> None:
        while self._abstract_model:
            self._initialize(self._abstract_model.pop(0))
        self._compare_checksums()

    def _compare_checksums(self) -> None:
        if self._checksums:
            checksums, self._checksums = self._checksums, {}
            self.group.agree("mesh/initial values", checksums, f"{_SAME_SEED} The first value of ")

    def _initialize(self, uninitialized: keras_internals.UninitializedVariable) -> None:
        variable = uninitialized.variable
        self.layouts.dims |= {dim for dim in dims_of_uninitialized(uninitialized) if dim}
        keras_internals.set_layout(variable, placement(uninitialized, self.rules, self.devices.mesh, self.shard))
        with tf.init_scope(), keras_internals.recorded_name_scope(variable):
            value = keras_internals.initial_value(variable)
            self._add_checksum(variable.path, value)
            tf_variable = self.devices.variable(
                value, placement_of(variable).storage, variable.name, variable.trainable
            )
        keras_internals.set_tf_variable(variable, tf_variable)
        if placement_of(variable).is_gathered and is_gathered_per_call(uninitialized):
            rematerialize(uninitialized.owners[-1])

    def _add_checksum(self, name: str, value: tf.Tensor) -> None:
        """Adds a checksum to compare when the scope ends: all processes must draw the same values for their devices."""
        if self.cluster.size > 1:
            self._checksums[name] = zlib.crc32(value.numpy().tobytes(), self._checksums.get(name, 0))

    def _replicated_variable(self, next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        """Creates a variable with a value, such as a learning rate, replicated on every device."""
        with tf.init_scope():
            value = arguments["initial_value"]
            value = tf.convert_to_tensor(value() if callable(value) else value, arguments.get("dtype"))
            name = arguments.get("name") or "variable"
            self._add_checksum(name, value)
            return self.devices.variable(
                value, Layout.replicated(value.shape.rank), name, arguments.get("trainable", True)
            )

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See base class. Rejects operations that would crash the engine."""
        replicate = self.devices.copier(
            functools.partial(self._add_checksum, "a tensor created outside of its layer's call")
        )

        def trace(*args: Any) -> Any:
            with self.layouts.tracing(), keras_internals.replace_captures(replicate):
                result = function(*args)
            self._compare_checksums()
            reject_unsafe_operations(tf.compat.v1.get_default_graph())
            self._warn_about_unused_rules()
            return result

        return compile_program(trace)

    def _warn_about_unused_rules(self) -> None:
        """Warns once about unused rules and axes, when all dims of a model are known."""
        if not self._warned and self.is_chief:
            for warning in unused_rule_warnings(self.rules, self.layouts.dims, self.shard, self.devices.mesh):
                _log.warning("%s", warning)
        self._warned = True

    def local(self, value: Any) -> list[Any]:
        """See base class. Outside of compiled functions, returns the full value as an ordinary tensor."""
        return [value if tf.inside_function() else self.devices.full_tensor(value)]

    def per_replica(self, values: Sequence[Any]) -> Any:
        [batch] = values
        return place_batch(batch, self.devices, self.rules["batch"])

    def distribute(self, make_dataset: Callable[[Sequence[int], int], tf.data.Dataset]) -> Iterator[Any]:
        return map(lambda batch: self.per_replica([batch]), make_dataset(self.local_replicas, self.replicas))

    def gradients(self, loss_fn: LossFunction, variables: Variables, *batch: Any) -> LossGradients:
        stored_values = [keras_internals.value_of(variable) for variable in variables]
        with tf.GradientTape() as tape, self.layouts.compute_layouts(variables):
            tape.watch(stored_values)
            loss, auxiliary = loss_fn(*batch)
        gradients = tape.gradient(loss, stored_values)
        pairs = zip(gradients, variables, strict=True)
        return [g if g is None else self._lay_out_gradient(g, placement_of(v)) for g, v in pairs], loss, auxiliary

    def _lay_out_gradient(self, gradient: tf.Tensor, placement: Placement) -> tf.Tensor:
        if placement.is_gathered:  # the layer's backward pass has sharded it
            return self.devices.relayout(gradient, placement.gradient)
        return relayout_gradient(self.devices, gradient, placement)

    def apply(self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Variables) -> None:
        apply_update(self.devices, optimizer, gradients, variables)

    def allocate(self, states: Sequence[State]) -> list[tf.Variable]:
        """See base class. The variables are replicated on every device."""
        return [
            self.devices.variable(
                state.initial_value(), Layout.replicated(len(state.shape)), state.name, trainable=False
            )
            for state in states
        ]


STRATEGY = MeshOfDevices
