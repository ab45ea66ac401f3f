"""A model's own step, such as `train_step`, partitioned by rows; see `tfdist.step.partitioned_step`."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica
from tfdist.data.batches import count_rows
from tfdist.data.replica_rows import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.keras_fit.one_device import Replica, running
from tfdist.keras_fit.replica_batch import check_not_strict, say_all_rows
from tfdist.keras_fit.step_outputs import flat
from tfdist.row_semantics.explanation import Communication
from tfdist.row_semantics.partitioning import NotPartitionedError
from tfdist.step import partitioned_step
from tfdist.step.metrics import KerasMetrics
from tfdist.step.partitioned_step import StepResult

_log = logging.getLogger(__name__)


class Application(NamedTuple):
    """The call of an optimizer's `apply` in a step.

    Attributes:
      original: what the call was made to.
      optimizer: the optimizer.
      gradients: the gradients.
      variables: the variables.
    """

    original: Callable[..., Any]
    optimizer: keras.Optimizer
    gradients: Sequence[tf.Tensor]
    variables: Sequence[keras.Variable]


def partitioned(
    model: keras.Model, step: Callable[[Any], Any], own_rows: ReplicaRows, collectives: Collectives
) -> tuple[StepResult, Application | None]:
    """Emits a step for a replica's rows into the current graph.

    Args:
      model: compiled and built model.
      step: its `train_step` or `test_step`, or another function of a batch that returns values by name.
      own_rows: the replica's rows.
      collectives: collectives of all replicas.

    Returns:
      What the step computes, and the application of its gradients, of which the replica has a share; None if there is none.

    Raises:
      NotPartitionedError: the step cannot be partitioned.
    """
    called = _Called(step)
    result = partitioned_step.partitioned(model, _metrics(model), called, own_rows, collectives)
    applications = [each._replace(gradients=result.gradients) for each, _ in called.applications]
    return result, applications[0] if applications else None


def communication(model: keras.Model, step: Callable[[Any], Any], spec: Any) -> Communication:
    """Returns what replicas communicate in a partitioned step, besides the sums of its gradients.

    Args:
      model: built model.
      step: function of a batch that returns values by name.
      spec: structure of `tf.TensorSpec` of a batch.
    """
    return partitioned_step.communication(model, _metrics(model), _Called(step), spec)


def _metrics(model: keras.Model) -> list[keras.Variable]:
    return KerasMetrics(model).variables if model.compiled else []


def say_partitioned(
    model: keras.Model, name: str, reason: str, sent: Communication, strategy: Strategy, rows: str
) -> None:
    """Says what replicas do with a step that needs all rows, and why.

    Args:
      model: built model.
      name: name of the step.
      reason: why it needs all rows.
      sent: result of `communication`.
      strategy: strategy on which it runs.
      rows: value of --rows.

    Raises:
      InputError: `rows` is "strict".
    """
    if sent.refused:
        return say_all_rows(model, name, reason, sent.whole_batch, strategy, rows)
    text = f"{name} of {model.name} needs all rows of a batch: {reason.rstrip('.')}."
    check_not_strict(rows, f"{text} Make the value a mean or a sum over rows.")
    if strategy.is_chief:
        _log.info("%s Besides gradients, replicas communicate %s in each step.", text, sent)
    return None


class _Called:
    """A model's step as one device computes it.

    Attributes:
      applications: applications of gradients in the call, and how many operations were traced before each.
    """

    def __init__(self, step: Callable[[Any], Any]):
        self._step = step
        self.applications: list[tuple[Application, int]] = []

    def __call__(self, batch: Any) -> tuple[Sequence[tf.Tensor], dict[str, Any]]:
        rows = count_rows(batch)
        with running(Replica(OneReplica(), rows, rows, self._apply, has_all_rows=True)):
            values = flat(self._step(batch) or {})
        self._check_order()
        return self.applications[0][0].gradients if self.applications else (), values

    def _apply(
        self, original: Any, optimizer: keras.Optimizer, given: Sequence[Any], variables: Sequence[keras.Variable]
    ) -> None:
        pairs = [(tf.convert_to_tensor(g), v) for g, v in zip(given, variables, strict=True) if g is not None]
        gradients, updated = [g for g, _ in pairs], [v for _, v in pairs]
        number = len(tf.compat.v1.get_default_graph().get_operations())
        self.applications.append((Application(original, optimizer, gradients, updated), number))

    def _check_order(self) -> None:
        """Refuses a step that reads variables after it has updated them, which a trace does not."""
        if len(self.applications) > 1:
            raise NotPartitionedError("it applies gradients more than once")
        for _, number in self.applications:
            for operation in tf.compat.v1.get_default_graph().get_operations()[number:]:
                if any(tensor.dtype == tf.resource for tensor in operation.inputs):
                    raise NotPartitionedError("it reads variables after it has applied gradients")
