"""Layouts of a model's variables on a mesh, from the names of their dims and the rules."""

from collections.abc import Mapping

import keras

from tfdist.errors import InputError
from tfdist.keras_internals import UninitializedVariable, layers_of, layout_of
from tfdist.sharding.dim_names import CONVOLUTIONS, Dims, dims_of
from tfdist.sharding.layouts import Placement, Shard, laid_out, placed
from tfdist.sharding.mesh import Mesh


def dims_of_uninitialized(uninitialized: UninitializedVariable) -> Dims:
    """Returns a variable's dim names, from the model's table or the type of the layer that creates it."""
    return dims_of(uninitialized.variable, uninitialized.owners)


def placement(uninitialized: UninitializedVariable, rules: Mapping[str, str], mesh: Mesh, shard: Shard) -> Placement:
    """Returns the placement of a variable; for optimizer state, the layout of its variable's `slots`.

    Raises:
      InputError: the rules cannot be applied to it.
    """
    variable = uninitialized.variable
    of_its_variable = layout_of(variable)
    if of_its_variable is not None:
        return Placement.same(of_its_variable.slots)
    dims = dims_of_uninitialized(uninitialized)
    split = next((dim for dim in dims if dim and mesh.splits(rules.get(dim))), None)
    if split and len(dims) > 2 and uninitialized.owners and isinstance(uninitialized.owners[-1], CONVOLUTIONS):
        raise InputError(
            f"--layout shards {split} of {variable.path} over the axis {rules[split]}; the engine cannot shard kernels "
            "of convolutions. Name its dims, and its bias's, * with tfdist.name_dims, or leave out the rule."
        )
    computed = laid_out(variable.path, dims, variable.shape, rules, mesh)
    return placed(computed, variable.shape, mesh, shard if variable.trainable else Shard())


def is_gathered_in_turn(uninitialized: UninitializedVariable) -> bool:
    """Returns whether a layer gathers its sharded variable in its own call, forward and backward, and drops it.

    Excluded are cells of recurrent layers, which are called for each token; layers that contain layers, which would be
    recomputed; and embeddings, whose gradient does not need the table, so that TensorFlow itself drops it after the
    lookup.
    """
    owner = uninitialized.owners[-1] if uninitialized.owners else None
    is_exempt = hasattr(owner, "state_size") or type(owner) is keras.layers.Embedding
    return isinstance(owner, keras.Layer) and not is_exempt and not layers_of(owner)
