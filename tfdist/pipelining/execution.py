"""The execution of a schedule: a traced function computes the actions of this process, in their order.

The order is given by control dependencies, as nothing else bounds the number of live activations. An action's message is
received while the action before it computes, and a send does not block. The passes of a stage are functions that are traced
once, so that the time of tracing hardly depends on the number of micro-batches.

Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019 (arXiv:1811.06965).
Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019 (doi:10.1145/3341301.3359646).
Qi et al., Zero Bubble Pipeline Parallelism, 2024 (arXiv:2401.10241).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.clock import time_after
from tfdist.pipelining.activation_compression import EXACT, ActivationCompression, Link
from tfdist.pipelining.passes import Gradient, Passes, Stage, with_gradients
from tfdist.pipelining.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, Action, Schedule


class ActionClock:
    """Records when the actions of this process begin and end, while they are traced.

    An action begins when the action before it has ended and its message has been received, and ends when its results are
    available. The order of actions is the same as without a clock. On a GPU, times are those at which kernels are started.
    """

    def __init__(self) -> None:
        self._times: list[tf.Tensor] = []

    def begin(self, before: Sequence[tf.Tensor], received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors for which the next action must wait: a reading that follows these."""
        self._times.append(time_after([*before, *received]))
        return self._times[-1:]

    def end(self, results: Sequence[tf.Tensor]) -> None:
        """Reads the clock when the results of an action are available."""
        self._times.append(time_after(results))

    def read(self) -> tf.Tensor:
        """Returns start and end of each action, [actions, 2] float64, in seconds since the epoch."""
        return tf.reshape(tf.stack(self._times), [-1, 2])


class NoClock(ActionClock):
    """Reads no clock: nothing is added to the graph."""

    def begin(self, before: Sequence[tf.Tensor], received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See base class."""
        return list(before)

    def end(self, results: Sequence[tf.Tensor]) -> None:
        """See base class."""


class FedStage(Stage, Protocol):
    """A stage with its arguments in a step."""

    def arguments(self, micro_batch: int) -> Any:
        """Returns the arguments of `forward` for a micro-batch; of the same structure for each."""


class Sums(NamedTuple):
    """Sums over micro-batches.

    Attributes:
      gradients: for each stage, those of its variables, in their order; None where the loss does not depend on a variable.
      share: scalar; contribution of these stages to the reported loss.
    """

    gradients: dict[int, list[Gradient]]
    share: tf.Tensor


def run_schedule(
    schedule: Schedule,
    process: int,
    stages: Mapping[int, FedStage],
    collectives: Collectives,
    clock: ActionClock | None = None,
    compression: ActivationCompression = EXACT,
) -> Sums:
    """Computes the forward and backward passes of this process's stages with all micro-batches.

    Args:
      schedule: the schedule.
      process: number of this process in its pipeline.
      stages: the stages of this process, by their numbers.
      collectives: collectives of the pipeline's processes.
      clock: records when actions begin and end; None records nothing.
      compression: of the messages between processes.
    """
    return _Execution(schedule, process, stages, collectives, clock or NoClock(), compression).run()


# The results of an action: the tensors for the neighboring stage, and all that it has computed.
Results: TypeAlias = tuple[list[tf.Tensor], list[tf.Tensor]]


class _Execution:
    """One execution of a schedule, while it is traced."""

    def __init__(
        self,
        schedule: Schedule,
        process: int,
        stages: Mapping[int, FedStage],
        collectives: Collectives,
        clock: ActionClock,
        compression: ActivationCompression,
    ):
        self._schedule = schedule
        self._clock = clock
        self._actions = schedule.actions[process]
        self._stages = stages
        self._collectives = collectives
        self._compression = compression
        split = {action.stage for action in self._actions if action.kind == INPUT_GRADIENT}
        self._passes = {number: Passes(stage, stage.arguments(0), number in split) for number, stage in stages.items()}
        self._residuals: dict[tuple[int, int], list[tf.Tensor]] = {}  # by stage and micro-batch
        self._gradients: dict[int, list[Gradient]] = {
            number: [None] * len(stage.variables) for number, stage in stages.items()
        }
        self._shares: list[tf.Tensor] = []
        self._local: dict[tuple[str, int, int], list[tf.Tensor]] = {}  # tensors for other stages of this process

    def run(self) -> Sums:
        done: list[list[tf.Tensor]] = [[], []]  # results of the actions so far
        for action in self._actions:
            with tf.control_dependencies(done[-2]):
                received = self._received(action)
            with tf.control_dependencies(self._clock.begin(done[-1], received)):
                sent, results = self._compute(action, received)
            self._clock.end(results)
            self._send(action, sent)
            done.append(results)
        return Sums(self._gradients, tf.add_n(self._shares))

    def _compute(self, action: Action, received: list[tf.Tensor]) -> Results:
        if action.kind == FORWARD:
            return self._forward(action, received)
        key = action.stage, action.micro_batch
        passes, residuals = self._passes[action.stage], self._residuals.pop(key)
        if action.kind == BACKWARD:
            of_variables, of_inputs = passes.backward(residuals, received)
            sent = _available(of_inputs)
            return sent, [*sent, *self._add(action, of_variables)]
        if action.kind == INPUT_GRADIENT:
            of_inputs, left = passes.backward_input(residuals, received)
            sent, self._residuals[key] = _available(of_inputs), _available(left)
            return sent, [*sent, *self._residuals[key]]
        return [], self._add(action, passes.backward_weight(residuals))

    def _forward(self, action: Action, received: list[tf.Tensor]) -> Results:
        results = self._passes[action.stage].forward(self._stages[action.stage].arguments(action.micro_batch), received)
        self._residuals[action.stage, action.micro_batch] = results.residuals
        *sent, share = _available([*results.sent, results.share])
        self._shares.append(share)
        return sent, [*sent, share]

    def _add(self, action: Action, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
        """Adds the gradients of a micro-batch; returns the sums so far."""
        sums = self._gradients[action.stage]
        sums[:] = [_sum(before, gradient) for before, gradient in zip(sums, gradients, strict=True)]
        return [each for each in sums if each is not None]

    def _received(self, action: Action) -> list[tf.Tensor]:
        """Returns the activations before a forward pass, or the gradients before a backward pass."""
        if not action.receives:
            return []
        message = self._schedule.messages_of(action).receive
        is_forward = action.kind == FORWARD
        if message is None:  # the stage at this end of the model, or one next to another of this process
            before = action.stage + (-1 if is_forward else 1)
            return self._local.pop((FORWARD if is_forward else BACKWARD, before, action.micro_batch), [])
        stage = self._stages[action.stage]
        crossings = stage.received if is_forward else with_gradients(stage.sent, stage.sent)
        return self._link(message.source).receive([crossing.spec for crossing in crossings], message.tag)

    def _send(self, action: Action, sent: list[tf.Tensor]) -> None:
        message = self._schedule.messages_of(action).send
        if message is not None:
            self._link(message.target).send(sent, message.tag)
        elif action.receives:
            direction = FORWARD if action.kind == FORWARD else BACKWARD
            self._local[direction, action.stage, action.micro_batch] = sent

    def _link(self, other: int) -> Link:
        return Link(self._collectives, other, self._compression)


def _available(results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the results of a call, as tensors that are available after it.

    A control dependency on the call itself waits for its side effects alone, once the runtime has inlined it.
    """
    return [tf.identity(result) for result in results]


def _sum(before: Gradient, gradient: Gradient) -> Gradient:
    if gradient is None:
        return before
    return tf.identity(gradient) if before is None else before + gradient
