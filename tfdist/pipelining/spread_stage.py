"""A stage that is spread over the devices of its process: its passes and its update, as functions of the devices.

In a step of the host, a forward pass is one operation with a gradient. It keeps the residuals of its backward pass on the
devices, under a number; the backward pass adds the gradients of the variables to sums, which stay on the devices, too.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.dtensor_variables import explained_program_errors
from tfdist.errors import InputError
from tfdist.layers.mesh_layouts import placement_of, update_at_once
from tfdist.pipelining.cut_points import Crossing
from tfdist.pipelining.cutting import StageGraph
from tfdist.pipelining.stage_devices import StageDevices, call_host, device_specs, in_host_dtypes


class OutputTensors:
    """Converts outputs to a list of tensors, and back."""

    def __init__(self, outputs: Any):
        """Remembers the structure.

        Args:
          outputs: outputs of the model, with masks and logits attached as all later ones have.
        """
        self._structure = keras.tree.map_structure(lambda _: None, outputs)
        attached = [keras_internals.mask_and_logits(output) for output in keras.tree.flatten(outputs)]
        self._has = [[each is not None for each in pair] for pair in attached]

    def tensors(self, outputs: Any) -> list[tf.Tensor]:
        """Returns the list for outputs; empty for None."""
        flat = [] if outputs is None else keras.tree.flatten(outputs)
        parts = [x for output in flat for x in (output, *keras_internals.mask_and_logits(output))]
        return [x for x in parts if x is not None]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Inverse of `tensors`."""
        remaining, outputs = iter(tensors), []
        for has_mask, has_logits in self._has:
            output = tf.identity(next(remaining))
            mask = next(remaining) if has_mask else None
            keras_internals.set_mask_and_logits(output, mask, next(remaining) if has_logits else None)
            outputs.append(output)
        return keras.tree.pack_sequence_as(self._structure, outputs)


_NUMBER = tf.TensorSpec([], tf.int64)


class SpreadStage:
    """Has the interface of a `StageGraph`, for functions of the host that are being traced."""

    def __init__(self, graph: StageGraph, devices: StageDevices):
        """Initializes the stage.

        Args:
          graph: the stage.
          devices: devices of this process, which have the stage's trainable variables.
        """
        self._graph, self._devices = graph, devices
        self.index, self.is_last, self.layers = graph.index, graph.is_last, graph.layers
        self.received: tuple[Crossing, ...] = graph.received
        self.sent: tuple[Crossing, ...] = graph.sent
        self.inputs, self.variables = graph.inputs, graph.variables
        self._passes: dict[Any, _Passes] = {}
        self._losses: list[tf.Tensor] = []
        self._of_weights: list[tf.Tensor] = []

    @property
    def spread(self) -> list[keras.Variable]:
        """The trainable variables, which are on the devices."""
        return [variable for variable in self.variables.trainable if self._devices.is_here(variable)]

    def call(
        self, inputs: Mapping[str, tf.Tensor], received: Sequence[tf.Tensor], training: bool | None = None
    ) -> tuple[Any, list[tf.Tensor]]:
        """See `StageGraph.call`; the gradient adds those of the variables to sums on the devices."""
        unplaced = [v.path for v in self.variables.trainable if not self._devices.is_here(v)]
        if unplaced:
            raise InputError(
                "With an axis model, layers of a pipeline must not be unfrozen after the trainer is created. Received: "
                f"{unplaced[0]}, which was frozen then. Set `trainable` before."
            )
        own = [variable for variable in self._values() if not self._devices.is_here(variable)]
        tensors = [*(inputs[name] for name in self.inputs), *received, *(tf.identity(v.value) for v in own)]
        key = (bool(training), *((tuple(x.shape), x.dtype) for x in tensors))
        if key not in self._passes:
            self._passes[key] = _Passes(self._graph, self._devices, self.spread, own, tensors, bool(training))
        passes = self._passes[key]
        outputs, sent, self._losses, self._of_weights, assigned = passes.call(tensors)
        for variable, value in assigned:
            variable.assign(value)
        return outputs, sent

    def take_data_losses(self) -> list[tf.Tensor]:
        """See `StageGraph.take_data_losses`."""
        losses, self._losses = self._losses, []
        return losses

    def weight_losses(self) -> list[tf.Tensor]:
        """See `StageGraph.weight_losses`; in a function, those of the latest call."""
        if tf.inside_function():
            return self._of_weights
        return [self._devices.devices.full_tensor(loss) for loss in self._graph.weight_losses()]

    def pop_gradients(self, after: tf.Tensor) -> list[tf.Tensor | None]:
        """Returns the sums of the gradients of `spread`, and resets them; None where no loss depends on a variable.

        Args:
          after: the gradient of `StageDevices.order`, which all backward passes add to.
        """
        training = [passes for key, passes in self._passes.items() if key[0]]
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.spread]
        sums = call_host(lambda _: _summed([passes.take() for passes in training], specs), [after], specs)
        have_gradient = [any(of_one) for of_one in zip(*(passes.has_gradient for passes in training), strict=True)]
        return [gradient if some else None for gradient, some in zip(sums, have_gradient, strict=True)]

    def _values(self) -> list[keras.Variable]:
        return [*self.variables.all, *self.variables.metrics, *self.variables.others]


