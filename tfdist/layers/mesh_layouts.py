"""Lays out tensors on a mesh by rules that map names of dims to mesh axes."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.layouts import Layout, Placement, layout_by_rules, resolve_optional_dims
from tfdist.distribution.dtensor_variables import Devices, row_layout
from tfdist.distribution.strategy import TensorLayouts
from tfdist.distribution.variable_layouts import Dims
from tfdist.layers.recompute import wait_for


class MeshLayouts(TensorLayouts):
    """Layouts on a mesh, determined by rules that map names of dims to mesh axes.

    With `gathers_parameters`, parameters are stored sharded, and gathered while a layer computes with them.
    """

    shards_tensors = True

    def __init__(self, devices: Devices, rules: Mapping[str, str], gathers_parameters: bool):
        self._devices, self._rules, self._gathers_parameters = devices, rules, gathers_parameters
        # Number of devices over which rows are sharded, and number of all devices of the mesh.
        self.row_shards, self.devices_per_replica = devices.mesh.axes[rules["batch"]], devices.mesh.size
        self.dims: set[str] = set()  # names of dims that the model has used

    def constrain(self, x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
        """See base class. Only validates the layout outside of compiled functions, as when a functional model is built."""
        mesh, names = self._devices.mesh, resolve_optional_dims(dims, self._rules)
        self.dims |= {name for name in names if name}
        shape = [mesh.size if size is None else size for size in x.shape]  # unknown dims count as divisible
        layout = layout_by_rules(name, names, shape, self._rules, mesh, lenient=("batch",))
        if not tf.is_tensor(x) or not tf.inside_function():
            return x

        def lay_out(tensor: tf.Tensor) -> tf.Tensor:
            return self._devices.relayout(tensor, layout) if tensor.shape.rank == len(layout.axes) else tensor

        return keras_internals.copy_mask_and_logits(lay_out(x), x, lay_out)

    def lay_out_rows(self, tensors: Any) -> Any:
        """See base class. Shards tensors along the batch axis only.

        Losses over sharded classes either do not compile or are silently wrong in float64
        (tests/traps/dtensor_test.py), and a slice of a batch would get the layout of a layer with sharded inputs.
        """
        lay_out = self._shard_rows
        return keras.tree.map_structure(lambda x: keras_internals.copy_mask_and_logits(lay_out(x), x, lay_out), tensors)

    def _shard_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        axis = self._rules["batch"]
        return self._devices.relayout(tensor, row_layout(tensor.shape, axis, self._devices.mesh.axes[axis]))

    @contextlib.contextmanager
    def compute_layouts(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        if not self._gathers_parameters:
            yield
            return
        stored_values = [tf.convert_to_tensor(keras_internals.value_of(variable)) for variable in variables]
        values = [self.compute_value(v, part, ()) for v, part in zip(variables, stored_values, strict=True)]
        value_pairs = zip(variables, values, strict=True)
        with keras_internals.RecordedScope(value_pairs, zip(variables, stored_values, strict=True)) as scope:
            yield
        for variable, value in scope.assignments:
            variable.assign(value)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Returns a context for tracing a function of the devices, which lays out operations of Keras and TensorFlow."""
        with (
            keras_internals.keep_product_dims() if "context" in self._rules else contextlib.nullcontext(),
            keras_internals.lay_out_attention(self.constrain_input, self.constrain_attention, self.constrain_output),
            # For a sharded layout, DTensor draws each shard with a different seed. The operations that use the random
            # numbers determine the layout, which may therefore differ when a layer is recomputed in the backward pass.
            keras_internals.lay_out_draws(self.replicate),
            keras_internals.lay_out_strided_slices(self.layout_for_slicing),
            keras_internals.lay_out_concatenations(self.layout_for_slicing),
            # The gradient of top-k uses indices into the whole tensor, but DTensor interprets them as indices into a shard.
            keras_internals.lay_out_top_k(self.replicate),
            # DTensor rejects a transpose whose result must be sharded differently from its input.
            keras_internals.copy_transposed_inputs(),
        ):
            yield

    def replicate(self, tensor: tf.Tensor) -> tf.Tensor:
        """Replicates a tensor on all devices; a tensor of unknown rank is returned unchanged."""
        rank = tensor.shape.rank
        return tensor if rank is None else self._devices.relayout(tensor, Layout.replicated(rank))

    def layout_for_slicing(self, tensor: tf.Tensor, keeps_rows: bool) -> tf.Tensor:
        """Lays out a tensor before or after a strided slice or concatenation: sharded along the batch axis at most.

        DTensor has no layout for `tf.reverse`. It strides and reverses a sharded dim within each shard, and if the next
        operation requires the concatenated dim to be sharded, it concatenates each shard separately. Both are silently
        wrong (tests/traps/dtensor_test.py). `keeps_rows`: whether the result contains the rows, or a range of them, in order.
        """
        result = self._shard_rows(tensor) if keeps_rows and tensor.shape.rank is not None else self.replicate(tensor)
        # The layout of a Relayout operation is fixed, and DTensor rejects some operations that require another layout. That
        # of an identity is flexible. With one identity, DTensor rejects a tensor used by a transpose and a sharded layer.
        return tf.identity(tf.identity(result))

    def to_stored_layout(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        return self._devices.relayout(value, placement_of(variable).storage)

    def compute_value(self, variable: keras.Variable, stored: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """See base class. Gathers a sharded parameter when its layer runs, and shards its gradient."""
        placement = placement_of(variable)
        if not placement.is_gathered:
            return stored

        @tf.custom_gradient
        def gather(part: tf.Tensor) -> Any:
            if inputs:  # otherwise the engine would gather the parameters of all layers up front
                [part] = wait_for([part], inputs[0])
            full_value = self._devices.relayout(part, placement.computation)
            return full_value, lambda gradient: relayout_gradient(self._devices, gradient, placement)

        # Repeated, because TensorFlow appends an identity, which might get the layout of a later layer.
        return self._devices.relayout(gather(stored), placement.computation)

    def constrain_input(self, name: str, query: tf.Tensor) -> tf.Tensor:
        """Fixes the layout of an attention layer's input for the projections, so that its gradient is summed before sending."""
        if not {"heads", "context"} & self._rules.keys() or query.shape.rank != 3:
            return query
        return self.constrain(query, ("batch", "context", None), f"the input of {name}")

    def constrain_attention(
        self, name: str, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, causal: bool
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Implements context parallelism: each device has a shard of the queries, but all keys and values."""
        if "context" not in self._rules or query.shape.rank != 4:
            return query, key, value, None
        mask = None
        if causal:  # a sharded mask, because Keras's mask is replicated, as is every tensor that is combined with it
            queries, keys = tf.expand_dims(tf.range(query.shape[1]), 1), tf.expand_dims(tf.range(key.shape[1]), 0)
            mask = tf.expand_dims(self.constrain(queries, ("context", None), f"the mask of {name}") >= keys, 0)
        query = self.constrain(query, ("batch", "context", "heads", None), f"the queries of {name}")
        key, value = (self.constrain(x, ("batch", None, "heads", None), f"the keys of {name}") for x in (key, value))
        return query, key, value, mask

    def constrain_output(self, name: str, output: tf.Tensor) -> tf.Tensor:
        """Lays out an attention layer's output, and its gradient, with the full sequence.

        This is needed if the rest of the model shards the sequence over the mesh axis of the heads: the projection's gradient
        would move the axis between inner dims, with silently wrong results in DTensor (tests/traps/dtensor_test.py).
        """
        if "heads" not in self._rules or output.shape.rank != 3:
            return output
        return self.constrain(output, ("batch", "context", None), f"the output of {name}")


def relayout_gradient(devices: Devices, gradient: tf.Tensor, placement: Placement) -> tf.Tensor:
    """Lays out a gradient for storage, first in the layout for computation, which the backward pass must use."""
    result = devices.relayout(gradient, placement.computation)
    return result if placement.gradient == placement.computation else devices.relayout(result, placement.gradient)


def placement_of(variable: keras.Variable) -> Placement:
    """Returns the placement of a variable; replicated if it was created with a value."""
    placement = keras_internals.layout_of(variable)
    return placement or Placement.uniform(Layout.replicated(len(variable.shape)))


def apply_update(
    devices: Devices,
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    host_values: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
) -> list[tf.Tensor]:
    """Runs an update in the layout of the optimizer's state, computing all values before assigning any value.

    An optimizer assigns its state and then reads it. If layouts differ, DTensor may silently read it before the assignment
    (tests/traps/dtensor_test.py).

    `host_values` are variables of the optimizer that are on the host, with their values; returns their new values.
    """
    host_variables, host_ids = [variable for variable, _ in host_values], {id(variable) for variable, _ in host_values}
    device_variables = [*variables, *(v for v in optimizer.variables if id(v) not in host_ids)]
    values = [(v, devices.relayout(keras_internals.value_of(v), placement_of(v).slots)) for v in device_variables]
    gradients = [devices.relayout(g, placement_of(v).slots) for g, v in zip(gradients, variables, strict=True)]
    scope = keras.StatelessScope(state_mapping=[*values, *host_values])
    with keras_internals.stateless_updates(), scope:
        optimizer.apply(gradients, list(variables))
    new_values = [tf.cast(scope.get_current_value(v), v.dtype) for v in (*device_variables, *host_variables)]
    for variable, value in zip(device_variables, new_values, strict=False):
        keras_internals.value_of(variable).assign(devices.relayout(value, placement_of(variable).storage))
    return new_values[len(device_variables) :]
