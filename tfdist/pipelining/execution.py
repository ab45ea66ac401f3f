"""Executes a schedule: traces a function that computes the actions of this process in order.

Control dependencies enforce the order, which bounds the number of live activations. The message of an action is received
during the action before it, and sends do not block. The passes of a stage are traced once, so tracing takes about the same
time for any number of micro-batches. `schedule_catalog` has the papers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.clock import time_after
from tfdist.pipelining.activation_compression import EXACT, ActivationCompression, Link
from tfdist.pipelining.passes import Gradient, Passes, Stage, with_gradients
from tfdist.pipelining.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, Action, Schedule


class ActionClock:
    """Adds readings of the clock at the start and end of each action to the traced function.

    An action starts when the previous action has ended and its message has arrived, and ends when its results are available.
    The clock does not change the order of actions. On a GPU, times are those at which kernels are launched.
    """

    def __init__(self) -> None:
        self._times: list[tf.Tensor] = []

    def begin(self, previous_results: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Reads the clock once these tensors are available; returns the tensors for which the action must wait."""
        self._times.append(time_after([*previous_results, *inputs]))
        return self._times[-1:]

    def end(self, results: Sequence[tf.Tensor]) -> None:
        """Reads the clock when the results of an action are available."""
        self._times.append(time_after(results))

    def read(self) -> tf.Tensor:
        """Returns start and end of each action, [actions, 2] float64, in seconds since the epoch."""
        return tf.reshape(tf.stack(self._times), [-1, 2])


class NoClock(ActionClock):
    """Reads no clock: nothing is added to the graph."""

    def begin(self, previous_results: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(previous_results)

    def end(self, results: Sequence[tf.Tensor]) -> None:
        pass


NO_CLOCK = NoClock()


class StepStage(Stage, Protocol):
    """A stage in one step, with the arguments of each micro-batch."""

    def arguments(self, micro_batch: int) -> Any:
        """Returns the arguments of `forward` for a micro-batch, in the same structure for all micro-batches."""


class Sums(NamedTuple):
    """Sums over micro-batches."""

    gradients: dict[int, list[Gradient]]  # by stage, in the order of its variables
    share: tf.Tensor  # scalar; contribution of these stages to the reported loss


# The results of an action: the tensors for the neighboring stage, and all tensors that it has computed.
Results: TypeAlias = tuple[list[tf.Tensor], list[tf.Tensor]]


@dataclasses.dataclass
class Execution:
    """Traces one execution of a schedule: the forward and backward passes of this process's stages."""

    schedule: Schedule
    process: int  # rank of this process in its pipeline
    stages: Mapping[int, StepStage]  # by index
    collectives: Collectives  # of the processes of the pipeline
    clock: ActionClock = NO_CLOCK
    compression: ActivationCompression = EXACT

    def __post_init__(self) -> None:
        self._actions, stages = self.schedule.actions[self.process], self.stages
        split_stages = {action.stage for action in self._actions if action.kind == INPUT_GRADIENT}
        self._passes = {i: Passes(stage, stage.arguments(0), i in split_stages) for i, stage in stages.items()}
        self._residuals: dict[tuple[int, int], list[tf.Tensor]] = {}  # by stage and micro-batch
        self._gradients: dict[int, list[Gradient]] = {i: [None] * len(stage.variables) for i, stage in stages.items()}
        self._loss_shares: list[tf.Tensor] = []
        self._local_tensors: dict[str, list[tf.Tensor]] = {}  # for other stages of this process, by tag

    def run(self) -> Sums:
        """Computes the actions of this process for all micro-batches."""
        results_so_far: list[list[tf.Tensor]] = [[], []]
        for action in self._actions:
            with tf.control_dependencies(results_so_far[-2]):
                inputs = self._receive(action)
            with tf.control_dependencies(self.clock.begin(results_so_far[-1], inputs)):
                outputs, results = self._compute(action, inputs)
            self.clock.end(results)
            self._send(action, outputs)
            results_so_far.append(results)
        return Sums(self._gradients, tf.add_n(self._loss_shares))

    def _compute(self, action: Action, inputs: list[tf.Tensor]) -> Results:
        if action.kind == FORWARD:
            return self._forward(action, inputs)
        key = action.stage, action.micro_batch
        passes, residuals = self._passes[action.stage], self._residuals.pop(key)
        if action.kind == BACKWARD:
            variable_gradients, input_gradients = passes.backward(residuals, inputs)
            outputs = _identities(input_gradients)
            return outputs, [*outputs, *self._accumulate(action, variable_gradients)]
        if action.kind == INPUT_GRADIENT:
            input_gradients, weight_residuals = passes.backward_input(residuals, inputs)
            outputs, self._residuals[key] = _identities(input_gradients), _identities(weight_residuals)
            return outputs, [*outputs, *self._residuals[key]]
        return [], self._accumulate(action, passes.backward_weight(residuals))

    def _forward(self, action: Action, inputs: list[tf.Tensor]) -> Results:
        results = self._passes[action.stage].forward(self.stages[action.stage].arguments(action.micro_batch), inputs)
        self._residuals[action.stage, action.micro_batch] = results.residuals
        *outputs, share = _identities([*results.sent, results.share])
        self._loss_shares.append(share)
        return outputs, [*outputs, share]

    def _accumulate(self, action: Action, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
        totals = self._gradients[action.stage]
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                totals[i] = tf.identity(gradient) if totals[i] is None else totals[i] + gradient
        return [tensor for tensor in totals if tensor is not None]

    def _receive(self, action: Action) -> list[tf.Tensor]:
        """Returns the activations for a forward pass, or the gradients for a backward pass."""
        if (message := self.schedule.message(action, is_sent=False)) is None:
            return []
        (process, tag), stage = message, self.stages[action.stage]
        if process == self.process:
            return self._local_tensors.pop(tag)
        crossings = stage.received if action.kind == FORWARD else with_gradients(stage.sent, stage.sent)
        specs = [crossing.spec for crossing in crossings]
        return Link(self.collectives, process, self.compression).receive(specs, tag)

    def _send(self, action: Action, tensors: list[tf.Tensor]) -> None:
        if (message := self.schedule.message(action, is_sent=True)) is None:
            return
        process, tag = message
        if process == self.process:
            self._local_tensors[tag] = tensors
        else:
            Link(self.collectives, process, self.compression).send(tensors, tag)


def _identities(results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns identities of the results of a call, for control dependencies.

    Once the runtime has inlined the call, a control dependency on the call itself would wait only for its side effects.
    """
    return [tf.identity(result) for result in results]
