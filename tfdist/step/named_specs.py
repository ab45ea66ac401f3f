"""Stable names of the tensors that replicas reduce, to which states, rules and measurements refer."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.tensor_bytes import tensor_bytes
from tfdist.gradients.sparse import SPARSE_MIN_BYTES
from tfdist.grammar.unique_names import unique_names


def named_specs(variables: Sequence[keras.Variable], *scalars: str) -> list[tf.TensorSpec]:
    """Returns names, shapes and dtypes of what is reduced: a tensor per variable, and scalars of dtype floatx.

    The name of a tensor is the path of its variable. Keras allows several variables to have one path, as in a model that
    contains two models with a layer of the same name: all but the first get a number, as in checkpoints.

    Args:
      variables: variables of a model.
      *scalars: names of the scalars.
    """
    tensors = [(v.path, (v.shape, v.dtype)) for v in variables]
    named = unique_names([*tensors, *((name, ((), keras.config.floatx())) for name in scalars)])
    return [tf.TensorSpec(shape, dtype, name) for name, (shape, dtype) in named.items()]


def sent_as_rows(model: keras.Model) -> frozenset[str]:
    """Returns the names of the gradients of large embedding tables, of which only the used rows may be sent."""
    tables = {id(variable) for variable in keras_internals.embeddings(model)}
    named = zip(named_specs(model.trainable_variables), model.trainable_variables, strict=True)
    return frozenset(
        spec.name for spec, variable in named if id(variable) in tables and tensor_bytes(spec) >= SPARSE_MIN_BYTES
    )