def _summed(parts: Sequence[list[Any]], specs: Sequence[tf.TensorSpec]) -> list[np.ndarray]:
    """Returns the sums of arrays; zeros where there are none."""
    return [
        sum((value for value in values if value is not None), np.zeros(spec.shape, spec.dtype.as_numpy_dtype))
        for spec, values in zip(specs, zip(*parts, strict=True), strict=True)
    ]


class _Results(NamedTuple):
    """The results of a forward pass, as tensors of the devices or of the host."""

    outputs: list[tf.Tensor]  # of the model, each with its mask and its logits, if it has them
    sent: list[tf.Tensor]
    losses: list[tf.Tensor]
    of_weights: list[tf.Tensor]
    assigned: list[tf.Tensor]


class _Passes:
    """The passes of a stage for inputs of certain shapes."""

    def __init__(
        self,
        graph: StageGraph,
        devices: StageDevices,
        spread: Sequence[keras.Variable],
        own: Sequence[keras.Variable],
        tensors: Sequence[tf.Tensor],
        training: bool,
    ):
        self._graph, self._devices, self._training = graph, devices, training
        self._spread, self._own = list(spread), list(own)
        self._like = [tf.TensorSpec(x.shape, x.dtype) for x in tensors]
        self._live: dict[int, list[tf.Tensor]] = {}
        self._numbers = itertools.count()
        self._sums: list[tf.Tensor] | None = None
        crossing = [False] * len(graph.inputs) + [each.has_gradient for each in graph.received]
        self._differentiated = [i for i, has_gradient in enumerate(crossing) if has_gradient]
        self.has_gradient = [False] * len(self._spread)
        with keras_internals.outside_functions(), tf.device(None):
            trace = tf.function(self._trace, autograph=False)
            self._forward = trace.get_concrete_function(*device_specs(self._like))

    def call(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], Any]:
        """Returns outputs, sent tensors, losses of layers and of weights, and the values to assign to variables."""

        @tf.custom_gradient
        def passes(order: tf.Tensor, *tensors: tf.Tensor) -> Any:
            number, *results = call_host(self._run_forward, [order, *tensors], [_NUMBER, *self._specs])

            def gradient(*upstream_of_all: tf.Tensor) -> list[tf.Tensor | None]:
                upstream = [upstream_of_all[i] for i in self._targets]
                specs = [self._like[i] for i in self._differentiated]
                order, *of_inputs = call_host(
                    self._run_backward, [number, *upstream], [tf.TensorSpec([], tf.float32), *specs]
                )
                gradients = dict(zip(self._differentiated, of_inputs, strict=True))
                return [order, *(gradients.get(i) for i in range(len(tensors)))]

            return results, gradient

        results = passes(tf.identity(self._devices.order), *tensors) if self._specs else []
        iterator = iter(results)
        parts = _Results(*([next(iterator) for _ in range(count)] for count in self._counts))
        variables = [self._own[i] for i in self._assigned]
        outputs = self._outputs.packed(parts.outputs) if self._graph.is_last else None
        return outputs, parts.sent, parts.losses, parts.of_weights, list(zip(variables, parts.assigned, strict=True))

    def take(self) -> list[np.ndarray | None]:
        """Returns the sums of the gradients as arrays of the host, and resets them."""
        self._live.clear()
        sums, self._sums = self._sums, None
        if sums is None:
            return [None] * len(self._spread)
        keras_internals.wait_for_devices()
        full = [self._devices.devices.full_tensor(x).numpy() for x in sums]
        return [value if some else None for value, some in zip(full, self.has_gradient, strict=True)]

    def _run_forward(self, order: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        devices = self._devices
        with explained_program_errors([self._forward.graph]):
            results = self._forward(*(devices.to_devices(x) for x in arrays))
        count = len(self._specs)
        number = next(self._numbers)
        if self._training:
            self._live[number] = list(results[count:])
        return [np.asarray(number), *devices.to_host(results[:count])]

    def _run_backward(self, number: np.ndarray, *upstream: np.ndarray) -> list[np.ndarray]:
        devices = self._devices
        if self._sums is None:
            self._sums = list(self._zeros())
        residuals = iter(self._live.pop(int(number)))
        captured = [next(residuals) if value is None else value for value in self._outside]
        to_devices = [devices.to_devices(x) for x in upstream]
        with explained_program_errors([self._backward.graph]):
            results = keras_internals.call_with_captures(self._backward, [*to_devices, *self._sums], captured)
        count = len(self._differentiated)
        self._sums = list(results[count:])
        return [np.zeros([], np.float32), *devices.to_host(results[:count])]

    def _trace(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Returns the results of a forward pass, replicated, and the residuals; traces the backward pass, too."""
        with self._devices.tracing():
            values = in_host_dtypes(arguments, self._like)
            with tf.GradientTape() as tape:
                watched = [values[i] for i in self._differentiated]
                tape.watch([*watched, *(keras_internals.value_of(variable) for variable in self._spread)])
                parts = self._compute(values)
            computed = [x for part in parts for x in part]
            results = [self._devices.layouts.replicated(x) for x in computed]
            self._counts = [len(part) for part in parts]
            self._specs = [tf.TensorSpec(x.shape, x.dtype) for x in results]
            if not self._training:
                return results
            count = len(results) - len(parts.assigned)
            self._targets = [i for i, x in enumerate(results[:count]) if x.dtype.is_floating]
            return [*results, *self._trace_backward(tape, watched, [computed[i] for i in self._targets])]

    def _compute(self, values: Sequence[tf.Tensor]) -> _Results:
        graph = self._graph
        first, second = len(graph.inputs), len(graph.inputs) + len(graph.received)
        with keras_internals.RecordedScope(zip(self._own, values[second:], strict=True)) as scope:
            inputs = dict(zip(graph.inputs, values[:first], strict=True))
            outputs, sent = graph.call(inputs, values[first:second], training=self._training)
            losses = graph.take_data_losses()
            of_weights = graph.weight_losses() if self._training else []
        assigned = {id(variable): value for variable, value in scope.assigned}
        self._assigned = [i for i, variable in enumerate(self._own) if id(variable) in assigned]
        if graph.is_last:
            self._outputs = OutputTensors(outputs)
        tensors = self._outputs.tensors(outputs) if graph.is_last else []
        return _Results(tensors, list(sent), losses, of_weights, [assigned[id(self._own[i])] for i in self._assigned])

    def _trace_backward(
        self, tape: tf.GradientTape, watched: Sequence[tf.Tensor], targets: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Traces the backward pass, inside the forward pass; returns the tensors of the latter that it needs."""
        devices, weights = self._devices.devices, [keras_internals.value_of(variable) for variable in self._spread]
        placements = [placement_of(variable) for variable in self._spread]

        def backward(*arguments: tf.Tensor) -> list[tf.Tensor]:
            upstream, sums = arguments[: len(targets)], arguments[len(targets) :]
            gradients = tape.gradient(list(targets), [*watched, *weights], output_gradients=list(upstream))
            of_inputs, own = gradients[: len(watched)], gradients[len(watched) :]
            self.has_gradient = [gradient is not None for gradient in own]
            added = [
                total
                if gradient is None
                else total + devices.relayout(tf.convert_to_tensor(gradient), placement.computed)
                for total, gradient, placement in zip(sums, own, placements, strict=True)
            ]
            sent = [
                tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
                for g, x in zip(of_inputs, watched, strict=True)
            ]
            return [*(self._devices.layouts.replicated(x) for x in sent), *added]

        of_sums = [tf.TensorSpec(v.shape, v.dtype) for v in weights]
        self._backward, self._outside, residuals = keras_internals.traced_inside(
            backward, [*(tf.TensorSpec(x.shape, x.dtype) for x in targets), *of_sums]
        )
        self._zeros: Callable[[], list[tf.Tensor]] = lambda: [
            devices.lay(np.zeros(spec.shape, spec.dtype.as_numpy_dtype), placement.computed)
            for spec, placement in zip(of_sums, placements, strict=True)
        ]
        return residuals


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
            self._update = tf.function(self._trace, autograph=False).get_concrete_function(*device_specs(self._like))

    def apply(self, gradients: Sequence[tf.Tensor]) -> None:
        """Updates all variables, in a function of the host that is being traced."""
        own = [tf.identity(variable.value) for variable in self._own]
        order = tf.TensorSpec([], tf.float32)
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in own]
        after, *values = call_host(self._run, [*gradients, *own, tf.identity(self._devices.order)], [order, *specs])
        self._devices.order.assign(after)
        for variable, value in zip(self._own, values, strict=True):
            variable.assign(value)

    def _run(self, *arrays: np.ndarray) -> list[np.ndarray]:
        with explained_program_errors([self._update.graph]):
            values = self._update(*(self._devices.to_devices(x) for x in arrays[:-1]))
        return [np.zeros([], np.float32), *self._devices.to_host(values)]

    def _trace(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Returns the new values of the variables of the host."""
        with self._devices.tracing():
            values = in_host_dtypes(arguments, self._like)
            count = len(self._variables)
            on_host = list(zip(self._own, values[count:], strict=True))
            own = update_at_once(self._devices.devices, self._optimizer, values[:count], self._variables, on_host)
            return [self._devices.layouts.replicated(value) for value in own]
