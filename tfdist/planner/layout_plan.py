"""Plans a layout before anything runs: bytes of state per device, and the communication of a step."""

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import keras

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.planner.activations import Activations
from tfdist.planner.communication import Sent, between_layers, of_gradients, unclear
from tfdist.sharding.dim_names import ATTENTIONS
from tfdist.sharding.layouts import Layout, Placement, Shard
from tfdist.sharding.mesh import Mesh
from tfdist.sharding.variable_layouts import dims_of_uninitialized, is_gathered_in_turn, placement

_MOST_LAYOUTS = 20_000
_UNCOUNTED = ("embed", "head_dim")  # if sharded, operations between layers communicate, too


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan of one variable.

    Attributes:
      path: path of the variable.
      dims: names of its dims, with * for a dim without a name.
      shape: static shape.
      bytes: bytes of the unsharded variable.
      placement: its layouts.
      slots: number of variables of this shape in the optimizer's state.
      trainable: whether it has a gradient.
    """

    path: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    placement: Placement
    slots: int
    trainable: bool

    def on_a_device(self, mesh: Mesh) -> dict[str, int]:
        """Returns the bytes per device of the variable between steps, of its gradient, and of its optimizer state."""

        def part(layout: Layout) -> int:
            return self.bytes // layout.parts(mesh)

        gradient = part(self.placement.gradient) if self.trainable else 0
        return {
            "parameters": part(self.placement.stored),
            "gradients": gradient,
            "slots": self.slots * part(self.placement.slots),
        }

    def is_replicated(self, mesh: Mesh) -> bool:
        """Returns whether nothing of it is sharded."""
        held = (self.placement.stored, self.placement.gradient, *([self.placement.slots] if self.slots else []))
        return all(layout.parts(mesh) == 1 for layout in held)

    def bytes_of_gradient(self, mesh: Mesh, is_table: bool) -> int:
        """Returns the bytes per device of the computed gradient; that of an embedding table has all rows."""
        computed = self.placement.computed
        return self.bytes // (Layout((None, *computed.axes[1:])) if is_table else computed).parts(mesh)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a step; see `AbstractModel.plan`.

    Attributes:
      mesh: mesh with its axes.
      variables: the model's variables.
      sent: communication of a step.
      activations: bytes of the layers' outputs for the rows of one device.
      dims: names of the dims of variables and activations, to which rules may refer.
      unknown: nested layers, whose inputs and outputs have no known shape: their communication and memory are not
        counted.
      unclear: layers whose layout is chosen by the engine: their communication is not completely counted.
    """

    mesh: Mesh
    variables: list[Planned]
    sent: list[Sent]
    activations: int
    dims: frozenset[str]
    unknown: list[str]
    unclear: list[str]

    def totals(self) -> dict[str, int]:
        """Returns the bytes per device."""
        each = [variable.on_a_device(self.mesh) for variable in self.variables]
        found = {kind: sum(one[kind] for one in each) for kind in ("parameters", "gradients", "slots")}
        return {**found, "activations": self.activations}


