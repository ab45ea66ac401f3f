"""Estimates the communication of a step on a mesh."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import keras

from tfdist import keras_internals
from tfdist.layers import MixtureOfExperts
from tfdist.planner.activations import Activation, Activations, first
from tfdist.sharding.dim_names import ATTENTIONS
from tfdist.sharding.layouts import Layout, Shard
from tfdist.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Sent:
    """One collective of a step, or several of one kind that the engine combines.

    Attributes:
      what: purpose.
      kind: operation.
      axis: axis along which devices communicate; several are joined by &.
      bytes: bytes of a device's tensor.
    """

    what: str
    kind: str
    axis: str
    bytes: int


_KEYS = ("key", "value")  # projections in Keras's attention layers


def between_layers(
    model: keras.Model, layers: Sequence[keras.Layer], held: Activations, mesh: Mesh, rules: Mapping[str, str]
) -> Iterator[Sent]:
    """Yields the communication of the layers in a forward and a backward pass."""
    batch = rules["batch"]
    given = _without_gradients(model, layers)
    yield from _gradients_of_lookups(layers, held)
    for layer in layers:
        is_learned = any(id(tensor) not in given for tensor in keras.tree.flatten(layer.input))
        if isinstance(layer, keras.layers.Embedding):
            yield from _lookup(layer, held, mesh)
        elif isinstance(layer, ATTENTIONS):
            yield from _attention(layer, held, mesh, rules, given)
        elif isinstance(layer, MixtureOfExperts):
            yield from _experts(layer, held, mesh, batch)
        elif isinstance(layer, keras.layers.Dense):
            yield from _dense(layer, held, mesh, batch, is_learned)
        elif isinstance(layer, keras.layers.BatchNormalization) and mesh.splits(batch):
            size = keras_internals.bytes_of(layer.moving_mean)
            yield Sent(f"moments of {layer.path}, and their gradients", "all-reduce", batch, 2 * size)
        elif getattr(layer, "tfdist_dims", None):
            yield from _constraint(layer, held, is_learned)
    for output in keras.tree.flatten(model.outputs):
        for axis in held.of(output).axes[1:]:
            if axis:
                rows = (held.of(output).axes[0], *[None] * (len(output.shape) - 1))
                yield Sent("outputs, for the loss", "all-gather", axis, held.bytes_with(output, rows))


def unclear(layers: Sequence[keras.Layer], held: Activations, mesh: Mesh, rules: Mapping[str, str]) -> Iterator[str]:
    """Yields the paths of layers whose layout is chosen by the engine.

    These are dense layers whose kernel is sharded along its inputs while their input is replicated, attention with a
    sharded context and a replicated input, constraints that move an axis to another dim, LoRA, and other layers with a
    sharded input and an output whose layout is not fully known.
    """
    context = rules.get("context")
    for layer in layers:
        if not keras.tree.flatten(layer.input):
            continue
        asks = isinstance(layer, ATTENTIONS) and mesh.splits(context)
        if _is_unclear(layer, held, mesh) or (asks and context not in held.of(layer.input).sequence_axes):
            yield keras_internals.path_of(layer)


def _is_unclear(layer: keras.Layer, held: Activations, mesh: Mesh) -> bool:
    given, made = held.of(layer.input).axes, held.of(layer.output).axes
    if getattr(layer, "lora_enabled", False):
        return True
    if isinstance(layer, keras.layers.Dense):
        rows = keras_internals.layout_of(keras_internals.kernel_of(layer)).computed.axes[0]
        return mesh.splits(rows) and given[-1] != rows
    if hasattr(layer, "tfdist_dims"):
        return any(axis and axis in made and made.index(axis) != i for i, axis in enumerate(given))
    is_known = isinstance(layer, (keras.layers.Embedding, MixtureOfExperts, *ATTENTIONS))
    return not is_known and any(axis and axis not in made for axis in given[1:])


def of_gradients(
    layers: Sequence[keras.Layer],
    held: Activations,
    mesh: Mesh,
    batch_axis: str,
    sizes: Mapping[int, int],
    shard: Shard,
) -> Iterator[Sent]:
    """Yields the sums of gradients over axes along which their layers have different rows or parts of a sequence.

    Args:
      layers: layers with known inputs.
      held: activations of these layers.
      mesh: mesh with its axes.
      batch_axis: axis over which the gradients of all variables are summed.
      sizes: by id of each trainable variable, bytes per device in the layout of its computation.
      shard: sharding of the state; sharded gradients are not combined, as that would require all of them at the same
        time.
    """
    summed: dict[tuple[str, ...], int] = collections.Counter()
    axes_of: dict[int, list[str]] = {}
    constrained = {id(first(layer.input)): held.of(layer.output) for layer in layers if hasattr(layer, "tfdist_dims")}
    for layer in (layer for layer in layers if layer.variables):
        for variable in layer.variables:
            axes_of.setdefault(id(variable), _axes_of_tokens(layer, held.of(layer.input)))
        behind = constrained.get(id(layer.output))
        # It is added in the layout of the output.
        if behind and isinstance(layer, keras.layers.Dense) and layer.use_bias:
            axes_of[id(layer.bias)] = list(dict.fromkeys([*axes_of[id(layer.bias)], *behind.sequence_axes]))
    for variable, size in sizes.items():
        over = dict.fromkeys([batch_axis, *axes_of.get(variable, [])])
        summed[tuple(axis for axis in over if mesh.splits(axis))] += size
    for axes, total in summed.items():
        if axes:
            how = "together" if shard.sums_together else "one by one"
            yield Sent(f"gradients, {how}", "all-reduce", "&".join(axes), total)


def _axes_of_tokens(layer: keras.Layer, given: Activation) -> list[str]:
    """Returns the axes besides that of rows over which devices have different tokens and gather nothing."""
    return [] if isinstance(layer, MixtureOfExperts | keras.layers.Embedding) else given.sequence_axes


def _without_gradients(model: keras.Model, layers: Sequence[keras.Layer]) -> set[int]:
    """Returns the ids of tensors that are known not to depend on trainable weights."""
    found = {id(tensor) for tensor in keras.tree.flatten(model.inputs)}
    for layer in layers:
        given = keras.tree.flatten(layer.input)
        if not layer.trainable_variables and all(id(tensor) in found for tensor in given):
            found |= {id(tensor) for tensor in keras.tree.flatten(layer.output)}
    return found


def _dense(layer: keras.layers.Dense, held: Activations, mesh: Mesh, batch: str, is_learned: bool) -> Iterator[Sent]:
    """Yields partial sums over a sharded contracted dim (Megatron's f and g)."""
    rows, columns = (
        axis if axis != batch and mesh.splits(axis) else None
        for axis in keras_internals.layout_of(keras_internals.kernel_of(layer)).computed.axes
    )
    given, whole = held.of(layer.input), first(layer.input)
    if given.axes[-1] and columns == given.axes[-1] and rows != columns:
        yield Sent(f"input of {layer.path}", "all-gather", columns, held.bytes_with(whole, (*given.axes[:-1], None)))
    elif axis := rows or given.axes[-1]:
        yield Sent(f"output of {layer.path}", "all-reduce", axis, held.of(layer.output).bytes)
    if columns and is_learned:
        gradient = held.bytes_with(whole, (*given.axes[:-1], rows))
        yield Sent(f"gradient of the input of {layer.path}", "all-reduce", columns, gradient)


def _attention(
    layer: keras.Layer, held: Activations, mesh: Mesh, rules: Mapping[str, str], without_gradients: set[int]
) -> Iterator[Sent]:
    heads, tensors = rules.get("heads"), {id(tensor): tensor for tensor in keras.tree.flatten(layer.input)}
    if heads != rules["batch"] and mesh.splits(heads):
        yield Sent(f"output of {layer.path}", "all-reduce", heads, held.of(layer.output).bytes)
        for tensor in (tensor for key, tensor in tensors.items() if key not in without_gradients):
            yield Sent(f"gradient of the input of {layer.path}", "all-reduce", heads, held.of(tensor).bytes)
    keys = list(tensors.values())[-1]
    lies = held.of(keys)
    context = rules.get("context", rules["batch"])
    split = [*lies.sequence_axes, *([context] if context != rules["batch"] and mesh.splits(context) else [])]
    for axis in dict.fromkeys(split):
        tokens = held.bytes_with(keys, (lies.axes[0], *[None] * (len(lies.axes) - 1))) // keys.shape[-1]
        kernels = [keras_internals.kernel_of(x) for x in keras_internals.layers_of(layer) if x.name in _KEYS]
        repeats = getattr(layer, "num_repeats", 1)  # grouped queries share keys, which Keras repeats before attention
        size = tokens * repeats * sum(_width(kernel, mesh) for kernel in kernels)
        yield Sent(f"keys and values of {layer.path}", "all-gather", axis, size)
        yield Sent(f"gradients of keys and values of {layer.path}", "all-reduce", axis, size)


def _experts(layer: MixtureOfExperts, held: Activations, mesh: Mesh, batch: str) -> Iterator[Sent]:
    """Yields the exchange of tokens with experts, and gradients; or partial sums if each device has all tokens."""
    given, source = held.of(layer.input), first(layer.input)
    whole = held.bytes_with(source, (given.axes[0], None, None))
    if mesh.splits(batch):
        yield Sent(f"load of {layer.path}", "all-reduce", batch, keras_internals.bytes_of(layer.load.tokens))
    for sequence in given.sequence_axes:
        yield Sent(f"tokens of {layer.path}", "all-gather", sequence, whole)
    size = whole // source.shape[1] * layer.experts * layer.capacity(source.shape[1], training=True)
    experts, _, width = keras_internals.layout_of(layer.in_kernel).computed.axes
    parts = mesh.axes[experts] if experts else 1
    if mesh.splits(width):
        own = size if experts == batch else size // parts  # of all rows, or those of the device
        yield Sent(f"sums of the experts' products of {layer.path}, and gradients", "all-reduce", width, 2 * own)
    if parts > 1 and experts == batch:
        gathers = any(keras_internals.layout_of(variable).is_gathered for variable in layer.trainable_variables)
        times = 3 if gathers else 2  # such a layer is recomputed in the backward pass
        for what in ("tokens to the experts", "tokens from the experts"):
            yield Sent(f"{what} of {layer.path}, and their gradients", "all-to-all", experts, times * size)
    elif parts > 1:
        yield Sent(f"output of {layer.path}, and gradients of its tokens", "all-reduce", experts, 2 * whole)
        weights = whole // source.shape[2] * layer.experts
        yield Sent(f"gradients of the weights of tokens of {layer.path}", "all-gather", experts, weights)


def _width(kernel: keras.Variable, mesh: Mesh) -> int:
    """Returns the numbers per token and device after a projection [embed, heads, head_dim]."""
    parts = Layout((None, *keras_internals.layout_of(kernel).computed.axes[1:])).parts(mesh)
    return kernel.shape[1] * kernel.shape[2] // parts


def _constraint(layer: keras.Layer, held: Activations, is_learned: bool) -> Iterator[Sent]:
    """Yields a gather for each axis that a constraint removes and, for the gradient, for each axis that it adds."""
    before, after = held.of(layer.input), held.of(layer.output)
    tensor = first(layer.input)
    for i, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)):
        if old and old != new:
            rest = (*before.axes[:i], None, *before.axes[i + 1 :])
            yield Sent(f"tensor in {layer.name}", "all-gather", old, held.bytes_with(tensor, rest))
        if new and old != new and is_learned and keras.backend.is_float_dtype(tensor.dtype):
            rest = (*after.axes[:i], None, *after.axes[i + 1 :])
            yield Sent(f"gradient in {layer.name}", "all-gather", new, held.bytes_with(tensor, rest))


