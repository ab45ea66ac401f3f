"""Plans a training step for a layout on a mesh: the shards of variables, and the memory and communication per device."""

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import data, keras_internals, models
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.layouts import Layout, Placement, Shard, layout_by_rules, resolve_optional_dims, unused_rule_warnings
from tfdist.config.mesh import Mesh
from tfdist.distribution.variable_layouts import (
    ATTENTIONS,
    Dims,
    dims_of_uninitialized,
    is_gathered_per_call,
    placement,
)
from tfdist.errors import InputError
from tfdist.layers import MixtureOfExperts
from tfdist.layers.recompute import recompute
from tfdist.optimizers.catalog import average_weights, create_optimizer


@dataclasses.dataclass(frozen=True)
class Activation:
    """Layout of a tensor between layers."""

    axes: tuple[str | None, ...]  # for each dim, the axis over which it is sharded, or None
    bytes: int  # bytes per device

    @property
    def sequence_axes(self) -> list[str]:
        """Axes over which the dims between rows and features are sharded."""
        return [axis for axis in self.axes[1:-1] if axis]


class Activations:
    """Layouts of the inputs and outputs of layers; tensors without known dim names are sharded by rows only.

    Attributes:
      mesh: mesh to plan for.
      rules: axis by dim.
    """

    def __init__(
        self,
        layers: Sequence[keras.Layer],
        variables: Mapping[int, Dims],
        mesh: Mesh,
        rules: Mapping[str, str],
        rows: int,
    ):
        """Propagates dim names through layers, which are in the order of computation, for a global batch of `rows`.

        `variables` are the dim names of each variable, by its id.
        """
        self.mesh, self.rules, self._rows = mesh, rules, rows
        self._names: dict[int, Dims] = {}
        for layer in layers:
            if not keras.tree.flatten(layer.input):  # an input layer
                continue
            if constraint_dims := getattr(layer, "tfdist_dims", None):
                self._names[id(layer.output)] = self._check_constraint(layer, constraint_dims)
                continue
            names = self._names_of(first(layer.input))
            for tensor in keras.tree.flatten(layer.output):
                self._names[id(tensor)] = _output_names(layer, names, tensor, variables)

    def _check_constraint(self, layer: keras.Layer, dims: Dims) -> Dims:
        """Returns the dim names of a constraint; raises `InputError` if the rules cannot be applied to them."""
        names = tuple(resolve_optional_dims(dims, self.rules))
        layout_by_rules(layer.name, names, _shape(layer.output, self._rows), self.rules, self.mesh, lenient=("batch",))
        return names

    def is_identity(self, layer: keras.Layer) -> bool:
        """Returns whether a layer is a constraint without effect."""
        return hasattr(layer, "tfdist_dims") and self.of(layer.input) == self.of(layer.output)

    @property
    def dims(self) -> set[str]:
        """All dim names."""
        return {name for names in self._names.values() for name in names if name}

    def of(self, tensors: object) -> Activation:
        """Returns the layout of the first tensor of a structure."""
        tensor = first(tensors)
        axes: list[str | None] = []
        for name, size in zip(self._names_of(tensor), _shape(tensor, self._rows), strict=True):
            axis = self.rules.get(name) if name else None
            fits = self.mesh.splits(axis) and axis not in axes and not size % self.mesh.axes[axis]
            axes.append(axis if fits else None)
        return Activation(tuple(axes), self.bytes_with(tensor, axes))

    def bytes_with(self, tensor: keras.KerasTensor, axes: Sequence[str | None]) -> int:
        """Returns the bytes per device of a tensor with these axes; dims without an axis at the end may be omitted."""
        parts = math.prod(self.mesh.axes[axis] for axis in axes if axis)
        return math.prod(_shape(tensor, self._rows)) * tf.as_dtype(tensor.dtype).size // parts

    def bytes(self, tensors: object) -> int:
        """Returns the bytes per device of all tensors of a structure."""
        return sum(self.of(tensor).bytes for tensor in keras.tree.flatten(tensors))

    def _names_of(self, tensor: keras.KerasTensor) -> Dims:
        return self._names.get(id(tensor)) or _row_names(tensor)


