"""Places tensors and variables on a device mesh, for which DTensor compiles one SPMD program."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfdist import keras_internals
from tfdist.cluster.devices import check_available, local_device_names
from tfdist.cluster.environment import Cluster
from tfdist.config.layouts import Layout
from tfdist.config.mesh import Mesh
from tfdist.coordination import Group
from tfdist.data.row_partition import IndexedBatch, restore_none
from tfdist.distribution.strategy import Read, Strategy, VariableAdoption, VariableBlocks
from tfdist.distribution.tf_server import wait_for_servers, with_addresses
from tfdist.errors import InputError, dtensor_layout_error


def initialize_dtensor_mesh(mesh: Mesh, cluster: Cluster, group: Group, seconds: float) -> dtensor.Mesh:
    """Initializes DTensor, with a server in each of several processes, and creates its mesh.

    Each process has an equal part of the mesh, in the order of ranks, and waits up to `seconds` for the others' servers.

    Raises:
      InputError: this process has fewer devices than its part of the mesh.
    """
    local_size = mesh.size // cluster.size
    axes = list(mesh.axes.items())
    if cluster.size == 1:
        return dtensor.create_mesh(axes, devices=local_device_names(local_size))
    check_available(local_size)
    cluster = with_addresses(cluster, group)
    os.environ["DTENSOR_JOB_NAME"] = "worker"
    os.environ["DTENSOR_JOBS"] = ",".join(cluster.addresses)
    os.environ["DTENSOR_CLIENT_ID"] = str(cluster.rank)
    os.environ["DTENSOR_NUM_CLIENTS"] = str(cluster.size)
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    with wait_for_servers(group, cluster.size, seconds):
        dtensor.initialize_accelerator_system(
            kind, enable_coordination_service=False, num_logical_cpu_devices=local_size if kind == "CPU" else None
        )
    return dtensor.create_distributed_mesh(
        axes, local_devices=[f"{kind}:{i}" for i in range(local_size)], device_type=kind
    )


class Devices:
    """The devices of a mesh, and operations on the local devices."""

    def __init__(self, mesh: Mesh, dtensor_mesh: dtensor.Mesh):
        """Initializes the devices of a mesh; `dtensor_mesh` is DTensor's mesh with the same axes."""
        self.mesh = mesh
        self._dtensor_mesh = dtensor_mesh

    def layout(self, layout: Layout) -> dtensor.Layout:
        """Converts a layout to a DTensor layout.

        Dims on axes of size 1 become unsharded, because DTensor rejects such axes next to others in some matrix products.
        """
        return dtensor.Layout(
            [axis if self.mesh.splits(axis) else dtensor.UNSHARDED for axis in layout.axes], self._dtensor_mesh
        )

    def place(self, value: Any, layout: Layout) -> tf.Tensor:
        """Places a value on the devices according to a layout; every process must have the full value."""
        array = np.asarray(value)
        # A view would keep the full value in memory.
        parts = [
            array[self._slices(layout, array.shape, coordinates)].copy()
            for coordinates in self._dtensor_mesh.local_device_locations()
        ]
        return dtensor.pack(parts, self.layout(layout))

    def copier(self, on_copy: Callable[[tf.Tensor], object] | None = None) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns a function that replicates a captured tensor on every device, only once, and then calls `on_copy` with it."""
        copies: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

        def replicate(tensor: tf.Tensor) -> tf.Tensor:
            if id(tensor) not in copies:
                with tf.init_scope():
                    is_on_mesh = dtensor.is_dtensor(tensor)
                    copy = tensor if is_on_mesh else self.place(tensor, Layout.replicated(tensor.shape.rank))
                if on_copy and not is_on_mesh:
                    on_copy(tensor)
                copies[id(tensor)] = tensor, copy  # a reference, because an id may be reused
            return copies[id(tensor)][1]

        return replicate

    def relayout(self, value: Any, layout: Layout) -> tf.Tensor:
        """Changes the layout of a tensor or variable of this mesh, in a compiled function. It is differentiable.

        DTensor silently produces wrong values when an axis moves between two inner dims of a tensor of rank 4
        (tests/traps/dtensor_test.py). Such a tensor is reshaped to merge its last dims, or converted through a layout that
        shards only its rows, unless the result is replicated.
        """
        value = tf.convert_to_tensor(value)
        rank = len(layout.axes)
        if rank <= 3 or not any(layout.axes):
            return dtensor.relayout(value, self.layout(layout))
        if any(layout.axes[3:]) or None in value.shape[1:]:
            rows = dtensor.relayout(value, self.layout(Layout((layout.axes[0], *[None] * (rank - 1)))))
            return dtensor.relayout(rows, self.layout(layout))
        shape = [-1 if size is None else size for size in value.shape]  # the number of rows may be unknown
        merged_tensor = tf.reshape(value, [*shape[:2], math.prod(shape[2:])])
        return tf.reshape(dtensor.relayout(merged_tensor, self.layout(Layout(layout.axes[:3]))), shape)

    def variable(self, value: Any, layout: Layout, name: str, trainable: bool = True) -> tf.Variable:
        """Creates a variable whose full value can be read and assigned as an array."""
        variable = _Variable(self.place(value, layout), name=name, trainable=trainable)
        variable.devices, variable.mesh_layout = self, layout
        return variable

    def full_tensor(self, value: Any) -> tf.Tensor:
        """Returns the full value as an ordinary tensor; ordinary values are returned unchanged."""
        value = tf.convert_to_tensor(value)
        if not dtensor.is_dtensor(value):
            return value
        if not dtensor.fetch_layout(value).is_fully_replicated():
            value = dtensor.relayout(value, dtensor.Layout.replicated(self._dtensor_mesh, rank=value.shape.rank))
        # The group's threads must run during a long step, or the process counts as lost.
        keras_internals.wait_for_devices()
        return dtensor.unpack(value)[0]

    def blocks(self, variable: "_Variable") -> Iterator[tuple[dict[str, int], tuple[int, ...], tf.Tensor]]:
        """Yields, for each device of this process, its mesh coordinates and the offset and value of its block."""
        keras_internals.wait_for_devices()  # the group's threads must run during a long step
        parts = dtensor.unpack(variable.read_value())
        for part, coordinates in zip(parts, self._dtensor_mesh.local_device_locations(), strict=True):
            dims = self._slices(variable.mesh_layout, tuple(variable.shape), coordinates)
            yield coordinates, tuple(dim.start for dim in dims), part

    def assign(self, variable: "_Variable", read: Callable[[tuple[int, ...], tuple[int, ...]], Any]) -> None:
        """Assigns to a variable the blocks that `read` returns for an offset and a shape; reads each block once."""
        layout, shape, blocks = variable.mesh_layout, tuple(variable.shape), {}
        parts = []
        for coordinates in self._dtensor_mesh.local_device_locations():
            dims = self._slices(layout, shape, coordinates)
            offset = tuple(dim.start for dim in dims)
            if offset not in blocks:
                blocks[offset] = tf.constant(read(offset, tuple(dim.stop - dim.start for dim in dims)), variable.dtype)
            parts.append(blocks[offset])
        variable.assign(dtensor.pack(parts, self.layout(layout)))

    def _slices(self, layout: Layout, shape: Sequence[int], coordinates: dict[str, int]) -> tuple[slice, ...]:
        slices = []
        for axis, size in zip(layout.axes, shape, strict=True):
            shard_size = size // self.mesh.axes[axis] if axis else size
            begin = shard_size * coordinates[axis] if axis else 0
            slices.append(slice(begin, begin + shard_size))
        return tuple(slices)


class _Variable(dtensor.DVariable):
    """A variable that callbacks can read and assign; all processes must read or assign it at the same time."""

    devices: Devices
    mesh_layout: Layout

    def numpy(self) -> Any:
        return self.devices.full_tensor(self.read_value()).numpy()

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns a tensor of the mesh, or a full value."""
        if tf.executing_eagerly() and not dtensor.is_dtensor(value):
            value = self.devices.place(tf.cast(value, self.dtype), self.mesh_layout)
        return super().assign(value, *args, **kwargs)