def _gradients_of_lookups(layers: Sequence[keras.Layer], held: Activations) -> Iterator[Sent]:
    """Yields the gathers by which DTensor sums the gradient of a table; one for several tables whose rows are added."""
    sums = [layer for layer in layers if isinstance(layer, keras.layers.Add)]
    added = {id(term): layer for layer in sums for term in keras.tree.flatten(layer.input)}
    reported = set()
    for layer in (layer for layer in layers if isinstance(layer, keras.layers.Embedding) and layer.trainable_variables):
        given = added.get(id(layer.output), layer)
        rows = held.of(layer.output).axes[:1]
        for axis in held.of(layer.input).axes[1:]:
            if axis and (id(given), axis) not in reported:
                reported.add((id(given), axis))
                size = held.bytes_with(layer.output, (*rows, *[None] * (len(layer.output.shape) - 1)))
                yield Sent(f"gradient of the output of {keras_internals.path_of(given)}", "all-gather", axis, size)


def _lookup(layer: keras.layers.Embedding, held: Activations, mesh: Mesh) -> Iterator[Sent]:
    """Yields the gathers for lookups: DTensor needs the full table, and tokens that are sharded along rows only."""
    tokens = held.of(layer.input)
    for axis in tokens.axes[1:]:
        if axis:
            size = held.bytes_with(first(layer.input), tokens.axes[:1])
            yield Sent(f"tokens of {layer.path}", "all-gather", axis, size)
    variable = keras_internals.kernel_of(layer)
    vocabulary, *others = keras_internals.layout_of(variable).computed.axes
    if mesh.splits(vocabulary):
        whole = Layout((None, *others)).parts(mesh)
        yield Sent(f"table of {layer.path}", "all-gather", vocabulary, keras_internals.bytes_of(variable) // whole)
