"""The optimizer's update of a process whose stages are spread over its devices: a function of the devices."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.dtensor import calling_program
from tfdist.layers.mesh_layouts import placement_of
from tfdist.pipelining.stage_devices import StageDevices, call_host, entered, entered_specs


class SpreadUpdate:
    """An update of variables with their gradients; weights and slots are on the devices, numbers such as the rate are not."""

    def __init__(self, optimizer: keras.Optimizer, variables: Sequence[keras.Variable], devices: StageDevices):
        """Traces the update.

        Args:
          optimizer: the optimizer, with an update rule that needs no communication.
          variables: the variables, on the devices.
          devices: the devices.
        """
        self._optimizer, self._variables, self._devices = optimizer, list(variables), devices
        self._own = [variable for variable in optimizer.variables if not devices.is_here(variable)]
        self._like = [tf.TensorSpec(v.shape, v.dtype) for v in (*variables, *self._own)]
        with keras_internals.outside_functions(), tf.device(None):
            self._update = tf.function(self._trace, autograph=False).get_concrete_function(*entered_specs(self._like))

    def apply(self, gradients: Sequence[tf.Tensor]) -> None:
        """Updates all variables, in a function of the host that is being traced."""
        own = [tf.identity(variable.value) for variable in self._own]
        order = tf.TensorSpec([], tf.float32)
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in own]
        after, *values = call_host(self._run, [*gradients, *own, tf.identity(self._devices.order)], [order, *specs])
        self._devices.order.assign(after)
        for variable, value in zip(self._own, values, strict=True):
            variable.assign(value)

    def _run(self, *given: np.ndarray) -> list[np.ndarray]:
        with calling_program([self._update.graph]):
            found = self._update(*(self._devices.entering(x) for x in given[:-1]))
        return [np.zeros([], np.float32), *self._devices.leaving(found)]

    def _trace(self, *given: tf.Tensor) -> list[tf.Tensor]:
        """Computes all values before it assigns any: see `MeshOfDevices.apply`."""
        devices = self._devices.devices
        with self._devices.tracing():
            values = entered(given, self._like)
            count = len(self._variables)
            changed = [*self._variables, *(v for v in self._optimizer.variables if self._devices.is_here(v))]
            before = [(v, devices.relaid(keras_internals.value_of(v), placement_of(v).slots)) for v in changed]
            gradients = [
                devices.relaid(gradient, placement_of(variable).slots)
                for gradient, variable in zip(values[:count], self._variables, strict=True)
            ]
            before += zip(self._own, values[count:], strict=True)
            with keras_internals.updates_without_effects(), keras.StatelessScope(state_mapping=before) as scope:
                self._optimizer.apply(gradients, self._variables)
            after = [tf.cast(scope.get_current_value(variable), variable.dtype) for variable in changed]
            own = [tf.cast(scope.get_current_value(variable), variable.dtype) for variable in self._own]
            for variable, value in zip(changed, after, strict=True):
                keras_internals.value_of(variable).assign(devices.relaid(value, placement_of(variable).stored))
            return [self._devices.replicated(value) for value in own]