def _output_names(layer: keras.Layer, names: Dims, output: keras.KerasTensor, variables: Mapping[int, Dims]) -> Dims:
    result = names if tuple(first(layer.input).shape) == tuple(output.shape) else _row_names(output)
    if isinstance(layer, MixtureOfExperts):
        result = ("batch", None, names[-1])
    elif isinstance(layer, keras.layers.Embedding):
        result = (*names, variables[id(keras_internals.kernel_of(layer))][-1])
    elif isinstance(layer, keras.layers.Dense):
        result = (*names[:-1], variables[id(keras_internals.kernel_of(layer))][-1])
    elif isinstance(layer, ATTENTIONS):
        result = (*names[:-1], None)
    return result if len(result) == len(output.shape) else _row_names(output)


def _row_names(tensor: keras.KerasTensor) -> Dims:
    """Returns the dim names of a tensor of which only the batch dim is known."""
    return ("batch", *[None] * (len(tensor.shape) - 1)) if tensor.shape else ()


def first(tensors: object) -> keras.KerasTensor:
    """Returns the first tensor of a structure."""
    return keras.tree.flatten(tensors)[0]


def _shape(tensor: keras.KerasTensor, rows: int) -> list[int]:
    """Returns a shape with `rows` rows; other unknown sizes count as 1."""
    return [rows if i == 0 else size or 1 for i, size in enumerate(tensor.shape)]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One collective of a step, or several that the engine combines."""

    purpose: str  # what is sent, as text
    kind: str  # name of the collective
    axis: str  # axis along which devices communicate; several are joined by &
    bytes: int  # bytes of a device's tensor


_KEYS = ("key", "value")  # projections in Keras's attention layers


def layer_communication(
    model: keras.Model, layers: Sequence[keras.Layer], activations: Activations
) -> Iterator[Traffic]:
    """Yields the communication of layers in the forward and backward pass."""
    mesh, batch = activations.mesh, activations.rules["batch"]
    without_gradients = _tensors_without_gradients(model, layers)
    yield from _gradients_of_lookups(layers, activations)
    for layer in layers:
        needs_gradient = any(id(tensor) not in without_gradients for tensor in keras.tree.flatten(layer.input))
        if isinstance(layer, keras.layers.Embedding):
            yield from _lookup(layer, activations)
        elif isinstance(layer, ATTENTIONS):
            yield from _attention(layer, activations, without_gradients)
        elif isinstance(layer, MixtureOfExperts):
            yield from _experts(layer, activations)
        elif isinstance(layer, keras.layers.Dense):
            yield from _dense(layer, activations, needs_gradient)
        elif isinstance(layer, keras.layers.BatchNormalization) and mesh.splits(batch):
            size = keras_internals.bytes_of(layer.moving_mean)
            yield Traffic(f"moments of {layer.path}, and their gradients", "all-reduce", batch, 2 * size)
        elif getattr(layer, "tfdist_dims", None):
            yield from _constraint(layer, activations, needs_gradient)
    for output in keras.tree.flatten(model.outputs):
        row_axis, *other_axes = activations.of(output).axes
        for axis in filter(None, other_axes):
            yield Traffic("outputs, for the loss", "all-gather", axis, activations.bytes_with(output, [row_axis]))


def find_unclear_layers(layers: Sequence[keras.Layer], activations: Activations) -> Iterator[str]:
    """Yields the paths of layers whose layout is chosen by the engine.

    These are dense layers with a replicated input whose kernel is sharded along its inputs, attention with a sharded context
    and a replicated input, constraints that move an axis to another dim, LoRA, and other layers with a sharded input and an
    output whose layout is not fully known.
    """
    context = activations.rules.get("context")
    for layer in layers:
        if not keras.tree.flatten(layer.input):
            continue
        needs_context = isinstance(layer, ATTENTIONS) and activations.mesh.splits(context)
        lacks_context = needs_context and context not in activations.of(layer.input).sequence_axes
        if lacks_context or _is_unclear(layer, activations):
            yield keras_internals.path_of(layer)


def _is_unclear(layer: keras.Layer, activations: Activations) -> bool:
    input_axes, output_axes = activations.of(layer.input).axes, activations.of(layer.output).axes
    if getattr(layer, "lora_enabled", False):
        return True
    if isinstance(layer, keras.layers.Dense):
        kernel_axis = keras_internals.layout_of(keras_internals.kernel_of(layer)).computation.axes[0]
        return activations.mesh.splits(kernel_axis) and input_axes[-1] != kernel_axis
    if hasattr(layer, "tfdist_dims"):
        return any(axis and axis in output_axes and output_axes.index(axis) != i for i, axis in enumerate(input_axes))
    is_known = isinstance(layer, (keras.layers.Embedding, MixtureOfExperts, *ATTENTIONS))
    return not is_known and any(axis and axis not in output_axes for axis in input_axes[1:])


def gradient_communication(
    layers: Sequence[keras.Layer], activations: Activations, sizes: Mapping[int, int], shard: Shard
) -> Iterator[Traffic]:
    """Yields the sums of gradients over axes along which their layers have different rows or parts of a sequence.

    `sizes` are, by id of each trainable variable, bytes per device of the computed gradient. Sharded gradients are not
    combined, because they do not exist at the same time.
    """
    bytes_by_axes: dict[tuple[str, ...], int] = collections.Counter()
    axes_of: dict[int, list[str]] = {}
    constraints = {
        id(first(layer.input)): activations.of(layer.output) for layer in layers if hasattr(layer, "tfdist_dims")
    }
    for layer in (layer for layer in layers if layer.variables):
        # Axes, except that of rows, over which devices have different tokens of the layer's input.
        has_tokens = not isinstance(layer, MixtureOfExperts | keras.layers.Embedding)
        for variable in layer.variables:
            axes_of.setdefault(id(variable), activations.of(layer.input).sequence_axes if has_tokens else [])
        constraint = constraints.get(id(layer.output))
        # The bias is added in the layout of the output.
        if constraint and isinstance(layer, keras.layers.Dense) and layer.use_bias:
            axes_of[id(layer.bias)] = list(dict.fromkeys([*axes_of[id(layer.bias)], *constraint.sequence_axes]))
    for variable, size in sizes.items():
        sum_axes = dict.fromkeys([activations.rules["batch"], *axes_of.get(variable, [])])
        bytes_by_axes[tuple(axis for axis in sum_axes if activations.mesh.splits(axis))] += size
    for axes, total in bytes_by_axes.items():
        if axes:
            grouping = "together" if shard.combines_all_reduces else "one by one"
            yield Traffic(f"gradients, {grouping}", "all-reduce", "&".join(axes), total)


def _tensors_without_gradients(model: keras.Model, layers: Sequence[keras.Layer]) -> set[int]:
    ids = {id(tensor) for tensor in keras.tree.flatten(model.inputs)}
    for layer in layers:
        inputs = keras.tree.flatten(layer.input)
        if not layer.trainable_variables and all(id(tensor) in ids for tensor in inputs):
            ids |= {id(tensor) for tensor in keras.tree.flatten(layer.output)}
    return ids


def _dense(layer: keras.layers.Dense, activations: Activations, needs_gradient: bool) -> Iterator[Traffic]:
    """Yields partial sums over a sharded contracted dim (Megatron's f and g)."""
    input_axis, output_axis = (
        axis if axis != activations.rules["batch"] and activations.mesh.splits(axis) else None
        for axis in keras_internals.layout_of(keras_internals.kernel_of(layer)).computation.axes
    )
    activation, source = activations.of(layer.input), first(layer.input)
    if activation.axes[-1] and output_axis == activation.axes[-1] and input_axis != output_axis:
        size = activations.bytes_with(source, activation.axes[:-1])
        yield Traffic(f"input of {layer.path}", "all-gather", output_axis, size)
    elif axis := input_axis or activation.axes[-1]:
        yield Traffic(f"output of {layer.path}", "all-reduce", axis, activations.of(layer.output).bytes)
    if output_axis and needs_gradient:
        gradient = activations.bytes_with(source, (*activation.axes[:-1], input_axis))
        yield Traffic(f"gradient of the input of {layer.path}", "all-reduce", output_axis, gradient)


def _attention(layer: keras.Layer, activations: Activations, without_gradients: set[int]) -> Iterator[Traffic]:
    mesh, rules = activations.mesh, activations.rules
    heads, tensors = rules.get("heads"), {id(tensor): tensor for tensor in keras.tree.flatten(layer.input)}
    if heads != rules["batch"] and mesh.splits(heads):
        yield Traffic(f"output of {layer.path}", "all-reduce", heads, activations.of(layer.output).bytes)
        for tensor in (tensor for key, tensor in tensors.items() if key not in without_gradients):
            yield Traffic(f"gradient of the input of {layer.path}", "all-reduce", heads, activations.of(tensor).bytes)
    keys = list(tensors.values())[-1]
    key_activation = activations.of(keys)
    context = rules.get("context", rules["batch"])
    context_axes = [context] if context != rules["batch"] and mesh.splits(context) else []
    for axis in dict.fromkeys([*key_activation.sequence_axes, *context_axes]):
        tokens = activations.bytes_with(keys, key_activation.axes[:1]) // keys.shape[-1]
        kernels = [keras_internals.kernel_of(x) for x in keras_internals.layers_of(layer) if x.name in _KEYS]
        repeats = getattr(layer, "num_repeats", 1)  # Keras repeats the keys of grouped queries before attention
        size = tokens * repeats * sum(_width(kernel, mesh) for kernel in kernels)
        yield Traffic(f"keys and values of {layer.path}", "all-gather", axis, size)
        yield Traffic(f"gradients of keys and values of {layer.path}", "all-reduce", axis, size)


def _experts(layer: MixtureOfExperts, activations: Activations) -> Iterator[Traffic]:
    """Yields the exchange of tokens with experts and their gradients, or partial sums if each device has all tokens."""
    mesh, batch = activations.mesh, activations.rules["batch"]
    activation, source = activations.of(layer.input), first(layer.input)
    all_tokens = activations.bytes_with(source, activation.axes[:1])
    if mesh.splits(batch):
        yield Traffic(f"load of {layer.path}", "all-reduce", batch, keras_internals.bytes_of(layer.load.tokens))
    for sequence in activation.sequence_axes:
        yield Traffic(f"tokens of {layer.path}", "all-gather", sequence, all_tokens)
    size = all_tokens // source.shape[1] * layer.experts * layer.capacity(source.shape[1], training=True)
    experts, _, width = keras_internals.layout_of(layer.in_kernel).computation.axes
    parts = mesh.axes[experts] if experts else 1
    if mesh.splits(width):
        device_size = size if experts == batch else size // parts  # of all rows, or of the device's rows
        yield Traffic(
            f"sums of the experts' products of {layer.path}, and gradients", "all-reduce", width, 2 * device_size
        )
    if parts > 1 and experts == batch:
        gathers = any(keras_internals.layout_of(variable).is_gathered for variable in layer.trainable_variables)
        times = 3 if gathers else 2  # gathered layers are recomputed in the backward pass
        for purpose in ("tokens to the experts", "tokens from the experts"):
            yield Traffic(f"{purpose} of {layer.path}, and their gradients", "all-to-all", experts, times * size)
    elif parts > 1:
        yield Traffic(f"output of {layer.path}, and gradients of its tokens", "all-reduce", experts, 2 * all_tokens)
        weights = all_tokens // source.shape[2] * layer.experts
        yield Traffic(f"gradients of the weights of tokens of {layer.path}", "all-gather", experts, weights)


def _width(kernel: keras.Variable, mesh: Mesh) -> int:
    """Returns the number of features per token and device after a projection [embed, heads, head_dim]."""
    parts = Layout((None, *keras_internals.layout_of(kernel).computation.axes[1:])).shard_count(mesh)
    return kernel.shape[1] * kernel.shape[2] // parts


def _constraint(layer: keras.Layer, activations: Activations, needs_gradient: bool) -> Iterator[Traffic]:
    """Yields an all-gather for each axis that a constraint removes and, in the backward pass, that it adds."""
    input_layout, output_layout = activations.of(layer.input), activations.of(layer.output)
    tensor = first(layer.input)
    passes = [("tensor", input_layout.axes, output_layout.axes)]
    if needs_gradient and keras.backend.is_float_dtype(tensor.dtype):
        passes.append(("gradient", output_layout.axes, input_layout.axes))
    for i in range(len(tensor.shape)):
        for name, axes, other_axes in passes:
            if (axis := axes[i]) and axis != other_axes[i]:
                size = activations.bytes_with(tensor, (*axes[:i], None, *axes[i + 1 :]))
                yield Traffic(f"{name} in {layer.name}", "all-gather", axis, size)


def _gradients_of_lookups(layers: Sequence[keras.Layer], activations: Activations) -> Iterator[Traffic]:
    """Yields the all-gathers of gradients of embeddings in DTensor; embeddings whose outputs are added share one."""
    sums = [layer for layer in layers if isinstance(layer, keras.layers.Add)]
    sum_by_term = {id(term): layer for layer in sums for term in keras.tree.flatten(layer.input)}
    reported_axes = set()
    for layer in (layer for layer in layers if isinstance(layer, keras.layers.Embedding) and layer.trainable_variables):
        source = sum_by_term.get(id(layer.output), layer)
        row_axes = activations.of(layer.output).axes[:1]
        for axis in activations.of(layer.input).axes[1:]:
            if axis and (id(source), axis) not in reported_axes:
                reported_axes.add((id(source), axis))
                size = activations.bytes_with(layer.output, row_axes)
                yield Traffic(f"gradient of the output of {keras_internals.path_of(source)}", "all-gather", axis, size)


def _lookup(layer: keras.layers.Embedding, activations: Activations) -> Iterator[Traffic]:
    """Yields the all-gathers of a lookup: DTensor needs the full table, and tokens that are sharded by rows only."""
    tokens = activations.of(layer.input)
    for axis in tokens.axes[1:]:
        if axis:
            size = activations.bytes_with(first(layer.input), tokens.axes[:1])
            yield Traffic(f"tokens of {layer.path}", "all-gather", axis, size)
    variable = keras_internals.kernel_of(layer)
    vocabulary, *other_axes = keras_internals.layout_of(variable).computation.axes
    if activations.mesh.splits(vocabulary):
        parts = Layout((None, *other_axes)).shard_count(activations.mesh)
        yield Traffic(f"table of {layer.path}", "all-gather", vocabulary, keras_internals.bytes_of(variable) // parts)


_MAX_LAYOUTS = 20_000
_UNCOUNTED_DIMS = ("embed", "head_dim")  # if these are sharded, operations between layers communicate


@dataclasses.dataclass(frozen=True)
class VariablePlan:
    """The plan of one variable."""

    path: str  # path of the variable
    dims: tuple[str, ...]  # names of its dims, with * for a dim without a name
    shape: tuple[int, ...]  # static shape
    bytes: int  # bytes of the unsharded variable
    placement: Placement  # its layouts
    slots: int  # number of variables of this shape in the optimizer's state
    trainable: bool  # whether it has a gradient

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of its unsharded optimizer state."""
        return self.slots * self.bytes

    def bytes_per_device(self, mesh: Mesh) -> dict[str, int]:
        """Returns the bytes per device of the variable between steps, its gradient and its optimizer state."""

        def part(layout: Layout) -> int:
            return self.bytes // layout.shard_count(mesh)

        gradient = part(self.placement.gradient) if self.trainable else 0
        return {
            "parameters": part(self.placement.storage),
            "gradients": gradient,
            "slots": self.slots * part(self.placement.slots),
        }

    def is_replicated(self, mesh: Mesh) -> bool:
        """Returns whether it, its gradient and its optimizer state are all replicated."""
        layouts = (self.placement.storage, self.placement.gradient, *([self.placement.slots] if self.slots else []))
        return all(layout.shard_count(mesh) == 1 for layout in layouts)

    def bytes_of_gradient(self, mesh: Mesh, is_table: bool) -> int:
        """Returns the bytes per device of the computed gradient, which has all rows of an embedding table."""
        layout = self.placement.computation
        return self.bytes // (Layout((None, *layout.axes[1:])) if is_table else layout).shard_count(mesh)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a step; see `AbstractModel.plan`."""

    mesh: Mesh  # mesh of the plan
    rules: Mapping[str, str]  # axis by dim
    shard: Shard  # sharding of the state
    variables: list[VariablePlan]  # the model's variables
    traffic: list[Traffic]  # communication of a step
    activations: int  # bytes of the layers' outputs for the rows of one device
    dims: frozenset[str]  # names of dims to which rules may refer
    # Nested layers, whose communication and memory are not counted because their shapes are not known.
    unknown_layers: list[str]
    # Layers whose layout is chosen by the engine, so their communication is not fully counted.
    unclear_layers: list[str]

    @property
    def warnings(self) -> list[str]:
        """Warnings about rules and axes without effect."""
        return unused_rule_warnings(self.rules, self.dims, self.shard, self.mesh)

    def totals(self) -> dict[str, int]:
        """Returns the bytes per device of parameters, gradients, optimizer state (`slots`) and activations."""
        variable_bytes = [variable.bytes_per_device(self.mesh) for variable in self.variables]
        state = {kind: sum(sizes[kind] for sizes in variable_bytes) for kind in ("parameters", "gradients", "slots")}
        return {**state, "activations": self.activations}


class AbstractModel:
    """A model with uninitialized variables, which can be planned for several layouts.

    Attributes:
      model: a functional or sequential model.
      slots: number of optimizer variables of each variable, by the variable's id.
    """

    def __init__(self, make: Callable[[], tuple[keras.Model, keras.Optimizer]]):
        """Calls `make`, which creates a functional or sequential model and an optimizer that is not built."""
        created_variables: list[keras_internals.UninitializedVariable] = []
        with keras_internals.deferred_creation(created_variables, created_variables.append):
            self.model, optimizer = make()
        model_ids = {id(variable) for variable in self.model.variables}
        self._uninitialized = [
            uninitialized for uninitialized in created_variables if id(uninitialized.variable) in model_ids
        ]
        if not self._uninitialized:
            raise InputError(
                f"A plan needs a model that creates its variables immediately. Received: {self.model.name}, which "
                "has no variables. Add a keras.Input."
            )
        self.slots = _slots(self.model, optimizer)
        self._layers, self._unknown_layers = _layers_of(self.model)

    @property
    def variables(self) -> list[keras.Variable]:
        """The model's variables, in the order of `Plan.variables`."""
        return [uninitialized.variable for uninitialized in self._uninitialized]

    @property
    def dims(self) -> list[str]:
        """Names of all dims to which a rule may refer, in the order of the variables."""
        return list(dict.fromkeys(dim for dims in self._dims_by_variable.values() for dim in dims if dim))

    @property
    def _dims_by_variable(self) -> dict[int, Dims]:
        return {
            id(uninitialized.variable): dims_of_uninitialized(uninitialized) for uninitialized in self._uninitialized
        }

    def plan(self, mesh: Mesh, rules: Mapping[str, str], shard: Shard, batch_size: int) -> Plan:
        """Plans a step; `rules` has the axis of dims, including `batch`. Raises `InputError` if a rule cannot be applied."""
        variables = [self._plan_variable(uninitialized, mesh, rules, shard) for uninitialized in self._uninitialized]
        activations = Activations(self._layers, self._dims_by_variable, mesh, rules, batch_size)
        tables = {id(table) for table in keras_internals.embeddings(self.model)}
        gradient_bytes = {
            id(uninitialized.variable): variable_plan.bytes_of_gradient(mesh, id(uninitialized.variable) in tables)
            for uninitialized, variable_plan in zip(self._uninitialized, variables, strict=True)
            if variable_plan.trainable and rules["batch"] not in variable_plan.placement.computation.axes
        }
        traffic = [
            *layer_communication(self.model, self._layers, activations),
            *gradient_communication(self._layers, activations, gradient_bytes, shard),
            *self._shard_communication(variables, mesh, shard),
        ]
        activation_bytes = sum(
            activations.bytes(layer.output) for layer in self._layers if not activations.is_identity(layer)
        )
        attention_dims = {"context"} if any(isinstance(layer, ATTENTIONS) for layer in self._layers) else set()
        dims = frozenset(activations.dims | attention_dims | set(self.dims))
        unclear_layers = list(find_unclear_layers(self._layers, activations))
        return Plan(
            mesh, rules, shard, variables, traffic, activation_bytes, dims, self._unknown_layers, unclear_layers
        )

    def device_bytes(self, plan: Plan) -> Callable[[keras.Variable], int]:
        """Returns a function that returns the bytes of a variable on each device; only trainable variables are sharded."""
        sizes = {
            id(variable): v.bytes_per_device(plan.mesh)["parameters"] if v.trainable else v.bytes
            for variable, v in zip(self.variables, plan.variables, strict=True)
        }
        return lambda variable: sizes[id(variable)]

    def _plan_variable(
        self, uninitialized: keras_internals.UninitializedVariable, mesh: Mesh, rules: Mapping[str, str], shard: Shard
    ) -> VariablePlan:
        variable = uninitialized.variable
        keras_internals.set_layout(variable, None)
        layouts = placement(uninitialized, rules, mesh, shard)
        keras_internals.set_layout(variable, layouts)
        size = keras_internals.bytes_of(variable)
        dims = tuple(dim or "*" for dim in dims_of_uninitialized(uninitialized))
        slots = self.slots.get(id(variable), 0)
        return VariablePlan(variable.path, dims, tuple(variable.shape), size, layouts, slots, variable.trainable)

    def _shard_communication(self, variables: list[VariablePlan], mesh: Mesh, shard: Shard) -> Iterator[Traffic]:
        regathered_paths = {
            uninitialized.variable.path for uninitialized in self._uninitialized if is_gathered_per_call(uninitialized)
        }
        trainable = [variable for variable in variables if variable.trainable]
        gathered_variables = [v for v in trainable if v.placement.is_gathered]
        for purpose, group in (
            ("updated variables", [v for v in trainable if v.placement.slots != v.placement.storage]),
            ("variables, forward", gathered_variables),
            ("variables, backward", [v for v in gathered_variables if v.path in regathered_paths]),
        ):
            if group:
                total = sum(v.bytes // v.placement.computation.shard_count(mesh) for v in group)
                yield Traffic(purpose, "all-gather", shard.axis, total)


def planned_model(config: LayoutConfig) -> AbstractModel:
    """Returns the model that the flags describe, without values for its variables; sets Keras's dtype policy."""
    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    splits = data.load(config.dataset, config.data_dir)
    sizes: Any = splits.input_shape, splits.classes  # may be unknown for a user-defined model

    def make() -> Any:
        optimizer = create_optimizer(config.optimizer, config.learning_rate, config.momentum_correction)
        average_weights(optimizer, config.ema)
        return recompute(models.build(config.model, *sizes), config.recompute), optimizer

    return AbstractModel(make)


def cheapest_layout(
    abstract_model: AbstractModel, mesh: Mesh, rules: Mapping[str, str], shard: Shard, batch_size: int, memory: float
) -> Plan:
    """Returns the plan with the least communication whose state and activations fit into a device's memory in bytes.

    Tries all assignments of dims to axes other than the batch's in addition to `rules`, except for dims whose
    communication is not fully known; see `uncounted_rules`. Prefers the fewest unclear layers, then the least
    communication, then the least memory, then the fewest rules.

    Raises:
      InputError: there are too many assignments, or none fits into memory.
    """
    free_dims = [
        dim for dim in abstract_model.dims if dim not in (*rules, *_UNCOUNTED_DIMS) and not dim.startswith("spatial_")
    ]
    axes = [axis for axis, size in mesh.axes.items() if size > 1 and axis != rules["batch"]]
    if (len(axes) + 1) ** len(free_dims) > _MAX_LAYOUTS:
        raise InputError(
            f"--layout=auto tries every assignment of dims to axes, at most {_MAX_LAYOUTS}. Received: {len(free_dims)} dims "
            f"({', '.join(free_dims)}) and {len(axes)} axes. Specify rules in --layout instead of auto."
        )
    plans = []
    for assignment in itertools.product((None, *axes), repeat=len(free_dims)):
        candidate_rules = {**rules, **{dim: axis for dim, axis in zip(free_dims, assignment, strict=True) if axis}}
        with contextlib.suppress(InputError):
            plan = abstract_model.plan(mesh, candidate_rules, shard, batch_size)
            sent_bytes, device_bytes = sum(item.bytes for item in plan.traffic), sum(plan.totals().values())
            plans.append((len(plan.unclear_layers), sent_bytes, device_bytes, len(candidate_rules), plan))
    fitting = [item for item in plans if item[2] <= memory]
    if not fitting:
        min_bytes = min((item[2] for item in plans), default=math.inf)
        raise InputError(
            f"--memory_gb must be enough for at least one layout. Received: {memory / 2**30:g}, with {len(plans)} "
            f"layouts, the smallest of which needs {min_bytes / 2**30:.3g}. Use more devices, --shard, a smaller batch, or "
            "more memory."
        )
    return min(fitting, key=lambda item: item[:4])[-1]


def uncounted_rules(rules: Mapping[str, str]) -> list[str]:
    """Returns rules whose communication is not fully known: of embed, head_dim, and of most dims on the batch's axis."""
    batch = rules["batch"]
    counted_dims = ("batch", "experts")
    return [
        f"{d}:{axis}" for d, axis in rules.items() if d not in counted_dims and (d in _UNCOUNTED_DIMS or axis == batch)
    ]


def _slots(model: keras.Model, optimizer: keras.Optimizer) -> dict[int, int]:
    for variable in model.trainable_variables:
        keras_internals.set_layout(variable, variable)  # Keras passes the layout to optimizer variables
    owners = [
        keras_internals.layout_of(slot) for slot in keras_internals.abstract_slots(optimizer, model.trainable_variables)
    ]
    return dict(collections.Counter(id(variable) for variable in owners if variable is not None))


def _layers_of(model: keras.Model) -> tuple[list[keras.Layer], list[str]]:
    """Returns the layers whose inputs and outputs have known shapes, and the paths of layers that are not counted.

    The projections of an attention layer are counted with it. Layers of a nested model are not counted, because their
    tensors do not belong to the outer model.
    """
    layers = [layer for layer in keras_internals.layers_of(model) if layer.variables or layer in model.layers]
    top_level_layers = [layer for layer in model.layers if not isinstance(layer, keras.Model)]
    known_layers = [layer for layer in layers if layer in top_level_layers and keras_internals.has_shapes(layer)]
    attentions = [layer for layer in known_layers if isinstance(layer, ATTENTIONS)]
    counted_ids = {id(x) for x in known_layers} | {
        id(part) for x in attentions for part in keras_internals.layers_of(x)
    }
    return known_layers, [keras_internals.path_of(layer) for layer in layers if id(layer) not in counted_ids]
