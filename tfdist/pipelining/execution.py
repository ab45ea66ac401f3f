"""The execution of a schedule: a traced function computes the actions of this process, in their order.

The order is given by control dependencies, as nothing else bounds the number of live activations. An action's message is
received while the action before it computes, and a send does not block. Each forward pass has a tape of its own, from which
its backward pass continues with the gradients that the next stage has sent.

Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019 (arXiv:1811.06965).
Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019 (doi:10.1145/3341301.3359646).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.errors import InputError
from tfdist.pipelining.action_clock import ActionClock, NoClock
from tfdist.pipelining.activation_compression import EXACT, ActivationCompression
from tfdist.pipelining.crossings import CrossingSpec, with_static_shapes
from tfdist.pipelining.messages import Link
from tfdist.pipelining.schedules import BACKWARD, FORWARD, Action, Schedule

Sum: TypeAlias = tf.Tensor | None


class Forward(NamedTuple):
    """The result of the forward pass of a stage with one micro-batch.

    Attributes:
      sent: what the next stage gets.
      loss: scalar to differentiate besides: in the last stage the loss, elsewhere losses of its own layers.
    """

    sent: Sequence[tf.Tensor]
    loss: tf.Tensor


class Stage(Protocol):
    """A stage of a model, as it is executed."""

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Values of the trainable variables of the stage."""

    @property
    def received(self) -> Sequence[CrossingSpec]:
        """What the stage before it sends."""

    @property
    def sent(self) -> Sequence[CrossingSpec]:
        """What it sends to the next stage."""

    def forward(self, micro_batch: int, received: Sequence[tf.Tensor]) -> Forward:
        """Computes the forward pass of a micro-batch, in a tape."""

    def gradients(self, found: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> Sequence[Sum]:
        """Returns the gradients of the variables as they are summed over micro-batches."""


def check_executable(schedule: Schedule) -> Schedule:
    """Returns the schedule; raises `InputError` if it has actions that cannot be executed."""
    parts = [action for row in schedule.actions for action in row if action.kind not in (FORWARD, BACKWARD)]
    if parts:
        raise InputError(
            "Schedules that split the backward pass (I and W) cannot be executed yet. Received: "
            f"{parts[0]} in {schedule.name}. Write B instead of I and W."
        )
    return schedule


def run_schedule(
    schedule: Schedule,
    process: int,
    stages: Mapping[int, Stage],
    collectives: Collectives,
    clock: ActionClock | None = None,
    compression: ActivationCompression = EXACT,
) -> dict[int, list[Sum]]:
    """Computes the forward and backward passes of this process's stages with all micro-batches.

    Args:
      schedule: the schedule.
      process: number of this process in its pipeline.
      stages: the stages of this process, by their numbers.
      collectives: collectives of the pipeline's processes.
      clock: notes when actions begin and end; None notes nothing.
      compression: of the messages between processes.

    Returns:
      For each stage, the sum over micro-batches of the gradients of its variables, in their order; None where the loss does
      not depend on a variable.
    """
    return _Execution(schedule, process, stages, collectives, clock or NoClock(), compression).run()


class _Live(NamedTuple):
    """What a micro-batch's backward pass in a stage needs."""

    tape: tf.GradientTape
    received: list[tf.Tensor]
    sent: list[tf.Tensor]
    loss: tf.Tensor


class _Execution:
    """One execution of a schedule, while it is traced."""

    def __init__(
        self,
        schedule: Schedule,
        process: int,
        stages: Mapping[int, Stage],
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
        self._live: dict[tuple[int, int], _Live] = {}
        self._sums: dict[int, list[Sum]] = {number: [None] * len(stage.variables) for number, stage in stages.items()}
        self._local: dict[Action, list[tf.Tensor]] = {}  # results for other stages of this process

    def run(self) -> dict[int, list[Sum]]:
        done: list[list[tf.Tensor]] = [[], []]  # results of the actions so far
        for action in self._actions:
            with tf.control_dependencies(done[-2]):
                received = self._received(action)
            with tf.control_dependencies(self._clock.begin(done[-1], received)):
                is_forward = action.kind == FORWARD
                sent, results = self._forward(action, received) if is_forward else self._backward(action, received)
            self._clock.end(results)
            self._send(action, sent)
            done.append(results)
        return self._sums

    def _forward(self, action: Action, received: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        stage = self._stages[action.stage]
        with tf.GradientTape() as tape:
            inputs = [tf.identity(tensor) for tensor in received]
            tape.watch(_with_gradients(inputs, stage.received))
            sent, loss = stage.forward(action.micro_batch, inputs)
            sent = with_static_shapes(sent, stage.sent)
            sent = [tf.identity(tensor) for tensor in sent]  # one that only passes through is a target and a source
        self._live[action.stage, action.micro_batch] = _Live(tape, inputs, sent, loss)
        return sent, [*sent, loss]

    def _backward(self, action: Action, received: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        stage, live = self._stages[action.stage], self._live.pop((action.stage, action.micro_batch))
        inputs, targets = _with_gradients(live.received, stage.received), _with_gradients(live.sent, stage.sent)
        found = live.tape.gradient(
            [*targets, live.loss],
            [*stage.variables, *inputs],
            output_gradients=[*received, tf.ones_like(live.loss)],
        )
        own, of_inputs = found[: len(stage.variables)], found[len(stage.variables) :]
        gradients = stage.gradients(own)
        sums = self._sums[action.stage]
        sums[:] = [_sum(before, gradient) for before, gradient in zip(sums, gradients, strict=True)]
        sent = [
            tf.zeros_like(x) if g is None else tf.convert_to_tensor(g) for g, x in zip(of_inputs, inputs, strict=True)
        ]
        sent = with_static_shapes(sent, _with_gradients(stage.received, stage.received))
        return sent, [*sent, *(each for each in sums if each is not None)]

    def _received(self, action: Action) -> list[tf.Tensor]:
        """Returns the activations before a forward pass, or the gradients before a backward pass."""
        message = self._schedule.messages_of(action).receive
        if message is None:  # the stage at this end of the model, or one beside another of this process
            before = -1 if action.kind == FORWARD else 1
            return self._local.pop(dataclasses.replace(action, stage=action.stage + before), [])
        stage = self._stages[action.stage]
        crossings = stage.received if action.kind == FORWARD else _with_gradients(stage.sent, stage.sent)
        return self._link(message.source).receive([crossing.spec for crossing in crossings], message.tag)

    def _send(self, action: Action, sent: list[tf.Tensor]) -> None:
        message = self._schedule.messages_of(action).send
        if message is None:
            self._local[action] = sent
        else:
            self._link(message.target).send(sent, message.tag)

    def _link(self, other: int) -> Link:
        return Link(self._collectives, other, self._compression)


def _with_gradients(values: Sequence[Any], crossings: Sequence[CrossingSpec]) -> list[Any]:
    """Returns the values of the crossings whose gradients are sent back."""
    return [value for value, crossing in zip(values, crossings, strict=True) if crossing.has_gradient]


def _sum(before: Sum, gradient: Sum) -> Sum:
    return before if gradient is None else gradient if before is None else before + gradient
