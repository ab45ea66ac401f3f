"""The devices of one process of a pipeline: over them, the axis `model` spreads the variables and operations of its stages."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfdist import keras_internals
from tfdist.cluster.devices import allow_waiting, local_device_names
from tfdist.cluster.environment import Cluster
from tfdist.collectives import Recording, current, using
from tfdist.config.layouts import Layout, Shard, unused_rule_warnings
from tfdist.config.mesh import Mesh
from tfdist.distribution.dtensor_variables import Devices, compiled_program
from tfdist.distribution.mesh_checks import refuse_unsafe_operations
from tfdist.distribution.strategy import TensorLayouts
from tfdist.distribution.variable_layouts import ATTENTIONS, Dims, dims_of, placement
from tfdist.errors import InputError
from tfdist.keras_internals import UninitializedVariable
from tfdist.layers.mesh_layouts import MeshLayouts, placement_of

AXIS = "model"
_KEYS = 2**28
# DTensor makes small tensors of these compile-time constants, and compiles the program again whenever their values change.
_CARRIERS = {tf.int32: tf.uint32, tf.int64: tf.uint64}


class LocalDevices(Devices):
    """Devices of a mesh all of which belong to this process."""

    def full_tensor(self, value: Any) -> tf.Tensor:
        """See base class; concatenates shards, as other processes do not take part."""
        value = tf.convert_to_tensor(value)
        if not dtensor.is_dtensor(value):
            return value
        axes = dtensor.fetch_layout(value).sharding_specs
        keras_internals.wait_for_devices()
        parts = dtensor.unpack(value)
        return tf.concat(parts, axes.index(AXIS)) if AXIS in axes else parts[0]


def devices_of_process(size: int, cluster: Cluster, has_servers: bool) -> LocalDevices:
    """Creates the mesh of a process.

    With TensorFlow's servers, the first process decides for all which devices have a group key, so that each process has a row
    of one mesh.

    Args:
      size: number of devices of this process.
      cluster: this process in the job.
      has_servers: whether TensorFlow's servers connect the processes.
    """
    task = cluster.rank if has_servers else 0
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    job = "worker" if has_servers else "localhost"
    devices = [
        tf.DeviceSpec(job=job, replica=0, task=task, device_type=kind, device_index=index) for index in range(size)
    ]
    rows = cluster.size if has_servers else 1
    own = [task * size + index for index in range(size)]
    engine = dtensor.Mesh(["process", AXIS], np.arange(rows * size).reshape(rows, size), own, devices)
    return LocalDevices(Mesh({"data": 1, AXIS: size}), engine)


def prepare(size: int) -> None:
    """Prepares TensorFlow, before it is initialized, for a mesh of this process's devices in addition to messages.

    Args:
      size: number of devices of this process.
    """
    local_device_names(size)
    allow_waiting(size)
    # tf.distribute's keys of groups would otherwise be those of DTensor, which count from 0.
    keras_internals.set_first_collective_key(_KEYS)


class StageDevices:
    """Variables and compiled functions on the devices of a process.

    Operations of the host cannot be in one function with those of the devices, so a function of the devices is called by an
    operation of the host that runs Python.

    Attributes:
      devices: the devices.
      layouts: layouts of tensors in functions of the devices.
      is_tracing: whether a function of the devices is being traced.
      order: a variable of the host that each operation which calls a function of the devices reads or assigns, so that
        TensorFlow runs them in the order of the program.
    """

    def __init__(self, devices: LocalDevices, rules: dict[str, str], layouts: MeshLayouts):
        """Initializes the devices.

        Args:
          devices: the devices.
          rules: mesh axes by name of dim.
          layouts: layouts by these rules.
        """
        self.devices, self.layouts = devices, layouts
        self._rules = rules
        self.is_tracing = False
        with keras_internals.outside_scopes():
            self.order = tf.Variable(0.0, name="order")

    def place(self, model: keras.Model, variables: Sequence[keras.Variable]) -> None:
        """Sets the layouts of trainable variables without values, by the types of their layers.

        Args:
          model: the model.
          variables: some of its variables.
        """
        owners = keras_internals.owners_of_variables(model)
        for variable in variables:
            if variable.trainable and keras_internals.layout_of(variable) is None:
                uninitialized = UninitializedVariable(variable, owners.get(id(variable), []))
                keras_internals.set_layout(variable, placement(uninitialized, self._rules, self.devices.mesh, Shard()))

    def idle(self, model: keras.Model) -> list[str]:
        """Returns warnings about rules that have no effect on a model, and about an axis that is not used.

        Args:
          model: the full model: a rule may be for another stage.
        """
        owners = keras_internals.owners_of_variables(model)
        dims = {dim for v in model.trainable_variables for dim in dims_of(v, owners.get(id(v), [])) if dim}
        attends = any(isinstance(layer, ATTENTIONS) for layer in keras_internals.layers_of(model))
        all_dims = dims | self.layouts.dims | ({"context"} if attends else set())
        return unused_rule_warnings(self._rules, all_dims, Shard(), self.devices.mesh)

    def creation(self) -> contextlib.AbstractContextManager:
        """Context in which variables with layouts, and the optimizer's variables for them, are created on the devices."""
        return keras_internals.initialized_by(self._create)

    def _create(self, variable: keras.Variable, value: tf.Tensor) -> tf.Variable:
        with tf.device(None):
            return self.devices.variable(value, placement_of(variable).stored, variable.name, variable.trainable)

    def is_here(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is on the devices."""
        return isinstance(keras_internals.value_of(variable), dtensor.DVariable)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which a function of the devices is traced."""
        before, self.is_tracing = self.is_tracing, True
        try:
            with self.layouts.tracing(), keras_internals.captured_through(self.devices.copier()), _without_messages():
                yield
            refuse_unsafe_operations(tf.compat.v1.get_default_graph())
        finally:
            self.is_tracing = before

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function of the devices that is called outside of functions of the host."""

        def traced(*args: Any) -> Any:
            with self.tracing():
                return function(*args)

        return compiled_program(traced)

    @contextlib.contextmanager
    def values_on_host(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """Context in which variables of the devices are variables of the host, to be read and saved."""
        spread = [(v, keras_internals.value_of(v)) for v in variables if self.is_here(v)]
        try:
            for variable, value in spread:
                with tf.device("CPU:0"):
                    keras_internals.set_tf_variable(variable, tf.Variable(self.devices.full_tensor(value)))
            yield
        finally:
            for variable, value in spread:
                keras_internals.set_tf_variable(variable, value)

    def to_devices(self, value: Any) -> tf.Tensor:
        """Replicates an array of the host on the devices."""
        carrier = _CARRIERS.get(tf.as_dtype(value.dtype))
        value = np.asarray(value) if carrier is None else np.asarray(value).astype(carrier.as_numpy_dtype)
        return self.devices.lay(value, Layout.replicated(value.ndim))

    def to_host(self, values: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """Returns replicated tensors of the devices as arrays of the host."""
        keras_internals.wait_for_devices()
        return [dtensor.unpack(value)[0].numpy() for value in values]


def device_specs(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    """Returns shapes and dtypes of tensors of the host as a function of the devices gets them from `to_devices`."""
    return [tf.TensorSpec(x.shape, _CARRIERS.get(x.dtype, x.dtype)) for x in tensors]


def in_host_dtypes(values: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns arguments of a function of the devices in the dtypes of the tensors of the host."""
    return [tf.cast(value, x.dtype) for value, x in zip(values, tensors, strict=True)]


def call_host(
    function: Callable[..., Any], tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Returns the results of an operation that calls a Python function with arrays; for each spec, it returns an array."""
    results = tf.numpy_function(function, list(tensors), [spec.dtype for spec in specs])
    return [tf.ensure_shape(x, spec.shape) for x, spec in zip(results, specs, strict=True)]


class _NoMessages(Recording):
    """Rejects communication with other replicas in a function of the devices."""

    def _on_call(self, operation: str, tensors: Sequence[tf.Tensor], name: str) -> None:
        """See base class."""
        raise InputError(
            "A layer that is spread over an axis model cannot communicate with other replicas. Received: a call of "
            f"{operation} ({name}). Use --batch_norm=local, or leave out the axis model."
        )


def _without_messages() -> contextlib.AbstractContextManager[None]:
    return using(_NoMessages(current())) if current().size > 1 else contextlib.nullcontext()


class StageLayouts(TensorLayouts):
    """Layouts of a process of a pipeline: on the host those of one device, and in functions of the devices by the rules."""

    shards_tensors = True
    holds_variables = False  # functions of the host cannot read DTensor's

    def __init__(self, devices: StageDevices):
        """Initializes the layouts.

        Args:
          devices: the devices.
        """
        self._devices = devices
        self.devices_per_replica = devices.devices.mesh.size

    def constrain(self, x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
        """See base class; the identity in functions of the host. Outside all functions, the layout is only validated."""
        is_on_host = tf.inside_function() and not self._devices.is_tracing
        return x if is_on_host else self._devices.layouts.constrain(x, dims, name)
