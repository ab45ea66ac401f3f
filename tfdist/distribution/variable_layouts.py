"""Derives the layouts of a model's variables on a mesh from the names of their dims and the rules of `--layout`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.config.layouts import Placement, Shard, layout_by_rules, shard_placement
from tfdist.config.mesh import Mesh
from tfdist.errors import InputError
from tfdist.keras_internals import UninitializedVariable, layers_of, layout_of

# The rules of a layout refer to names of dims. The dims of variables of Keras layers get names from the layers' types;
# `name_dims` overrides them for dims with a special meaning in a model, such as `ffn`, the `out` of a perceptron's first layer.

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
_SEPARABLE_CONVOLUTIONS = tuple(
    getattr(keras.layers, f"{kind}Conv{n}D") for n in (1, 2) for kind in ("Depthwise", "Separable")
)
CONVOLUTIONS = (*_CONVOLUTIONS, *_SEPARABLE_CONVOLUTIONS)
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

    Call it inside the strategy's scope, right after the model is built, because variables are laid out at the end of the
    scope.

    Args:
      model: a built model.
      table: space-separated dims, such as "embed ffn", by a regular expression that must match a variable's whole path; * is a
        dim without a name. The table takes precedence over the names from layer types.

    Returns:
      The model.

    Raises:
      InputError: an expression is invalid, matches no variable, or has a different number of dims than a variable; or two
        expressions give different names to the dims of one variable.
    """
    names_by_path: dict[str, tuple[str, Dims]] = {}
    for expression, text in table.items():
        dims = parse_dims(text)
        for variable in _matching_variables(model, expression):
            if len(dims) != len(variable.shape):
                raise InputError(
                    f"tfdist.name_dims: {expression!r} names {len(dims)} dims of {variable.path}, which has "
                    f"{len(variable.shape)}. Received: {text!r}."
                )
            previous, previous_dims = names_by_path.setdefault(variable.path, (expression, dims))
            if previous_dims != dims:
                raise InputError(
                    f"tfdist.name_dims: {previous!r} and {expression!r} disagree about {variable.path}. Keep one of them."
                )
            if keras_internals.layout_of(variable) is not None and getattr(variable, "tfdist_dims", None) != dims:
                raise InputError(
                    f"tfdist.name_dims must be called before variables are laid out. Received: {variable.path}, which "
                    "already is. Call it inside the strategy's scope, right after the model is created; its layers need "
                    "a `build` method."
                )
            variable.tfdist_dims = dims
    return model


def dims_of(variable: keras.Variable, owners: Sequence[Any] = ()) -> Dims:
    """Returns the name of each dim of a variable; None for a dim without a name from a table or from the layer's type.

    Args:
      variable: any variable.
      owners: layers in whose methods it was created, the innermost last.
    """
    table_dims = getattr(variable, "tfdist_dims", None)
    dims = table_dims or (_default_dims(owners, variable.name, len(variable.shape)) if owners else None)
    return dims if dims and len(dims) == len(variable.shape) else (None,) * len(variable.shape)


def _matching_variables(model: keras.Model, expression: str) -> list[keras.Variable]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise InputError(f"tfdist.name_dims: {expression!r} is not a regular expression: {error}.") from error
    variables = [variable for variable in model.variables if pattern.fullmatch(variable.path)]
    if not variables:
        paths = ", ".join(variable.path for variable in model.variables[:3])
        raise InputError(
            f"tfdist.name_dims: {expression!r} matches no variable; it must match the whole path. Received: variables "
            f"such as {paths}. Prefix it with .* to match any beginning of a path."
        )
    return variables


def _default_dims(owners: Sequence[Any], name: str, rank: int) -> Dims | None:
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
    """Returns the dim names of a variable that is being created."""
    return dims_of(uninitialized.variable, uninitialized.owners)


def placement(uninitialized: UninitializedVariable, rules: Mapping[str, str], mesh: Mesh, shard: Shard) -> Placement:
    """Returns the placement of a variable; for optimizer state, the layout `slots` of the model variable.

    Raises:
      InputError: the rules cannot be applied to the variable.
    """
    variable = uninitialized.variable
    model_placement = layout_of(variable)
    if model_placement is not None:
        return Placement.uniform(model_placement.slots)
    dims = dims_of_uninitialized(uninitialized)
    split_dim = next((dim for dim in dims if dim and mesh.splits(rules.get(dim))), None)
    if split_dim and len(dims) > 2 and uninitialized.owners and isinstance(uninitialized.owners[-1], CONVOLUTIONS):
        raise InputError(
            f"--layout shards {split_dim} of {variable.path} over the axis {rules[split_dim]}; the engine cannot shard kernels "
            "of convolutions. Use * for its dims and those of its bias in tfdist.name_dims, or remove the rule."
        )
    layout = layout_by_rules(variable.path, dims, variable.shape, rules, mesh)
    return shard_placement(layout, variable.shape, mesh, shard if variable.trainable else Shard())


def is_gathered_per_call(uninitialized: UninitializedVariable) -> bool:
    """Returns whether a layer gathers its sharded variable in each call, forward and backward, and then frees it.

    The exceptions are cells of recurrent layers, which are called for each token; layers that contain layers, which would
    be recomputed; and embeddings, whose gradient does not need the table: TensorFlow frees it after the lookup.
    """
    owner = uninitialized.owners[-1] if uninitialized.owners else None
    is_exempt = hasattr(owner, "state_size") or type(owner) is keras.layers.Embedding
    return isinstance(owner, keras.Layer) and not is_exempt and not layers_of(owner)
