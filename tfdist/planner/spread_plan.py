"""Plans what the axis `model` of a pipeline shards over the devices of a process: variables, and their communication."""

import dataclasses
from collections.abc import Mapping

import keras

from tfdist import keras_internals
from tfdist.planner.layout_plan import AbstractModel, Plan, Planned
from tfdist.sharding.layouts import Shard, idle, parse_layout
from tfdist.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class SpreadPlan:
    """The plan of the devices of a process.

    Attributes:
      plan: layouts of the variables of all stages, and the communication of a micro-batch.
      rules: the axis by dim.
      of_variables: the plan of each variable, by the variable's id.
    """

    plan: Plan
    rules: Mapping[str, str]
    of_variables: Mapping[int, Planned]

    @property
    def devices(self) -> int:
        """Number of devices of a process."""
        return self.plan.mesh.size

    @property
    def sharded(self) -> list[Planned]:
        """The variables of which each device has a part: trainable ones, as the others stay on the host."""
        return [v for v in self.plan.variables if v.trainable and not v.is_replicated(self.plan.mesh)]

    @property
    def replicated(self) -> list[Planned]:
        """The trainable variables that every device has as a whole."""
        return [v for v in self.plan.variables if v.trainable and v.is_replicated(self.plan.mesh)]

    @property
    def warnings(self) -> list[str]:
        """Rules without effect, and an axis that is not used."""
        return idle(self.rules, self.plan.dims, Shard(), self.plan.mesh)

    def device_bytes(self, variable: keras.Variable) -> int:
        """Returns the bytes of a variable on each device."""
        planned = self.of_variables[id(variable)]
        parts = planned.placement.stored.parts(self.plan.mesh) if planned.trainable else 1
        return keras_internals.bytes_of(variable) // parts


def plan_spread(abstract_model: AbstractModel, devices: int, layout: str, rows: int) -> SpreadPlan:
    """Plans how a model's stages are spread over the devices of their processes.

    Args:
      abstract_model: the model.
      devices: number of devices of a process.
      layout: what is sharded over the axis model, as in `--layout`.
      rows: rows of a micro-batch.

    Raises:
      InputError: a rule cannot be applied.
    """
    mesh = Mesh({"data": 1, "model": devices})
    rules = parse_layout(layout, mesh)
    plan = abstract_model.plan(mesh, rules, Shard(), rows)
    own = {dim: axis for dim, axis in rules.items() if dim != "batch"}
    return SpreadPlan(plan, own, dict(zip(map(id, abstract_model.variables), plan.variables, strict=True)))
