"""Contents of each stage of a cut, as data."""

import dataclasses

from tfdist import keras_internals
from tfdist.pipelining.cut.cutting import Cut


@dataclasses.dataclass(frozen=True)
class StageDescription:
    """A stage.

    Attributes:
      stage: its number, from 0.
      calls: names of its calls of layers and other operations, in the order in which the model is cut: cut after the last
        to repeat this stage.
      parameters: number of elements of its trainable variables.
      parameter_bytes: bytes of its variables, trainable or not.
      shared: paths of variables that other stages have, too.
      activation_bytes: bytes per row that its calls keep for the backward pass.
      inputs: names of the model's inputs that it reads.
      received_bytes: bytes per row that it gets from the stage before.
      sent_bytes: bytes per row that it sends to the next.
      gradient_bytes: bytes per row of gradients that it sends back to the stage before.
    """

    stage: int
    calls: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    shared: tuple[str, ...]
    activation_bytes: int
    inputs: tuple[str, ...]
    received_bytes: int
    sent_bytes: int
    gradient_bytes: int


def describe_stages(cut: Cut) -> list[StageDescription]:
    """Returns a description of each stage."""
    usage = dict(zip(cut.graph.calls, cut.run.usage, strict=True))
    found = []
    for stage in cut.stages:
        own = set(stage.calls)
        found.append(
            StageDescription(
                stage=stage.index,
                calls=tuple(
                    call.name
                    for call in map(cut.graph.calls.__getitem__, cut.graph.order)
                    if call in own and not call.is_entry
                ),
                parameters=sum(variable.shape.num_elements() for variable in stage.variables.trainable),
                parameter_bytes=sum(keras_internals.bytes_of(variable) for variable in stage.variables.all),
                shared=tuple(variable.path for variable in stage.variables.shared),
                activation_bytes=sum(usage[call].activations for call in stage.calls),
                inputs=stage.inputs,
                received_bytes=sum(crossing.bytes for crossing in stage.received),
                sent_bytes=sum(crossing.bytes for crossing in stage.sent),
                gradient_bytes=sum(crossing.bytes for crossing in stage.received if crossing.has_gradient),
            )
        )
    return found
