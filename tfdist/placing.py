"""Where the variables of a model lie on a mesh: the names of their dims, and the rules."""

from collections.abc import Mapping

from tfdist.dims import Dims, dims_of
from tfdist.keras_internals import Newborn, layout_of
from tfdist.layouts import Placement, Shard, laid_out, placed
from tfdist.mesh import Mesh


def dims_of_newborn(newborn: Newborn) -> Dims:
    """The names of a variable's dims, by the model's table or by the type of the layer that makes it."""
    return dims_of(newborn.variable, newborn.owners)


def placement(newborn: Newborn, rules: Mapping[str, str], mesh: Mesh, shard: Shard) -> Placement:
    """Where a variable belongs; an optimizer's slot, where its variable's slots do.

    Raises:
      InputError: the rules cannot be applied to it.
    """
    variable = newborn.variable
    of_its_variable = layout_of(variable)
    if of_its_variable is not None:
        return Placement.same(of_its_variable.slots)
    computed = laid_out(variable.path, dims_of_newborn(newborn), variable.shape, rules, mesh)
    return placed(computed, variable.shape, mesh, shard if variable.trainable else Shard())
