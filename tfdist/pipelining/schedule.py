"""A pipeline schedule: the ordered actions of each process, their requirements and messages, and live activations."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
INPUT_GRADIENT = "I"
WEIGHT_GRADIENT = "W"
KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


@dataclasses.dataclass(frozen=True, order=True)
class Action:
    """A computation of one stage with one micro-batch.

    Attributes:
      kind: "F", the forward pass; "B", the backward pass; or the two parts of the latter: "I", the gradient of the stage's
        input, and "W", the gradient of its weights.
      stage: number of the stage, from 0. With several chunks in each process, chunk c of process s is stage c * S + s.
      micro_batch: number of the micro-batch, from 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Returns the action as torch.distributed.pipelining writes it, such as 2F0 for F of micro-batch 0 in stage 2."""
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def completes_backward(self) -> bool:
        """Whether the gradients of the stage's weights are complete after it, and its activations are no longer needed."""
        return self.kind in (BACKWARD, WEIGHT_GRADIENT)

    @property
    def receives(self) -> bool:
        """Whether it has an input from a neighboring stage, if there is one, and a result for the other."""
        return self.kind != WEIGHT_GRADIENT


class Message(NamedTuple):
    """Activations or their gradients, on the way from one process to another.

    Attributes:
      direction: "F" for activations, which go to the next stage, "B" for their gradients, which go to the previous one.
      stage: the stage that computed them.
      micro_batch: their micro-batch.
      source: process of `stage`.
      target: process of the stage that needs them.
    """

    direction: str
    stage: int
    micro_batch: int
    source: int
    target: int

    @property
    def tag(self) -> str:
        """A name that no other message of a step between these two processes has."""
        return f"{self.stage}{self.direction}{self.micro_batch}"


class Messages(NamedTuple):
    """The messages of an action; None where the neighboring stage is in the same process, or there is none.

    Attributes:
      receive: the message that the action needs.
      send: the message with its result.
    """

    receive: Message | None
    send: Message | None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order in which the processes of a pipeline compute one batch.

    A process computes its actions one after the other, in this order, each as soon as its messages have arrived. Which
    schedules are valid is checked by `check_schedule`.

    Attributes:
      name: the schedule as `--pipeline_schedule` names it.
      processes: number of processes, S.
      stages: number of stages: S * chunks. Stage v is in process v % S.
      micro_batches: number of micro-batches, M.
      actions: the actions of each process, in their order.
      delays: for each stage, the age in updates of the weights with which it computes a batch; empty for a schedule that
        ends each step with an empty pipeline, and always uses the newest weights.
    """

    name: str
    processes: int
    stages: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    delays: tuple[int, ...] = ()

    @property
    def has_flush(self) -> bool:
        """Whether the pipeline is empty at the end of each step."""
        return not self.delays

    def process_of(self, stage: int) -> int:
        """Returns the process of a stage."""
        return stage % self.processes

    def processes_of(self, stages: Iterable[int]) -> list[int]:
        """Returns the processes of some stages, each once, in ascending order."""
        return sorted(set(map(self.process_of, stages)))

    def stages_of(self, process: int) -> range:
        """Returns the stages of a process, in the order of the model."""
        return range(process, self.stages, self.processes)

    def requirements(self, action: Action) -> list[Action]:
        """Returns the actions whose results an action needs, in any process.

        A backward pass that is required is returned as "I": its part that other stages wait for.
        """
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        if kind == FORWARD:
            return [Action(FORWARD, stage - 1, micro_batch)] if stage else []
        if kind == WEIGHT_GRADIENT:
            return [Action(INPUT_GRADIENT, stage, micro_batch)]
        own = [Action(FORWARD, stage, micro_batch)]
        return own + ([Action(INPUT_GRADIENT, stage + 1, micro_batch)] if stage + 1 < self.stages else [])

    def messages_of(self, action: Action) -> Messages:
        """Returns the messages of one action."""
        if action.kind == WEIGHT_GRADIENT:
            return Messages(None, None)
        direction, ahead = (FORWARD, 1) if action.kind == FORWARD else (BACKWARD, -1)
        stage, micro_batch = action.stage, action.micro_batch
        return Messages(
            self._message(direction, stage - ahead, stage, micro_batch),
            self._message(direction, stage, stage + ahead, micro_batch),
        )

    def live_activations(self, sizes: Sequence[float] | None = None) -> tuple[float, ...]:
        """Returns the largest size of the activations that each process keeps for backward passes.

        A micro-batch's activations of a stage live from its forward pass until the end of its backward pass, "B" or "W". Only
        the order of actions matters, not their durations.

        Args:
          sizes: size of one micro-batch's activations, for each stage; 1 by default, which counts them.
        """
        sizes = sizes or [1] * self.stages
        if not self.has_flush:  # micro-batches of later steps replace those that have ended
            return tuple(size * (self.stages - stage) for stage, size in enumerate(sizes))
        peaks = []
        for row in self.actions:
            live: float = 0
            peak: float = 0
            for action in row:
                if action.kind == FORWARD:
                    live += sizes[action.stage]
                peak = max(peak, live)
                if action.completes_backward:
                    live -= sizes[action.stage]
            peaks.append(peak)
        return tuple(peaks)

    def _message(self, direction: str, stage: int, to_stage: int, micro_batch: int) -> Message | None:
        is_between = 0 <= min(stage, to_stage) and max(stage, to_stage) < self.stages
        source, target = self.process_of(stage), self.process_of(to_stage)
        return Message(direction, stage, micro_batch, source, target) if is_between and source != target else None


def result_of(action: Action) -> Action:
    """Returns the action under which `Schedule.requirements` names the result of an action: "I" for "B"."""
    return dataclasses.replace(action, kind=INPUT_GRADIENT) if action.kind == BACKWARD else action
