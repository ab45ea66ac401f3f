"""Layouts of a model's variables on a mesh, from the names of their dims and the rules."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.config.layouts import Placement, Shard, layout_by_rules, shard_placement
from tfdist.config.mesh import Mesh
from tfdist.errors import InputError
from tfdist.keras_internals import UninitializedVariable, layers_of, layout_of

# Names of the dims of a model's variables, from the types of its layers and from a table in the model's code.
# The rules of a layout refer to dim names, so only variables whose dims have names can be sharded by rules. Variables of Keras
# layers get names from the layers' types; `name_dims` overrides them where a dim has a special meaning in a model (the `out`
# of a perceptron's first layer is its `ffn`).

Dims = tuple[str | None, ...]  # None for a dim that is replicated in every layout

_PROJECTION = {"kernel": ("embed", "heads", "head_dim"), "bias": ("heads", "head_dim")}
_ATTENTION = {
    "query": _PROJECTION,
    "key": _PROJECTION,
    "value": _PROJECTION,
    "gate": _PROJECTION,
    "attention_output": {"kernel": ("heads", "head_dim", "embed"), "bias": ("embed",)},
}
ATTENTIONS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_CONVOLUTIONS = tuple(getattr(keras.layers, f"Conv{n}D{kind}") for n in (1, 2, 3) for kind in ("", "Transpose"))
_BY_CHANNEL = tuple(getattr(keras.layers, f"{kind}Conv{n}D") for n in (1, 2) for kind in ("Depthwise", "Separable"))
CONVOLUTIONS = (*_CONVOLUTIONS, *_BY_CHANNEL)
_NORMS = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
)


def parse_dims(text: str) -> Dims:
    """Parses space-separated names, such as "embed ffn"; * is a dim without a name."""
    return tuple(None if name == "*" else name for name in text.split())


def name_dims(model: keras.Model, table: Mapping[str, str]) -> keras.Model:
    """Names dims of a model's variables, for `--layout`; has no effect without a mesh.

    Must be called inside the strategy's scope, where the model is built: variables are laid out at the end of the
    scope.

    Args:
      model: a built model.
      table: by regular expression, which must match a variable's whole path, space-separated dims such as "embed ffn";
        * is a dim without a name. Takes precedence over the names from layer types.

    Returns:
      The model.

    Raises:
      InputError: an expression is invalid, matches no variable, or has another number of dims than the variable; or two
        expressions name the dims of one variable differently.
    """
    named: dict[str, tuple[str, Dims]] = {}
    for expression, text in table.items():
        dims = parse_dims(text)
        for variable in _matched(model, expression):
            if len(dims) != len(variable.shape):
                raise InputError(
                    f"tfdist.name_dims: {expression!r} gives {len(dims)} dims to {variable.path}, which has "
                    f"{len(variable.shape)}. Received: {text!r}."
                )
            other, other_dims = named.setdefault(variable.path, (expression, dims))
            if other_dims != dims:
                raise InputError(
                    f"tfdist.name_dims: {other!r} and {expression!r} disagree about {variable.path}. Keep one of them."
                )
            if keras_internals.layout_of(variable) is not None and getattr(variable, "tfdist_dims", None) != dims:
                raise InputError(
                    f"tfdist.name_dims must come before variables are laid out. Received: {variable.path}, which "
                    "already is. Call it inside the strategy's scope, right after the model is created; its layers need "
                    "a `build` method."
                )
            variable.tfdist_dims = dims
    return model


def dims_of(variable: keras.Variable, owners: Sequence[Any] = ()) -> Dims:
    """Returns the dim names of a variable, one per dim; None for dims named neither by a table nor by the layer's type.

    Args:
      variable: a variable of a layer, or any other.
      owners: layers in whose methods it was created, the innermost last.
    """
    named = getattr(variable, "tfdist_dims", None)
    dims = named or (_by_type(owners, variable.name, len(variable.shape)) if owners else None)
    return dims if dims and len(dims) == len(variable.shape) else (None,) * len(variable.shape)


def _matched(model: keras.Model, expression: str) -> list[keras.Variable]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise InputError(f"tfdist.name_dims: {expression!r} is not a regular expression: {error}.") from error
    matched = [variable for variable in model.variables if pattern.fullmatch(variable.path)]
    if not matched:
        paths = ", ".join(variable.path for variable in model.variables[:3])
        raise InputError(
            f"tfdist.name_dims: {expression!r} matches no variable; it must match the whole path. Received: variables "
            f"such as {paths}. Prefix it with .* to match any beginning of a path."
        )
    return matched


def _by_type(owners: Sequence[Any], name: str, rank: int) -> Dims | None:
    """Returns the dim names of a layer's variable `name`, by the type of the layer."""
    layer = owners[-1]
    if isinstance(layer, keras.layers.EinsumDense) and any(isinstance(owner, ATTENTIONS) for owner in owners):
        return _ATTENTION.get(layer.name, {}).get(name)
    if isinstance(layer, keras.layers.Dense):
        return {"kernel": ("in", "out"), "bias": ("out",)}.get(name)
    if isinstance(layer, keras.layers.Embedding):
        return {"embeddings": ("vocab", "embed")}.get(name)
    if isinstance(layer, CONVOLUTIONS):
        spatial = tuple(f"spatial_{i}" for i in range(rank - 2))
        channels = ("out", "in") if "Transpose" in type(layer).__name__ else ("in", "out")
        kernels = dict.fromkeys(("kernel", "depthwise_kernel", "pointwise_kernel"), (*spatial, *channels))
        return {**kernels, "bias": ("out",)}.get(name)
    if isinstance(layer, _NORMS) and rank == 1:
        return ("embed",)
    return None


