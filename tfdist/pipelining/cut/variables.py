"""The variables of stages: which stage has which, and their creation in the processes of their stage alone."""

import dataclasses
from collections.abc import Sequence

import keras

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.pipelining.cut.abstract_run import AbstractRun
from tfdist.pipelining.cut.graph import Graph


@dataclasses.dataclass(frozen=True, eq=False)
class StageVariables:
    """The variables of one stage, each in the order of the model's.

    Attributes:
      all: the stage's part of `model.variables`.
      metrics: state of metrics that layers update, which Keras does not count as the model's variables.
      others: variables that its calls read and no layer has.
      shared: those of `all` that other stages have, too.
      owned: those of `all` that no earlier stage has: over the stages, each variable once.
    """

    all: tuple[keras.Variable, ...]
    metrics: tuple[keras.Variable, ...]
    others: tuple[keras.Variable, ...]
    shared: tuple[keras.Variable, ...]
    owned: tuple[keras.Variable, ...]

    @property
    def trainable(self) -> tuple[keras.Variable, ...]:
        """Variables with gradients, as of now."""
        return tuple(variable for variable in self.all if variable.trainable)

    @property
    def non_trainable(self) -> tuple[keras.Variable, ...]:
        """All other variables of `all`, such as moving statistics, and seeds of random layers."""
        return tuple(variable for variable in self.all if not variable.trainable)


def assign_variables(graph: Graph, run: AbstractRun, stage_of: Sequence[int], stages: int) -> list[StageVariables]:
    """Returns the variables of each stage.

    A layer's variables belong to its stage. Of a layer that is called in several stages, each has those that its calls
    use, such as the table of tied embeddings. What no call uses is in the last stage.

    Args:
      graph: graph of the model.
      run: its abstract run.
      stage_of: stage of each call of `graph.calls`.
      stages: number of stages.
    """
    used: list[dict[int, keras.Variable]] = [{} for _ in range(stages)]
    layers: dict[int, set[int]] = {}
    for call, usage, stage in zip(graph.calls, run.usage, stage_of, strict=True):
        used[stage] |= usage.variables
        layers.setdefault(id(call.layer), set()).add(stage)
    home: dict[int, int] = {}  # stage of a variable that no call uses
    for call in graph.calls:
        if call.layer is not None:
            for variable in (*call.layer.variables, *call.layer.metrics_variables):
                home.setdefault(id(variable), min(layers[id(call.layer)]))
    variables, metrics = graph.model.variables, keras_internals.metrics_of_layers(graph.model)
    stages_of = {}
    for variable in (*variables, *metrics):
        found = [stage for stage in range(stages) if id(variable) in used[stage]]
        stages_of[id(variable)] = found or [home.get(id(variable), stages - 1)]
    return [
        StageVariables(
            tuple(variable for variable in variables if stage in stages_of[id(variable)]),
            tuple(variable for variable in metrics if stage in stages_of[id(variable)]),
            tuple(variable for key, variable in used[stage].items() if key not in stages_of),
            tuple(v for v in variables if stage in stages_of[id(v)] and len(stages_of[id(v)]) > 1),
            tuple(v for v in variables if stage == stages_of[id(v)][0]),
        )
        for stage in range(stages)
    ]


def initialize(variables: StageVariables) -> None:
    """Gives the variables of a stage that have no value yet the initial values that they would have on one device.

    Initializers have a seed of their own from the time when the model was built, so that the values do not depend on
    which variables are initialized. Variables that were created with values keep them.

    Raises:
      InputError: an initializer draws from a generator that others use, so that its values would depend on them.
    """
    for variable in (*variables.all, *variables.metrics, *variables.others):
        if keras_internals.value_of(variable) is not None:
            continue
        before = keras_internals.states_of_generators()
        keras_internals.initialize(variable)
        if keras_internals.states_of_generators() != before:
            raise InputError(
                "An initializer must have a seed of its own, so that a stage draws the same values as one device. Received: "
                f"the initializer of {variable.path}, which draws from a global generator. Use one of keras.initializers, "
                "or draw with a fixed seed."
            )
