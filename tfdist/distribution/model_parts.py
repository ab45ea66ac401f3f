"""The part of a model that a process trains, for strategies whose replicas are spread over processes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals

FullVariables = Callable[[Sequence[keras.Variable]], contextlib.AbstractContextManager]


class ModelParts:
    """The default: each process trains the whole model.

    Attributes:
      computes_outputs: whether this process computes the outputs of the model, and with them losses and metrics; otherwise it
        adds zeros to their sums.
    """

    computes_outputs: bool = True

    def __init__(self, full_variables: FullVariables):
        """Initializes the parts.

        Args:
          full_variables: see `VariableBlocks.full_variables`.
        """
        self._full_variables = full_variables

    def trained(self, model: keras.Model) -> keras.Model:
        """Returns what this process trains of a model that was created in the scope."""
        return model

    def description(self, part: keras.Model) -> str:
        """Describes the parts of all processes, for a line at the start of a run; empty if each has the whole model."""
        return ""

    @contextlib.contextmanager
    def whole(self, part: keras.Model) -> Iterator[keras.Model]:
        """Context with the model of a part, on the chief with all its values, to save it; every process must enter it.

        Args:
          part: result of `trained`.
        """
        with self._full_variables([*part.variables, *part.optimizer.variables]):
            yield part

    def regularization(self, part: keras.Model) -> float:
        """Returns the regularization loss of the whole model's weights; every process must call it."""
        return sum(float(tf.reduce_sum(loss)) for loss in keras_internals.weight_losses(part))

    def outputs(self, outputs: Any) -> Any:
        """Returns the outputs of the model for a replica's rows on every process of the replica; in a replica function.

        Args:
          outputs: a structure of tensors; only their shapes are used in a process that does not compute outputs.
        """
        return outputs
