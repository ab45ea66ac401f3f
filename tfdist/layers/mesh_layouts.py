"""Layouts of tensors in a function of the devices of a mesh, by the rules for the names of dims."""

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
from tfdist.layers.recompute import waiting


class MeshLayouts(TensorLayouts):
    """Layouts on a mesh, by the rules for the names of dims.

    Attributes:
      row_shards: number of devices over which rows are sharded.
      devices_per_replica: number of devices of the mesh.
      dims: names of dims that a model has used so far.
    """

    shards_tensors = True

    def __init__(self, devices: Devices, rules: Mapping[str, str], gathers_all: bool):
        """Initializes the layouts.

        Args:
          devices: devices of the mesh.
          rules: mesh axes by name of dim.
          gathers_all: whether parameters are sharded when no layer computes with them.
        """
        self._devices, self._rules, self._gathers_all = devices, rules, gathers_all
        self.row_shards, self.devices_per_replica = devices.mesh.axes[rules["batch"]], devices.mesh.size
        self.dims: set[str] = set()

    def constrain(self, x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
        """See base class; outside of compiled functions, as in a functional model, the layout is only validated."""
        mesh, names = self._devices.mesh, resolve_optional_dims(dims, self._rules)
        self.dims |= {name for name in names if name}
        shape = [mesh.size if size is None else size for size in x.shape]  # unknown dims count as divisible
        layout = layout_by_rules(name, names, shape, self._rules, mesh, lenient=("batch",))
        if not tf.is_tensor(x) or not tf.inside_function():
            return x

        def lay_out(tensor: tf.Tensor) -> tf.Tensor:
            return self._devices.relayout(tensor, layout) if tensor.shape.rank == len(layout.axes) else tensor

        return keras_internals.copy_mask_and_logits(lay_out(x), x, lay_out)

    def by_rows(self, tensors: Any) -> Any:
        """See base class; sharded by rows only.

        Losses over sharded classes either do not compile or are silently wrong in float64
        (tests/traps/dtensor_test.py), and rows cut out of a batch would be laid out as required by a layer with sharded
        inputs.
        """
        lay_out = self._in_rows
        return keras.tree.map_structure(lambda x: keras_internals.copy_mask_and_logits(lay_out(x), x, lay_out), tensors)

    def _in_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        axis = self._rules["batch"]
        return self._devices.relayout(tensor, row_layout(tensor.shape, axis, self._devices.mesh.axes[axis]))

    @contextlib.contextmanager
    def computing(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """See base class."""
        if not self._gathers_all:
            yield
            return
        stored = [tf.convert_to_tensor(keras_internals.value_of(variable)) for variable in variables]
        values = [self.computed_from(variable, part, ()) for variable, part in zip(variables, stored, strict=True)]
        own = zip(variables, values, strict=True)
        with keras_internals.RecordedScope(own, zip(variables, stored, strict=True)) as scope:
            yield
        for variable, value in scope.assigned:
            variable.assign(value)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which a function of the devices is traced, and what Keras and TensorFlow compute there is laid out."""
        with contextlib.ExitStack() as stack:
            if "context" in self._rules:
                stack.enter_context(keras_internals.products_keep_dims())
            stack.enter_context(keras_internals.attentions_laid_out(self.asking, self.attending, self.attended))
            # In another layout, DTensor draws each part with a seed of its own, and the layout is that which what uses the
            # numbers requires: another one if a layer is recomputed in the backward pass.
            stack.enter_context(keras_internals.draws_laid_out(self.replicated))
            stack.enter_context(keras_internals.strides_laid_out(self.rearranged))
            stack.enter_context(keras_internals.concatenations_laid_out(self.rearranged))
            # The gradient of top-k places elements by their indices in the whole tensor, which DTensor takes for those in
            # a shard.
            stack.enter_context(keras_internals.top_k_laid_out(self.replicated))
            # DTensor refuses a transpose whose result is required to be sharded otherwise than its input.
            stack.enter_context(keras_internals.transposed_inputs_copied())
            yield

    def replicated(self, tensor: tf.Tensor) -> tf.Tensor:
        """Lays out a tensor whole on each device; one of unknown rank is returned as it is."""
        rank = tensor.shape.rank
        return tensor if rank is None else self._devices.relayout(tensor, Layout.replicated(rank))

    def rearranged(self, tensor: tf.Tensor, keeps_rows: bool) -> tf.Tensor:
        """Lays out a tensor before and after it is sliced with strides or concatenated: sharded by rows at most.

        DTensor has no layout for `tf.reverse`. Of a sharded dim, it takes every nth element, or the reverse, of each shard;
        if the next operation requires the concatenated dim to be sharded, it concatenates each shard separately. Both are
        silently wrong (tests/traps/dtensor_test.py).

        Args:
          tensor: the tensor, or the result.
          keeps_rows: whether the result has the rows in their order, or a range of them.
        """
        result = self._in_rows(tensor) if keeps_rows and tensor.shape.rank is not None else self.replicated(tensor)
        # The layout of a Relayout is fixed, and DTensor refuses some operations that require another one. It lays out an
        # identity as they require; of one alone, it refuses what a transpose and a sharded layer both use.
        return tf.identity(tf.identity(result))

    def stored(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """See base class."""
        return self._devices.relayout(value, placement_of(variable).stored)

    def computed_from(self, variable: keras.Variable, held: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """See base class; gathers a sharded parameter when its layer runs; its gradient is sharded again."""
        placement = placement_of(variable)
        if not placement.is_gathered:
            return held

        @tf.custom_gradient
        def gathered(part: tf.Tensor) -> Any:
            if inputs:  # otherwise the engine would gather all layers up front
                [part] = waiting([part], inputs[0])
            whole = self._devices.relayout(part, placement.computed)
            return whole, lambda gradient: parted(self._devices, gradient, placement)

        # Repeated, because TensorFlow appends an identity, which the engine might lay out as a later layer requires.
        return self._devices.relayout(gathered(held), placement.computed)

    def asking(self, name: str, query: tf.Tensor) -> tf.Tensor:
        """Lays out an attention layer's input, so projections know it and its gradient is summed before it is sent."""
        if not {"heads", "context"} & self._rules.keys() or query.shape.rank != 3:
            return query
        return self.constrain(query, ("batch", "context", None), f"the input of {name}")

    def attending(
        self, name: str, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, causal: bool
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Implements context parallelism: each device has its part of the queries, and all keys and values."""
        if "context" not in self._rules or query.shape.rank != 4:
            return query, key, value, None
        mask = self._causal_mask(query.shape[1], key.shape[1], f"the mask of {name}") if causal else None
        query = self.constrain(query, ("batch", "context", "heads", None), f"the queries of {name}")
        key, value = (self.constrain(x, ("batch", None, "heads", None), f"the keys of {name}") for x in (key, value))
        return query, key, value, mask

    def _causal_mask(self, queries: int, keys: int, name: str) -> tf.Tensor:
        """Returns a sharded causal mask; Keras's would be replicated, and so would everything combined with it."""
        own = self.constrain(tf.expand_dims(tf.range(queries), 1), ("context", None), name)
        return tf.expand_dims(own >= tf.expand_dims(tf.range(keys), 0), 0)

    def attended(self, name: str, output: tf.Tensor) -> tf.Tensor:
        """Lays out an attention layer's output, so that its gradient has the full sequence.

        That is needed if the rest of the model shards the sequence over the axis of the heads: the projection's
        gradient would move the axis between inner dims, which DTensor silently does wrong
        (tests/traps/dtensor_test.py).
        """
        if "heads" not in self._rules or output.shape.rank != 3:
            return output
        return self.constrain(output, ("batch", "context", None), f"the output of {name}")


def parted(devices: Devices, gradient: tf.Tensor, placement: Placement) -> tf.Tensor:
    """Lays out a gradient as stored, via its computed layout, so that the backward pass keeps the latter."""
    computed = devices.relayout(gradient, placement.computed)
    return computed if placement.gradient == placement.computed else devices.relayout(computed, placement.gradient)


def placement_of(variable: keras.Variable) -> Placement:
    """Returns the placement of a variable; replicated, if it had a value from the start."""
    placement = keras_internals.layout_of(variable)
    return placement or Placement.same(Layout.replicated(len(variable.shape)))


def update_at_once(
    devices: Devices,
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    on_host: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
) -> list[tf.Tensor]:
    """Runs an update, in the layout of the optimizer's state: computes all values before it assigns any.

    An optimizer assigns its state and then reads it. If layouts differ, DTensor may silently compile that to a read before
    the assignment (tests/traps/dtensor_test.py).

    Args:
      devices: devices with the variables.
      optimizer: the optimizer.
      gradients: gradients of the variables.
      variables: variables to update.
      on_host: variables of the optimizer that are not on the devices, with their values.

    Returns:
      The new values of the variables that are not on the devices.
    """
    others = [variable for variable, _ in on_host]
    on_devices = [*variables, *(v for v in optimizer.variables if all(v is not other for other in others))]
    before = [(v, devices.relayout(keras_internals.value_of(v), placement_of(v).slots)) for v in on_devices]
    gradients = [devices.relayout(g, placement_of(v).slots) for g, v in zip(gradients, variables, strict=True)]
    with (
        keras_internals.stateless_updates(),
        keras.StatelessScope(state_mapping=[*before, *on_host]) as scope,
    ):
        optimizer.apply(gradients, list(variables))
    after = [tf.cast(scope.get_current_value(variable), variable.dtype) for variable in (*on_devices, *others)]
    for variable, value in zip(on_devices, after, strict=False):
        keras_internals.value_of(variable).assign(devices.relayout(value, placement_of(variable).stored))
    return after[len(on_devices) :]