class AbstractModel:
    """A model with uninitialized variables, to be planned under one or more layouts.

    Attributes:
      model: the model.
      slots: number of variables of the optimizer's state for each variable, by the variable's id.
    """

    def __init__(self, make: Callable[[], tuple[keras.Model, keras.Optimizer]]):
        """Calls `make`, which creates a functional or sequential model, and its optimizer, which is not built."""
        newborns: list[keras_internals.UninitializedVariable] = []
        with keras_internals.deferred_creation(newborns, newborns.append):
            self.model, optimizer = make()
        own = {id(variable) for variable in self.model.variables}
        self._uninitialized = [uninitialized for uninitialized in newborns if id(uninitialized.variable) in own]
        if not self._uninitialized:
            raise InputError(
                f"A plan needs a model whose variables exist when it is created. Received: {self.model.name}, which "
                "has none. Give it an Input."
            )
        self.slots = _slots(self.model, optimizer)
        self._layers, self._unknown = _layers_of(self.model)

    @property
    def variables(self) -> list[keras.Variable]:
        """The model's variables, in the order of those of a `Plan`."""
        return [uninitialized.variable for uninitialized in self._uninitialized]

    @property
    def dims(self) -> list[str]:
        """Names of all dims to which a rule may refer, in the order of the variables."""
        return list(
            dict.fromkeys(
                dim for uninitialized in self._uninitialized for dim in dims_of_uninitialized(uninitialized) if dim
            )
        )

    def plan(self, mesh: Mesh, rules: Mapping[str, str], shard: Shard, batch_size: int) -> Plan:
        """Plans a step.

        Args:
          mesh: mesh with its axes.
          rules: axis by dim, including `batch`.
          shard: sharding of the state.
          batch_size: number of rows of a global batch.

        Raises:
          InputError: a rule cannot be applied.
        """
        variables = [self._planned(uninitialized, mesh, rules, shard) for uninitialized in self._uninitialized]
        names = {
            id(uninitialized.variable): dims_of_uninitialized(uninitialized) for uninitialized in self._uninitialized
        }
        held = Activations(self._layers, names, mesh, rules, batch_size)
        tables = {id(table) for table in keras_internals.embeddings(self.model)}
        computed = {
            id(uninitialized.variable): planned.bytes_of_gradient(mesh, id(uninitialized.variable) in tables)
            for uninitialized, planned in zip(self._uninitialized, variables, strict=True)
            if planned.trainable and rules["batch"] not in planned.placement.computed.axes
        }
        sent = [
            *between_layers(self.model, self._layers, held, mesh, rules),
            *of_gradients(self._layers, held, mesh, rules["batch"], computed, shard),
            *self._of_parts(variables, mesh, shard),
        ]
        activations = sum(held.bytes(layer.output) for layer in self._layers if not held.is_kept(layer))
        attends = {"context"} if any(isinstance(layer, ATTENTIONS) for layer in self._layers) else set()
        dims = frozenset(held.dims | attends | set(self.dims))
        doubtful = list(unclear(self._layers, held, mesh, rules))
        return Plan(mesh, variables, sent, activations, dims, self._unknown, doubtful)

    def _planned(
        self, uninitialized: keras_internals.UninitializedVariable, mesh: Mesh, rules: Mapping[str, str], shard: Shard
    ) -> Planned:
        variable = uninitialized.variable
        keras_internals.set_layout(variable, None)
        place = placement(uninitialized, rules, mesh, shard)
        keras_internals.set_layout(variable, place)
        size = keras_internals.bytes_of(variable)
        dims = tuple(dim or "*" for dim in dims_of_uninitialized(uninitialized))
        slots = self.slots.get(id(variable), 0)
        return Planned(variable.path, dims, tuple(variable.shape), size, place, slots, variable.trainable)

    def _of_parts(self, variables: list[Planned], mesh: Mesh, shard: Shard) -> Iterator[Sent]:
        """Yields the communication of sharded state."""
        twice = {
            uninitialized.variable.path for uninitialized in self._uninitialized if is_gathered_in_turn(uninitialized)
        }
        trainable = [variable for variable in variables if variable.trainable]
        parts = [v for v in trainable if v.placement.is_gathered]
        for what, split in (
            ("updated variables", [v for v in trainable if v.placement.slots != v.placement.stored]),
            ("variables, forward", parts),
            ("variables, backward", [v for v in parts if v.path in twice]),
        ):
            if split:
                total = sum(v.bytes // v.placement.computed.parts(mesh) for v in split)
                yield Sent(what, "all-gather", shard.axis, total)


def cheapest(
    abstract_model: AbstractModel, mesh: Mesh, rules: Mapping[str, str], shard: Shard, batch_size: int, memory: float
) -> tuple[dict[str, str], Plan]:
    """Returns the layout with the least communication that fits into memory.

    Tries all assignments of dims to axes other than the batch's, except dims whose sharding makes more operations
    communicate than layers with weights; see `uncounted`.

    Args:
      abstract_model: the model.
      mesh: mesh with its axes.
      rules: given rules, which are kept, including `batch`.
      shard: sharding of the state.
      batch_size: number of rows of a global batch.
      memory: bytes per device, for state and activations.

    Returns:
      The rules and their plan. Plans with the fewest unclear layers are preferred, then those with the least
        communication, then the least memory, then the fewest rules.

    Raises:
      InputError: there are too many assignments, or none fits.
    """
    free = [dim for dim in abstract_model.dims if dim not in (*rules, *_UNCOUNTED) and not dim.startswith("spatial_")]
    axes = [axis for axis, size in mesh.axes.items() if size > 1 and axis != rules["batch"]]
    if (len(axes) + 1) ** len(free) > _MOST_LAYOUTS:
        raise InputError(
            f"--layout=auto tries every assignment of dims to axes, at most {_MOST_LAYOUTS}. Received: {len(free)} dims "
            f"({', '.join(free)}) and {len(axes)} axes. Give rules for some in --layout, without auto."
        )
    found = []
    for chosen in itertools.product((None, *axes), repeat=len(free)):
        tried = {**rules, **{dim: axis for dim, axis in zip(free, chosen, strict=True) if axis}}
        with contextlib.suppress(InputError):
            plan = abstract_model.plan(mesh, tried, shard, batch_size)
            sent, held = sum(one.bytes for one in plan.sent), sum(plan.totals().values())
            found.append((len(plan.unclear), sent, held, len(tried), tried, plan))
    fitting = [one for one in found if one[2] <= memory]
    if not fitting:
        least = min((one[2] for one in found), default=math.inf)
        raise InputError(
            f"--memory_gb must be enough for at least one layout. Received: {memory / 2**30:g}, with {len(found)} "
            f"layouts of which the smallest takes {least / 2**30:.3g}. Use more devices, --shard, a smaller batch, or "
            "more memory."
        )
    *_, tried, plan = min(fitting, key=lambda one: one[:4])
    return tried, plan


def uncounted(rules: Mapping[str, str]) -> list[str]:
    """Returns the rules whose communication is not completely known: embed, head_dim, and most on the batch's axis."""
    batch = rules["batch"]
    own = ("batch", "experts")
    return [f"{d}:{axis}" for d, axis in rules.items() if d not in own and (d in _UNCOUNTED or axis == batch)]


def _slots(model: keras.Model, optimizer: keras.Optimizer) -> dict[int, int]:
    """Returns the number of optimizer variables for each variable, by the variable's id."""
    for variable in model.trainable_variables:
        keras_internals.set_layout(variable, variable)  # which Keras passes on to its optimizer variables
    kept = [keras_internals.layout_of(slot) for slot in keras_internals.slots_of(optimizer, model.trainable_variables)]
    return dict(collections.Counter(id(variable) for variable in kept if variable is not None))


def _layers_of(model: keras.Model) -> tuple[list[keras.Layer], list[str]]:
    """Returns the layers whose inputs and outputs have known shapes, and the paths of those that are not counted.

    The projections of an attention layer are counted with it. Layers of a nested model are not counted, because their
    tensors are not those of the outer model.
    """
    layers = [layer for layer in keras_internals.layers_of(model) if layer.variables or layer in model.layers]
    own = [layer for layer in model.layers if not isinstance(layer, keras.Model)]
    known = [layer for layer in layers if layer in own and keras_internals.has_shapes(layer)]
    attentions = [layer for layer in known if isinstance(layer, ATTENTIONS)]
    counted = {id(x) for x in known} | {id(part) for x in attentions for part in keras_internals.layers_of(x)}
    return known, [keras_internals.path_of(layer) for layer in layers if id(layer) not in counted]
