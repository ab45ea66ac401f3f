"""Computes the passes and the update of a stage that is spread over the devices of its process, in device functions.

In the step of the host, a forward pass is one operation with a gradient. Residuals stay on the devices, by index of the
pass, and the backward pass adds the gradients of variables to sums on the devices.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.dtensor_variables import translate_program_errors
from tfdist.errors import InputError
from tfdist.layers.mesh_layouts import apply_update, placement_of
from tfdist.pipelining.cut_points import Crossing
from tfdist.pipelining.cutting import StageGraph
from tfdist.pipelining.stage_devices import StageDevices, call_host, device_specs, to_host_dtypes


class OutputTensors:
    """Converts outputs to a list of tensors and back.

    Later outputs must have the structure of `outputs`, and masks and logits in the same places.
    """

    def __init__(self, outputs: Any):
        self._structure = keras.tree.map_structure(lambda _: None, outputs)
        attachments = [keras_internals.mask_and_logits(output) for output in keras.tree.flatten(outputs)]
        self._has_attachments = [[tensor is not None for tensor in pair] for pair in attachments]

    def tensors(self, outputs: Any) -> list[tf.Tensor]:
        """Returns the outputs as a list of tensors; an empty list for None."""
        flat = [] if outputs is None else keras.tree.flatten(outputs)
        parts = [x for output in flat for x in (output, *keras_internals.mask_and_logits(output))]
        return [x for x in parts if x is not None]

    def pack(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Inverse of `tensors`."""
        remaining, outputs = iter(tensors), []
        for has_mask, has_logits in self._has_attachments:
            output = tf.identity(next(remaining))
            mask = next(remaining) if has_mask else None
            keras_internals.set_mask_and_logits(output, mask, next(remaining) if has_logits else None)
            outputs.append(output)
        return keras.tree.pack_sequence_as(self._structure, outputs)


_PASS_INDEX = tf.TensorSpec([], tf.int64)


class SpreadStage:
    """A stage on several devices, with the interface of `StageGraph`, for functions of the host."""

    def __init__(self, graph: StageGraph, devices: StageDevices):
        self.graph, self.devices = graph, devices
        self.index, self.is_last, self.layers = graph.index, graph.is_last, graph.layers
        self.received: tuple[Crossing, ...] = graph.received
        self.sent: tuple[Crossing, ...] = graph.sent
        self.inputs, self.variables = graph.inputs, graph.variables
        self._passes: dict[Any, _Passes] = {}
        self._losses: list[tf.Tensor] = []
        self._weight_losses: list[tf.Tensor] = []

    @property
    def spread_variables(self) -> list[keras.Variable]:
        """The trainable variables, which are on the devices."""
        return [variable for variable in self.variables.trainable if self.devices.is_on_devices(variable)]

    def call(
        self, inputs: Mapping[str, tf.Tensor], received: Sequence[tf.Tensor], training: bool | None = None
    ) -> tuple[Any, list[tf.Tensor]]:
        """See `StageGraph.call`. The backward pass adds the gradients of variables to sums on the devices."""
        missing_paths = [v.path for v in self.variables.trainable if not self.devices.is_on_devices(v)]
        if missing_paths:
            raise InputError(
                "With an axis model, layers of a pipeline must not be unfrozen after the trainer is created. Received: "
                f"{missing_paths[0]}, which was frozen then. Set `trainable` before creating it."
            )
        variables = (*self.variables.all, *self.variables.metrics, *self.variables.external)
        host_variables = [variable for variable in variables if not self.devices.is_on_devices(variable)]
        tensors = [*(inputs[name] for name in self.inputs), *received, *(tf.identity(v.value) for v in host_variables)]
        key = (bool(training), *((tuple(x.shape), x.dtype) for x in tensors))
        if key not in self._passes:
            self._passes[key] = _Passes(self, host_variables, tensors, bool(training))
        outputs, sent, self._losses, self._weight_losses = self._passes[key].call(tensors)
        return outputs, sent

    def take_data_losses(self) -> list[tf.Tensor]:
        """See `StageGraph.take_data_losses`."""
        losses, self._losses = self._losses, []
        return losses

    def weight_losses(self) -> list[tf.Tensor]:
        """See `StageGraph.weight_losses`. In a function, returns the losses of the latest call."""
        if tf.inside_function():
            return self._weight_losses
        return [self.devices.devices.full_tensor(loss) for loss in self.graph.weight_losses()]

    def pop_gradients(self, after: tf.Tensor) -> list[tf.Tensor | None]:
        """Returns the sums of the gradients of `spread_variables` and resets them; None if no loss depends on the variable.

        `after` is the gradient of `StageDevices.order`, to which all backward passes add.
        """
        training_passes = [passes for key, passes in self._passes.items() if key[0]]
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.spread_variables]

        def take_sums(_: np.ndarray) -> list[np.ndarray]:
            parts = zip(*(passes.pop_totals() for passes in training_passes), strict=True)
            return [sum(x, np.zeros(s.shape, s.dtype.as_numpy_dtype)) for s, x in zip(specs, parts, strict=True)]

        sums = call_host(take_sums, [after], specs)
        has_gradient = [any(flags) for flags in zip(*(passes.has_gradient for passes in training_passes), strict=True)]
        return [gradient if is_present else None for gradient, is_present in zip(sums, has_gradient, strict=True)]


