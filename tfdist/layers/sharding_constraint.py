"""Layouts of activations inside a model, by the names of their dims."""

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import strategy_in_use
from tfdist.errors import InputError
from tfdist.sharding.dim_names import Dims, parse_dims


def constrain(x: tf.Tensor | keras.KerasTensor, dims: str, name: str | None = None) -> tf.Tensor | keras.KerasTensor:
    """Lays a tensor of a model out as the rules of `--layout` say of its dims; the identity under strategies without a mesh.

    Where a model says nothing the engine chooses, from the layouts of the weights. A constraint decides it: that the
    tensor between two blocks is split over the sequence, or that the next layer gets it whole. Its gradient lies as the
    tensor that came in. Cost: what has to be sent if the layouts differ, else nothing.

    In a functional model it is a `keras.layers.Identity`, and is saved as one: a model that is loaded from a file has no
    constraints. Rows that their axis does not divide, as in the last batch of an evaluation, stay whole.

    Args:
      x: [...]; an activation, inside a layer's `call` or while a functional model is made.
      dims: the name of each dim, with spaces between, such as "batch sequence embed"; a * is a dim that is whole,
        and one with a ?, as "experts? batch", is whole where another lies on its axis.
      name: of the layer in a functional model.

    Returns:
      The same tensor, laid out.

    Raises:
      InputError: the tensor has another number of dims, two of them lie on one axis, or an axis does not divide its dim.
    """
    names = parse_dims(dims)
    if len(names) != len(x.shape):
        raise InputError(
            f"tfdist.constrain must name each dim of a tensor. Received: {dims!r} for a tensor of the shape {tuple(x.shape)}. "
            "Give each a name, or a * to one that is whole."
        )
    if not isinstance(x, keras.KerasTensor):
        return _laid_out(x, names, name or "a tensor")
    layer = keras.layers.Identity(name=name, dtype=x.dtype)  # it must not cast to the precision of the model
    layer.tfdist_dims = names
    keras_internals.replace_call(layer, lambda inputs: _laid_out(inputs, names, layer.name))
    _laid_out(x, names, layer.name)  # checks it, now that the line is known
    return layer(x)


def _laid_out(x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
    strategy = strategy_in_use()
    return x if strategy is None else strategy.constrain(x, dims, name)
