"""Sharding constraints, which fix the layouts of activations inside a model by the names of dims."""

import keras
import tensorflow as tf

from tfdist.distribution.strategy import strategy_in_use
from tfdist.distribution.variable_layouts import Dims, parse_dims
from tfdist.errors import InputError


def constrain(x: tf.Tensor | keras.KerasTensor, dims: str, name: str | None = None) -> tf.Tensor | keras.KerasTensor:
    """Lays out a tensor of a model by the rules of `--layout` for its dims; returns it unchanged if there is no mesh.

    Without a constraint, the engine derives the layouts of activations from the layouts of weights. A constraint fixes a
    layout, for example so that the tensor between two blocks is sharded along the sequence, or so that the next layer
    receives it replicated. The gradient has the layout of `x`. Cost: communication between the two layouts, if they differ.

    In a functional model, the constraint is a `keras.layers.Identity` and is saved as such, so a model loaded from a file
    has no constraints. If the number of rows is not divisible by the size of the axis, as in the last batch of an
    evaluation, the rows are replicated.

    Args:
      x: [...]; an activation, inside a layer's `call` or while a functional model is built.
      dims: space-separated names of the dims, such as "batch sequence embed"; * is a replicated dim. A dim whose name is
        followed by ?, as in "experts? batch", is replicated if another dim is sharded over its axis.
      name: name of the layer in a functional model.

    Returns:
      The tensor in this layout.

    Raises:
      InputError: the number of names is wrong, two dims map to one axis, or a dim is not divisible by its axis.
    """
    names = parse_dims(dims)
    if len(names) != len(x.shape):
        raise InputError(
            f"tfdist.constrain: `dims` must name each dim of the tensor. Received: {dims!r} for shape {tuple(x.shape)}. Write "
            "a name for each dim, or * if it is not sharded."
        )
    if not isinstance(x, keras.KerasTensor):
        return _constrain(x, names, name or "a tensor")
    layer = keras.layers.Identity(name=name, dtype=x.dtype)  # the dtype prevents a cast to the model's precision
    layer.tfdist_dims = names
    layer.call = lambda inputs: _constrain(inputs, names, layer.name)
    _constrain(x, names, layer.name)  # validates here, where the traceback shows the user's line
    return layer(x)


def _constrain(x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
    strategy = strategy_in_use()
    return x if strategy is None else strategy.layouts.constrain(x, dims, name)
