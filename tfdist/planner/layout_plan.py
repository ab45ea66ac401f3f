"""What a layout means for each device, before anything runs: bytes of state, and what a step sends between devices."""

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
from tfdist.sharding.variable_layouts import dims_of_newborn, is_gathered_in_turn, placement

_MOST_LAYOUTS = 20_000
_UNCOUNTED = ("embed", "head_dim")  # split, they make operations between layers communicate


@dataclasses.dataclass(frozen=True)
class Planned:
    """One variable.

    Attributes:
      path: of the model's variable.
      dims: their names, with a * for one without.
      shape: static sizes.
      bytes: of the whole variable.
      placement: where it lies.
      slots: how many variables of its shape the optimizer keeps for it.
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
        """Bytes of the variable between steps, of its gradient, and of its slots."""

        def part(layout: Layout) -> int:
            return self.bytes // layout.parts(mesh)

        gradient = part(self.placement.gradient) if self.trainable else 0
        return {
            "parameters": part(self.placement.stored),
            "gradients": gradient,
            "slots": self.slots * part(self.placement.slots),
        }

    def is_whole(self, mesh: Mesh) -> bool:
        """Whether nothing of it lies in parts."""
        held = (self.placement.stored, self.placement.gradient, *([self.placement.slots] if self.slots else []))
        return all(layout.parts(mesh) == 1 for layout in held)

    def bytes_of_gradient(self, mesh: Mesh, is_table: bool) -> int:
        """Of a device when it is computed; that of a table that is looked up in has all rows."""
        computed = self.placement.computed
        return self.bytes // (Layout((None, *computed.axes[1:])) if is_table else computed).parts(mesh)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All of it; see `AbstractModel.plan`.

    Attributes:
      mesh: its axes.
      variables: of the model.
      sent: by a step.
      activations: bytes of the layers' outputs for a device's rows.
      dims: the names of dims of variables and activations, of which a rule may speak.
      unknown: layers inside others, whose inputs and outputs have no known shape: what they send and hold is not counted.
      unclear: layers that the engine lays out by its own lights: what they send is not all counted.
    """

    mesh: Mesh
    variables: list[Planned]
    sent: list[Sent]
    activations: int
    dims: frozenset[str]
    unknown: list[str]
    unclear: list[str]

    def totals(self) -> dict[str, int]:
        """Bytes on each device."""
        each = [variable.on_a_device(self.mesh) for variable in self.variables]
        found = {kind: sum(one[kind] for one in each) for kind in ("parameters", "gradients", "slots")}
        return {**found, "activations": self.activations}


class AbstractModel:
    """A model whose variables have no values yet, to be planned under one layout or many."""

    def __init__(self, make: Callable[[], tuple[keras.Model, keras.Optimizer]]):
        """Args: make: makes a functional or sequential model, and its optimizer, which is not built."""
        newborns: list[keras_internals.UninitializedVariable] = []
        with keras_internals.births_deferred(newborns, newborns.append):
            self.model, optimizer = make()
        own = {id(variable) for variable in self.model.variables}
        self._newborns = [uninitialized for uninitialized in newborns if id(uninitialized.variable) in own]
        if not self._newborns:
            raise InputError(
                f"A plan needs a model that has its variables when it is made. Received: {self.model.name}, which has none. "
                "Give it an Input."
            )
        self._slots = _slots(self.model, optimizer)
        self._layers, self._unknown = _layers_of(self.model)

    @property
    def dims(self) -> list[str]:
        """The names of all dims that a rule may speak of, in the order of the variables."""
        return list(
            dict.fromkeys(dim for uninitialized in self._newborns for dim in dims_of_newborn(uninitialized) if dim)
        )

    def plan(self, mesh: Mesh, rules: Mapping[str, str], shard: Shard, batch_size: int) -> Plan:
        """Plans a step.

        Args:
          mesh: its axes.
          rules: axis by dim, that of `batch` among them.
          shard: what of the state is in parts.
          batch_size: rows of a global batch.

        Raises:
          InputError: a rule cannot be applied.
        """
        variables = [self._planned(uninitialized, mesh, rules, shard) for uninitialized in self._newborns]
        names = {id(uninitialized.variable): dims_of_newborn(uninitialized) for uninitialized in self._newborns}
        held = Activations(self._layers, names, mesh, rules, batch_size)
        tables = {id(table) for table in keras_internals.embeddings(self.model)}
        computed = {
            id(uninitialized.variable): planned.bytes_of_gradient(mesh, id(uninitialized.variable) in tables)
            for uninitialized, planned in zip(self._newborns, variables, strict=True)
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
        dims = tuple(dim or "*" for dim in dims_of_newborn(uninitialized))
        slots = self._slots.get(id(variable), 0)
        return Planned(variable.path, dims, tuple(variable.shape), size, place, slots, variable.trainable)

    def _of_parts(self, variables: list[Planned], mesh: Mesh, shard: Shard) -> Iterator[Sent]:
        """What sharded state sends."""
        twice = {uninitialized.variable.path for uninitialized in self._newborns if is_gathered_in_turn(uninitialized)}
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
    """The layout that sends least of those that fit, by trying each assignment of dims to axes beside the batch's.

    Dims whose splitting makes more than layers with weights communicate are not tried; see `uncounted`.

    Args:
      abstract_model: the model.
      mesh: its axes.
      rules: given ones, which stay; that of `batch` among them.
      shard: what of the state is in parts.
      batch_size: rows of a global batch.
      memory: bytes of a device, for state and activations.

    Returns:
      The rules and their plan: of those of which most is known. Of equal ones that with the least memory, then that with the
      fewest rules.

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
            f"--memory_gb must have room for some layout. Received: {memory / 2**30:g}, with {len(found)} layouts of which the "
            f"smallest takes {least / 2**30:.3g}. Use more devices, --shard, a smaller batch, or more memory."
        )
    *_, tried, plan = min(fitting, key=lambda one: one[:4])
    return tried, plan


def uncounted(rules: Mapping[str, str]) -> list[str]:
    """The rules of which a plan does not know all that is sent: embed, head_dim, and most on the batch's axis."""
    batch = rules["batch"]
    own = ("batch", "experts")
    return [f"{d}:{axis}" for d, axis in rules.items() if d not in own and (d in _UNCOUNTED or axis == batch)]


def _slots(model: keras.Model, optimizer: keras.Optimizer) -> dict[int, int]:
    """How many slots the optimizer keeps for each variable, by the variable's id."""
    for variable in model.trainable_variables:
        keras_internals.set_layout(variable, variable)  # which Keras hands on to its slots
    kept = [keras_internals.layout_of(slot) for slot in keras_internals.slots_of(optimizer, model.trainable_variables)]
    return dict(collections.Counter(id(variable) for variable in kept if variable is not None))


def _layers_of(model: keras.Model) -> tuple[list[keras.Layer], list[str]]:
    """The layers whose inputs and outputs have known shapes, and the paths of those that are not counted.

    A projection of an attention is counted with that; what is in a model inside is not, as its tensors are not the outer one's.
    """
    layers = [layer for layer in keras_internals.layers_of(model) if layer.variables or layer in model.layers]
    own = [layer for layer in model.layers if not isinstance(layer, keras.Model)]
    known = [layer for layer in layers if layer in own and keras_internals.has_shapes(layer)]
    attentions = [layer for layer in known if isinstance(layer, ATTENTIONS)]
    counted = {id(x) for x in known} | {id(part) for x in attentions for part in keras_internals.layers_of(x)}
    return known, [keras_internals.path_of(layer) for layer in layers if id(layer) not in counted]
