"""Sharding constraints: layouts of activations inside a model, by the names of dims."""

import keras
import tensorflow as tf

from tfdist.distribution.strategy import strategy_in_use
from tfdist.distribution.variable_layouts import Dims, parse_dims
from tfdist.errors import InputError


def constrain(x: tf.Tensor | keras.KerasTensor, dims: str, name: str | None = None) -> tf.Tensor | keras.KerasTensor:
    """Lays out a tensor of a model by the rules of `--layout` for its dims; the identity if there is no mesh.

    Without a constraint, the engine derives layouts of activations from the layouts of weights. A constraint fixes a layout:
    for example, the tensor between two blocks is sharded over the sequence, or the next layer receives it replicated. The
    gradient has the layout of the input tensor. Cost: the communication between the two layouts, if they differ.

    In a functional model, the constraint is a `keras.layers.Identity` and is saved as such: a model loaded from a file has
    no constraints. If the axis does not divide the rows, as in the last batch of an evaluation, they are replicated.

    Args:
      x: [...]; an activation, inside a layer's `call` or while a functional model is built.
      dims: space-separated names of the dims, such as "batch sequence embed"; * is a replicated dim, and a name
        followed by ?, as in "experts? batch", is replicated if another dim is sharded over its axis.
      name: name of the layer in a functional model.

    Returns:
      The tensor in this layout.

    Raises:
      InputError: the number of names is wrong, two dims map to one axis, or an axis does not divide its dim.
    """
    names = parse_dims(dims)
    if len(names) != len(x.shape):
        raise InputError(
            f"tfdist.constrain must name each dim of a tensor. Received: {dims!r} for a tensor of the shape {tuple(x.shape)}. "
            "Give each dim a name, or * if it is not sharded."
        )
    if not isinstance(x, keras.KerasTensor):
        return _constrain(x, names, name or "a tensor")
    layer = keras.layers.Identity(name=name, dtype=x.dtype)  # must not cast to the model's precision
    layer.tfdist_dims = names
    layer.call = lambda inputs: _constrain(inputs, names, layer.name)
    _constrain(x, names, layer.name)  # validates here, where the traceback shows the user's line
    return layer(x)


def _constrain(x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
    strategy = strategy_in_use()
    return x if strategy is None else strategy.layouts.constrain(x, dims, name)