def dims_of_uninitialized(uninitialized: UninitializedVariable) -> Dims:
    """Returns a variable's dim names, from the model's table or the type of the layer that creates it."""
    return dims_of(uninitialized.variable, uninitialized.owners)


def placement(uninitialized: UninitializedVariable, rules: Mapping[str, str], mesh: Mesh, shard: Shard) -> Placement:
    """Returns the placement of a variable; for optimizer state, the layout of its variable's `slots`.

    Raises:
      InputError: the rules cannot be applied to it.
    """
    variable = uninitialized.variable
    layout_of_model_variable = layout_of(variable)
    if layout_of_model_variable is not None:
        return Placement.same(layout_of_model_variable.slots)
    dims = dims_of_uninitialized(uninitialized)
    split = next((dim for dim in dims if dim and mesh.splits(rules.get(dim))), None)
    if split and len(dims) > 2 and uninitialized.owners and isinstance(uninitialized.owners[-1], CONVOLUTIONS):
        raise InputError(
            f"--layout shards {split} of {variable.path} over the axis {rules[split]}; the engine cannot shard kernels "
            "of convolutions. Name its dims, and its bias's, * with tfdist.name_dims, or leave out the rule."
        )
    computed = layout_by_rules(variable.path, dims, variable.shape, rules, mesh)
    return shard_placement(computed, variable.shape, mesh, shard if variable.trainable else Shard())


def is_gathered_in_turn(uninitialized: UninitializedVariable) -> bool:
    """Returns whether a layer gathers its sharded variable in its own call, forward and backward, and drops it afterwards.

    Exceptions are cells of recurrent layers, which are called for each token; layers that contain layers, which would be
    recomputed; and embeddings, whose gradient does not need the table, so that TensorFlow itself drops it after the
    lookup.
    """
    owner = uninitialized.owners[-1] if uninitialized.owners else None
    is_exempt = hasattr(owner, "state_size") or type(owner) is keras.layers.Embedding
    return isinstance(owner, keras.Layer) and not is_exempt and not layers_of(owner)
