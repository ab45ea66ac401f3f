"""A stage: a part of a model's graph that runs by itself."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.pipelining.cut.abstract_run import AbstractRun
from tfdist.pipelining.cut.boundaries import LOGITS, MASK, VALUE, Crossing
from tfdist.pipelining.cut.graph import Call, Graph
from tfdist.pipelining.cut.variables import StageVariables


@dataclasses.dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage of a model.

    Attributes:
      index: number of the stage, from 0.
      calls: its calls of operations, in the order in which Keras runs them.
      layers: its layers, each once.
      inputs: names of the model's inputs that it reads.
      received: what the stage before sends.
      sent: what this stage sends to the next, including what it only passes on.
      outputs: names of the model's outputs that it makes, or passes on to the last stage.
      variables: its variables.
    """

    index: int
    calls: tuple[Call, ...]
    layers: tuple[keras.Layer, ...]
    inputs: tuple[str, ...]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]
    outputs: tuple[str, ...]
    variables: StageVariables
    is_last: bool
    _masked: frozenset[int] = dataclasses.field(repr=False)  # received tensors that get their masks
    _graph: Graph = dataclasses.field(repr=False)
    _run: AbstractRun = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        """Creates the layer that calls the stage's layers."""
        body = keras_internals.Body(f"stage_{self.index}", self._graph.model, self.layers, self._forward)
        object.__setattr__(self, "_body", body)

    def call(
        self, inputs: Mapping[str, tf.Tensor], received: Sequence[tf.Tensor], training: bool | None = None
    ) -> tuple[Any, list[tf.Tensor]]:
        """Runs the stage's part of the model, eagerly or in a function.

        Losses that layers add are then returned by `take_data_losses()`.

        Args:
          inputs: tensors by the names of the model's inputs, as returned by `Cut.named_inputs`; others than those of
            `self.inputs` are ignored.
          received: tensors in the order of `self.received`.
          training: whether this is a training step.

        Returns:
          The model's outputs in the last stage, in the structure that a call of the model returns, with their masks;
            else None.
          Tensors in the order of `self.sent`.
        """
        return self._body(dict(inputs), list(received), training=training)  # type: ignore[attr-defined]

    def take_data_losses(self) -> list[tf.Tensor]:
        """Returns the losses that its layers have added since this was called before, as means over rows."""
        return keras_internals.take_data_losses(self._body)  # type: ignore[attr-defined]

    def weight_losses(self) -> list[tf.Tensor]:
        """Returns the regularization losses of the trainable variables; of a shared one, only in its first stage."""
        owned = [variable for variable in self.variables.owned if variable.trainable]
        return [variable.regularizer(variable) for variable in owned if variable.regularizer is not None]

    def _forward(
        self, inputs: Mapping[str, Any], received: Sequence[Any], training: bool | None
    ) -> tuple[Any, list[Any]]:
        values: dict[int, Any] = {self._graph.inputs[name]: inputs[name] for name in self.inputs}
        masks = self._unpack(received, values)
        for call in self.calls:
            call.run(values, training)
            for made in self._run.masks.keys() & call.outputs:
                masks[self._run.masks[made]], _ = keras_internals.mask_and_logits(values[made])
        outputs = None
        if self.is_last:
            outputs = keras_internals.packed_outputs(self._graph.functional, [values[x] for x in self._graph.outputs])
        return outputs, [self._part(crossing, values, masks) for crossing in self.sent]

    def _unpack(self, received: Sequence[Any], values: dict[int, Any]) -> dict[int, Any]:
        """Adds received tensors to the values; returns the masks by the first tensor that has each."""
        kinds: dict[str, dict[int, Any]] = {VALUE: {}, MASK: {}, LOGITS: {}}
        for crossing, tensor in zip(self.received, received, strict=True):
            kinds[crossing.kind][crossing.tensor] = tensor
        masks = {self._run.masks[tensor]: mask for tensor, mask in kinds[MASK].items()}
        for number, tensor in kinds[VALUE].items():
            values[number] = tf.identity(tensor)  # the caller's tensor gets no mask
            mask = masks[self._run.masks[number]] if number in self._masked else None
            keras_internals.set_mask_and_logits(values[number], mask, kinds[LOGITS].get(number))
        return masks

    def _part(self, crossing: Crossing, values: Mapping[int, Any], masks: Mapping[int, Any]) -> Any:
        if crossing.kind == MASK:
            return masks[self._run.masks[crossing.tensor]]
        value = values[crossing.tensor]
        return value if crossing.kind == VALUE else keras_internals.mask_and_logits(value)[1]