def is_mesh_variable(variable: tf.Variable) -> bool:
    """Returns whether a variable is on the devices of a mesh."""
    return isinstance(variable, _Variable)


def row_layout(shape: tf.TensorShape, axis: str, size: int) -> Layout:
    """Returns the layout that shards the first dim over an axis if its size divides the dim, else replicates it."""
    is_divisible = bool(shape.rank) and shape[0] is not None and shape[0] % size == 0
    return Layout((axis if is_divisible else None, *[None] * (shape.rank - 1)) if shape.rank else ())


@contextlib.contextmanager
def translate_program_errors(graphs: Sequence[tf.Graph]) -> Iterator[None]:
    """Context for a call of a device program with these traces: operations that DTensor cannot compile raise `InputError`."""
    try:
        # On DTensor's graphs, the cost estimator of TensorFlow's memory optimizer prints "Incompatible Matrix dimensions"
        # for each product.
        with keras_internals.without_memory_optimizer():
            yield
    except tf.errors.OpError as error:
        layout_error = dtensor_layout_error(
            error,
            lambda kind: [x.name for graph in graphs for x in keras_internals.operations_of(graph) if x.type == kind],
        )
        if layout_error is None:
            raise
        raise layout_error from error


def compile_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for the devices; its calls raise the errors of `translate_program_errors`."""
    graphs: list[tf.Graph] = []

    def record_graph(*args: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return function(*args)

    program = tf.function(record_graph, autograph=False)

    def call(*args: Any) -> Any:
        with translate_program_errors(graphs):
            return program(*args)

    return call


def place_batch(batch: Any, devices: Devices, axis: str) -> Any:
    """Places a batch, equal on every process: shards its rows over an axis whose size divides them, else replicates it.

    Raises:
      InputError: a tensor is ragged or sparse.
    """
    if isinstance(batch, IndexedBatch):  # the indices of examples stay on the host
        return batch._replace(batch=place_batch(batch.batch, devices, axis))

    def place(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, tf.Tensor):
            raise InputError(
                f"On a mesh, a batch must consist of dense tensors. Received: a {type(value).__name__}. Convert it, as "
                "with to_tensor()."
            )
        return devices.place(value, row_layout(value.shape, axis, devices.mesh.axes[axis]))

    return tf.nest.map_structure(place, restore_none(batch))


class MeshBlocks(VariableBlocks):
    """Blocks of variables that are laid out on a mesh."""

    spans_processes = True

    def __init__(self, strategy: Strategy, devices: Devices):
        super().__init__(strategy)
        self._devices = devices

    def saved_blocks(
        self, variable: tf.Variable, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """See base class. The process of the first device with a block saves the block."""
        replicated_axes = [axis for axis in self._devices.mesh.axes if axis not in variable.mesh_layout.axes]
        blocks = [
            (offset, np.array(part))
            for coordinates, offset, part in self._devices.blocks(variable)
            if not any(coordinates[axis] for axis in replicated_axes)
        ]
        return [((0, *offset), values[np.newaxis]) for offset, values in blocks] if per_replica else blocks

    def copies(self, variable: tf.Variable) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        """See base class. Returns one copy per device, whose owner is the device's mesh coordinates."""
        return [
            (",".join(f"{axis}:{index}" for axis, index in coordinates.items()), offset, np.asarray(part))
            for coordinates, offset, part in self._devices.blocks(variable)
        ]

    def assign(self, variable: tf.Variable, per_replica: bool, read: Read) -> None:
        if not per_replica:
            self._devices.assign(variable, read)
            return
        self._devices.assign(variable, lambda offset, shape: read((0, *offset), (1, *shape))[0])

    def snapshot(self, variables: Sequence[tf.Variable]) -> Callable[[], None]:
        values_by_offset = [
            {offset: values.copy() for _, offset, values in self.copies(variable)} for variable in variables
        ]

        def restore() -> None:
            for variable, blocks in zip(variables, values_by_offset, strict=True):
                self._devices.assign(variable, functools.partial(lambda blocks, offset, _: blocks[offset], blocks))

        return restore

    @contextlib.contextmanager
    def full_variables(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        mesh_values = [keras_internals.value_of(variable) for variable in variables]
        try:
            for variable, value in zip(variables, mesh_values, strict=True):
                full_value = self._devices.full_tensor(value)
                if self._strategy.is_chief:
                    with tf.device("CPU:0"):
                        keras_internals.set_tf_variable(variable, tf.Variable(full_value))
            yield
        finally:
            for variable, value in zip(variables, mesh_values, strict=True):
                keras_internals.set_tf_variable(variable, value)


class MeshVariables(VariableAdoption):
    """Variables of a mesh, which must be created in the strategy's scope."""

    def creation(self) -> contextlib.AbstractContextManager:
        return self._strategy.scope()

    def adopt(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """See base class. On a mesh, this only checks that all variables were created in the scope."""
        foreign_path = next((variable.path for variable in variables if not self.owns(variable)), None)
        if foreign_path is not None:
            raise InputError(
                "On a mesh, a model must be created and compiled inside the strategy's scope. Received: "
                f"{foreign_path}, created outside. Write `with strategy.scope():` around it."
            )

    def owns(self, variable: keras.Variable) -> bool:
        value = keras_internals.value_of(variable)
        return value is None or isinstance(value, dtensor.DVariable)
