"""The devices of one process of a pipeline, over which the axis `model` spreads the stages of the process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfdist import keras_internals
from tfdist.cluster.devices import add_inter_op_threads, local_device_names
from tfdist.cluster.environment import Cluster
from tfdist.collectives import RecordingCollectives, collectives_scope, current
from tfdist.config.layouts import Layout, Shard, unused_rule_warnings
from tfdist.config.mesh import Mesh
from tfdist.distribution.dtensor_variables import Devices, compile_program
from tfdist.distribution.mesh_checks import reject_unsafe_operations
from tfdist.distribution.strategy import TensorLayouts
from tfdist.distribution.variable_layouts import ATTENTIONS, Dims, dims_of, placement
from tfdist.errors import InputError
from tfdist.keras_internals import UninitializedVariable
from tfdist.layers.mesh_layouts import MeshLayouts, placement_of

AXIS = "model"
_FIRST_GROUP_KEY = 2**28
# DTensor turns small tensors of these dtypes into constants, and recompiles the program whenever their values change.
_CARRIER_DTYPES = {tf.int32: tf.uint32, tf.int64: tf.uint64}


class LocalDevices(Devices):
    """The devices of a mesh that belongs entirely to this process."""

    def full_tensor(self, value: Any) -> tf.Tensor:
        """See base class. Concatenates the shards without communication."""
        value = tf.convert_to_tensor(value)
        if not dtensor.is_dtensor(value):
            return value
        axes = dtensor.fetch_layout(value).sharding_specs
        keras_internals.wait_for_devices()
        parts = dtensor.unpack(value)
        return tf.concat(parts, axes.index(AXIS)) if AXIS in axes else parts[0]


def devices_of_process(size: int, cluster: Cluster, has_servers: bool) -> LocalDevices:
    """Creates the mesh of `size` devices of this process.

    With TensorFlow's servers, the mesh is a row of one mesh over all processes, because the first process assigns the group
    keys of all devices.
    """
    task = cluster.rank if has_servers else 0
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    job = "worker" if has_servers else "localhost"
    devices = [tf.DeviceSpec(job=job, replica=0, task=task, device_type=kind, device_index=i) for i in range(size)]
    processes = cluster.size if has_servers else 1
    device_ids = [task * size + index for index in range(size)]
    dtensor_mesh = dtensor.Mesh(
        ["process", AXIS], np.arange(processes * size).reshape(processes, size), device_ids, devices
    )
    return LocalDevices(Mesh({"data": 1, AXIS: size}), dtensor_mesh)


def prepare(size: int) -> None:
    """Configures TensorFlow, before it is initialized, for collectives and a mesh of `size` devices in this process."""
    local_device_names(size)
    add_inter_op_threads(size)
    # Otherwise the group keys of tf.distribute would collide with those of DTensor, which count from 0.
    keras_internals.set_first_collective_key(_FIRST_GROUP_KEY)


class StageDevices:
    """Variables and compiled functions on the devices of a process.

    One function cannot contain operations of both the host and the devices, so a Python operation on the host calls a device
    function. `rules` maps names of dims to mesh axes, and `layouts` lays out tensors in device functions by these rules.
    """

    def __init__(self, devices: LocalDevices, rules: dict[str, str], layouts: MeshLayouts):
        self.devices, self.layouts = devices, layouts
        self._rules = rules
        self.is_tracing = False  # whether a device function is being traced
        # Every operation that calls a device function reads or assigns this variable on the host, so TensorFlow runs them in
        # program order.
        with keras_internals.outside_scopes():
            self.order = tf.Variable(0.0, name="order")

    def set_layouts(self, model: keras.Model, variables: Sequence[keras.Variable]) -> None:
        """Sets the layouts of the trainable variables in `variables`, derived from the types of the model's layers."""
        owners = keras_internals.owners_of_variables(model)
        for variable in variables:
            if variable.trainable and keras_internals.layout_of(variable) is None:
                uninitialized = UninitializedVariable(variable, owners.get(id(variable), []))
                keras_internals.set_layout(variable, placement(uninitialized, self._rules, self.devices.mesh, Shard()))

    def layout_warnings(self, model: keras.Model) -> list[str]:
        """Returns warnings about rules without effect on the full model, and about an unused axis."""
        owners = keras_internals.owners_of_variables(model)
        dims = {dim for v in model.trainable_variables for dim in dims_of(v, owners.get(id(v), [])) if dim}
        has_attention = any(isinstance(layer, ATTENTIONS) for layer in keras_internals.layers_of(model))
        all_dims = dims | self.layouts.dims | ({"context"} if has_attention else set())
        return unused_rule_warnings(self._rules, all_dims, Shard(), self.devices.mesh)

    def creation(self) -> contextlib.AbstractContextManager:
        """Context in which variables with layouts, and their optimizer variables, are created on the devices."""
        return keras_internals.create_variables_with(self._create)

    def _create(self, variable: keras.Variable, value: tf.Tensor) -> tf.Variable:
        with tf.device(None):
            return self.devices.variable(value, placement_of(variable).storage, variable.name, variable.trainable)

    def is_on_devices(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is on the devices."""
        return isinstance(keras_internals.value_of(variable), dtensor.DVariable)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which a device function is traced."""
        was_tracing, self.is_tracing = self.is_tracing, True
        messages = collectives_scope(_NoMessages(current())) if current().size > 1 else contextlib.nullcontext()
        try:
            with self.layouts.tracing(), keras_internals.replace_captures(self.devices.copier()), messages:
                yield
            reject_unsafe_operations(tf.compat.v1.get_default_graph())
        finally:
            self.is_tracing = was_tracing

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a device function for calls outside of host functions."""

        def traced_function(*arguments: Any) -> Any:
            with self.tracing():
                return function(*arguments)

        return compile_program(traced_function)

    @contextlib.contextmanager
    def values_on_host(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """Context in which variables of the devices are on the host, to be read and saved."""
        device_variables = [(v, keras_internals.value_of(v)) for v in variables if self.is_on_devices(v)]
        try:
            for variable, value in device_variables:
                with tf.device("CPU:0"):
                    keras_internals.set_tf_variable(variable, tf.Variable(self.devices.full_tensor(value)))
            yield
        finally:
            for variable, value in device_variables:
                keras_internals.set_tf_variable(variable, value)

    def to_devices(self, value: Any) -> tf.Tensor:
        """Replicates a host array on the devices."""
        dtype = tf.as_dtype(value.dtype)
        array = np.asarray(value, _CARRIER_DTYPES.get(dtype, dtype).as_numpy_dtype)
        return self.devices.place(array, Layout.replicated(array.ndim))

    def to_host(self, values: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """Returns replicated tensors of the devices as host arrays."""
        keras_internals.wait_for_devices()
        return [dtensor.unpack(value)[0].numpy() for value in values]


def device_specs(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    """Returns the specs of the results of `StageDevices.to_devices`."""
    return [tf.TensorSpec(x.shape, _CARRIER_DTYPES.get(x.dtype, x.dtype)) for x in tensors]


def to_host_dtypes(values: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Casts arguments of a device function to the dtypes of the tensors on the host."""
    return [tf.cast(value, x.dtype) for value, x in zip(values, tensors, strict=True)]


def call_host(
    function: Callable[..., Any], tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Calls a Python function, which takes arrays and returns an array for each spec, by an operation of the host."""
    results = tf.numpy_function(function, list(tensors), [spec.dtype for spec in specs])
    return [tf.ensure_shape(x, spec.shape) for x, spec in zip(results, specs, strict=True)]


class _NoMessages(RecordingCollectives):
    """Collectives that reject communication with other replicas in a device function."""

    def _forward(self, operation: str, tensors: Sequence[tf.Tensor], *args: Any, **options: Any) -> list[tf.Tensor]:
        raise InputError(
            "A layer that is sharded over the mesh axis `model` cannot communicate with other replicas. Received: a call of "
            f"{operation} ({options['name']}). Use --batch_norm=local, or remove the axis `model`."
        )


class StageLayouts(TensorLayouts):
    """Layouts in a process of a pipeline: tensors are on one device in host functions, and sharded in device functions."""

    shards_tensors = True
    holds_variables = False  # host functions cannot read variables of DTensor

    def __init__(self, devices: StageDevices):
        self._devices = devices
        self.devices_per_replica = devices.devices.mesh.size

    def constrain(self, x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
        """See base class. Returns `x` in host functions. Outside of functions, only validates the layout."""
        is_on_host = tf.inside_function() and not self._devices.is_tracing
        return x if is_on_host else self._devices.layouts.constrain(x, dims, name)