class _Results(NamedTuple):
    """The results of a forward pass, as tensors on the devices or on the host."""

    outputs: list[tf.Tensor]  # outputs of the model, each followed by its mask and its logits, if any
    sent: list[tf.Tensor]
    losses: list[tf.Tensor]
    weight_losses: list[tf.Tensor]
    assignments: list[tf.Tensor]


class _Passes:
    """The passes of a stage for inputs of given shapes and dtypes."""

    def __init__(
        self, stage: SpreadStage, host_variables: list[keras.Variable], tensors: Sequence[tf.Tensor], training: bool
    ):
        graph = self._graph = stage.graph
        self._devices, self._training = stage.devices, training
        self._spread_variables, self._host_variables = stage.spread_variables, host_variables
        self._host_specs = [tf.TensorSpec(x.shape, x.dtype) for x in tensors]
        self._live_residuals: dict[int, list[tf.Tensor]] = {}
        self._indices = itertools.count()  # of forward passes
        self._totals: list[tf.Tensor] | None = None
        is_differentiated = [False] * len(graph.inputs) + [crossing.has_gradient for crossing in graph.received]
        self._differentiated_inputs = [i for i, has_gradient in enumerate(is_differentiated) if has_gradient]
        self.has_gradient = [False] * len(self._spread_variables)
        with keras_internals.outside_functions(), tf.device(None):
            trace = tf.function(self._trace, autograph=False)
            self._forward = trace.get_concrete_function(*device_specs(self._host_specs))

    def call(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Runs the stage and assigns variables; returns outputs, sent tensors, and losses of layers and of weights."""

        @tf.custom_gradient
        def run_passes(token: tf.Tensor, *tensors: tf.Tensor) -> Any:
            index, *results = call_host(self._run_forward, [token, *tensors], [_PASS_INDEX, *self._specs])

            def gradient(*all_upstream: tf.Tensor) -> list[tf.Tensor | None]:
                upstream = [all_upstream[i] for i in self._targets]
                specs = [tf.TensorSpec([], tf.float32), *(self._host_specs[i] for i in self._differentiated_inputs)]
                token, *input_gradients = call_host(self._run_backward, [index, *upstream], specs)
                gradients = dict(zip(self._differentiated_inputs, input_gradients, strict=True))
                return [token, *(gradients.get(i) for i in range(len(tensors)))]

            return results, gradient

        results = run_passes(tf.identity(self._devices.order), *tensors) if self._specs else []
        iterator = iter(results)
        parts = _Results(*([next(iterator) for _ in range(count)] for count in self._counts))
        for i, value in zip(self._assigned_indices, parts.assignments, strict=True):
            self._host_variables[i].assign(value)
        outputs = self._outputs.pack(parts.outputs) if self._graph.is_last else None
        return outputs, parts.sent, parts.losses, parts.weight_losses

    def pop_totals(self) -> list[Any]:
        """Returns the sums of the gradients as arrays on the host, or zeros if there are none, and resets them."""
        self._live_residuals.clear()
        sums, self._totals = self._totals, None
        keras_internals.wait_for_devices()
        return [self._devices.devices.full_tensor(x).numpy() for x in sums or ()] or [0] * len(self._spread_variables)

    def _run_forward(self, token: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        devices = self._devices
        with translate_program_errors([self._forward.graph]):
            results = self._forward(*(devices.to_devices(x) for x in arrays))
        count = len(self._specs)
        index = next(self._indices)
        if self._training:
            self._live_residuals[index] = list(results[count:])
        return [np.asarray(index), *devices.to_host(results[:count])]

    def _run_backward(self, index: np.ndarray, *upstream: np.ndarray) -> list[np.ndarray]:
        devices = self._devices
        if self._totals is None:
            self._totals = list(self._zeros())
        residuals = iter(self._live_residuals.pop(int(index)))
        captures = [next(residuals) if value is None else value for value in self._outer_captures]
        device_tensors = [devices.to_devices(x) for x in upstream]
        with translate_program_errors([self._backward.graph]):
            results = keras_internals.call_with_captures(self._backward, [*device_tensors, *self._totals], captures)
        count = len(self._differentiated_inputs)
        self._totals = list(results[count:])
        return [np.zeros([], np.float32), *devices.to_host(results[:count])]

    def _trace(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Returns the replicated results of a forward pass and the residuals; also traces the backward pass."""
        with self._devices.tracing():
            values = to_host_dtypes(arguments, self._host_specs)
            with tf.GradientTape() as tape:
                watched_inputs = [values[i] for i in self._differentiated_inputs]
                tape.watch([*watched_inputs, *map(keras_internals.value_of, self._spread_variables)])
                forward_results = self._compute(values)
            forward_tensors = [x for part in forward_results for x in part]
            results = [self._devices.layouts.replicate(x) for x in forward_tensors]
            self._counts = [len(part) for part in forward_results]
            self._specs = [tf.TensorSpec(x.shape, x.dtype) for x in results]
            if not self._training:
                return results
            count = len(results) - len(forward_results.assignments)
            self._targets = [i for i, x in enumerate(results[:count]) if x.dtype.is_floating]
            return [*results, *self._trace_backward(tape, watched_inputs, [forward_tensors[i] for i in self._targets])]

    def _compute(self, values: Sequence[tf.Tensor]) -> _Results:
        graph = self._graph
        input_count, received_end = len(graph.inputs), len(graph.inputs) + len(graph.received)
        with keras_internals.RecordedScope(zip(self._host_variables, values[received_end:], strict=True)) as scope:
            inputs = dict(zip(graph.inputs, values[:input_count], strict=True))
            outputs, sent = graph.call(inputs, values[input_count:received_end], training=self._training)
            losses = graph.take_data_losses()
            weight_losses = graph.weight_losses() if self._training else []
        values_by_id = {id(variable): value for variable, value in scope.assignments}
        self._assigned_indices = [i for i, variable in enumerate(self._host_variables) if id(variable) in values_by_id]
        if graph.is_last:
            self._outputs = OutputTensors(outputs)
        tensors = self._outputs.tensors(outputs) if graph.is_last else []
        assignments = [values_by_id[id(self._host_variables[i])] for i in self._assigned_indices]
        return _Results(tensors, list(sent), losses, weight_losses, assignments)

    def _trace_backward(
        self, tape: tf.GradientTape, watched_inputs: Sequence[tf.Tensor], targets: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Traces the backward pass inside the forward pass; returns the residuals."""
        devices, weights = self._devices.devices, list(map(keras_internals.value_of, self._spread_variables))
        placements = list(map(placement_of, self._spread_variables))

        def backward(*arguments: tf.Tensor) -> list[tf.Tensor]:
            upstream, sums = arguments[: len(targets)], arguments[len(targets) :]
            gradients = tape.gradient(list(targets), [*watched_inputs, *weights], output_gradients=list(upstream))
            input_gradients, weight_gradients = gradients[: len(watched_inputs)], gradients[len(watched_inputs) :]
            self.has_gradient = [gradient is not None for gradient in weight_gradients]
            new_totals = [
                total if g is None else total + devices.relayout(tf.convert_to_tensor(g), placement.computation)
                for total, g, placement in zip(sums, weight_gradients, placements, strict=True)
            ]
            replaced_gradients = [
                tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
                for g, x in zip(input_gradients, watched_inputs, strict=True)
            ]
            return [*(self._devices.layouts.replicate(x) for x in replaced_gradients), *new_totals]

        sum_specs = [tf.TensorSpec(v.shape, v.dtype) for v in weights]
        specs = [*(tf.TensorSpec(x.shape, x.dtype) for x in targets), *sum_specs]
        self._backward, self._outer_captures, residuals = keras_internals.trace_inside(backward, specs)
        self._zeros: Callable[[], list[tf.Tensor]] = lambda: [
            devices.place(np.zeros(spec.shape, spec.dtype.as_numpy_dtype), placement.computation)
            for spec, placement in zip(sum_specs, placements, strict=True)
        ]
        return residuals


class SpreadUpdate:
    """Updates variables on the devices. Scalars of the optimizer, such as the learning rate, are on the host.

    The update rule of the optimizer must not communicate.
    """

    def __init__(self, optimizer: keras.Optimizer, variables: Sequence[keras.Variable], devices: StageDevices):
        self._optimizer, self._variables, self._devices = optimizer, list(variables), devices
        self._host_variables = [variable for variable in optimizer.variables if not devices.is_on_devices(variable)]
        self._host_specs = [tf.TensorSpec(v.shape, v.dtype) for v in (*variables, *self._host_variables)]
        with keras_internals.outside_functions(), tf.device(None):
            trace = tf.function(self._trace, autograph=False)
            self._update = trace.get_concrete_function(*device_specs(self._host_specs))

    def apply(self, gradients: Sequence[tf.Tensor]) -> None:
        """Updates all variables, in a function of the host."""
        host_values = [tf.identity(variable.value) for variable in self._host_variables]
        specs = [tf.TensorSpec([], tf.float32), *(tf.TensorSpec(x.shape, x.dtype) for x in host_values)]
        tensors = [*gradients, *host_values, tf.identity(self._devices.order)]
        token, *values = call_host(self._run, tensors, specs)
        self._devices.order.assign(token)
        for variable, value in zip(self._host_variables, values, strict=True):
            variable.assign(value)

    def _run(self, *arrays: np.ndarray) -> list[np.ndarray]:
        with translate_program_errors([self._update.graph]):
            values = self._update(*(self._devices.to_devices(x) for x in arrays[:-1]))
        return [np.zeros([], np.float32), *self._devices.to_host(values)]

    def _trace(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        with self._devices.tracing():
            values = to_host_dtypes(arguments, self._host_specs)
            count = len(self._variables)
            on_host = list(zip(self._host_variables, values[count:], strict=True))
            updates = apply_update(self._devices.devices, self._optimizer, values[:count], self._variables, on_host)
            return [self._devices.layouts.replicate(value) for value in updates]
