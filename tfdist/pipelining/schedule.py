"""A pipeline schedule: the actions of each process in order, with their requirements, messages and live activations."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

FORWARD = "F"
BACKWARD = "B"
INPUT_GRADIENT = "I"
WEIGHT_GRADIENT = "W"
KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
_CHANGES = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: 0, WEIGHT_GRADIENT: -1}  # of the number of live micro-batches


@dataclasses.dataclass(frozen=True, order=True)
class Action:
    """The computation of one stage for one micro-batch."""

    # "F", the forward pass; "B", the backward pass; or one of its two parts: "I", the gradient of the stage's input, and "W",
    # the gradient of its weights.
    kind: str
    stage: int  # from 0; with several chunks in each process, chunk c of process s is stage c * S + s
    micro_batch: int  # from 0

    def __str__(self) -> str:
        """Returns the notation of torch.distributed.pipelining, such as 2F0 for F of micro-batch 0 in stage 2."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order in which the processes of a pipeline compute one batch.

    A process computes its actions in this order, each when its message has arrived.
    """

    name: str  # as in `--pipeline_schedule`
    processes: int  # S
    stages: int  # S * chunks; stage v is in process v % S
    micro_batches: int  # M
    actions: tuple[tuple[Action, ...], ...]  # of each process, in order
    # For each stage, the age of the weights with which it computes a batch, in updates; empty for a schedule that flushes the
    # pipeline at the end of each step, and always uses the newest weights.
    delays: tuple[int, ...] = ()

    @property
    def has_flush(self) -> bool:
        """Whether the pipeline is empty at the end of each step."""
        return not self.delays

    def process_of(self, stage: int) -> int:
        """Returns the process of a stage."""
        return stage % self.processes

    def processes_of(self, stages: Iterable[int]) -> list[int]:
        """Returns the distinct processes of stages, in ascending order."""
        return sorted(set(map(self.process_of, stages)))

    def stages_of(self, process: int) -> range:
        """Returns the stages of a process, in the order of the model."""
        return range(process, self.stages, self.processes)

    def requirements(self, action: Action) -> list[Action]:
        """Returns the actions whose results an action needs, in any process; a backward pass is returned as "I"."""
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        if kind == FORWARD:
            return [Action(FORWARD, stage - 1, micro_batch)] if stage else []
        if kind == WEIGHT_GRADIENT:
            return [Action(INPUT_GRADIENT, stage, micro_batch)]
        forward_pass = [Action(FORWARD, stage, micro_batch)]
        return forward_pass + ([Action(INPUT_GRADIENT, stage + 1, micro_batch)] if stage + 1 < self.stages else [])

    def message(self, action: Action, *, is_sent: bool) -> tuple[int, str] | None:
        """Returns the process of the other stage and the tag of the message that an action sends or receives, if any.

        Activations go to the next stage, their gradients to the previous one. The tag is unique among the messages of a step.
        """
        direction, offset = (FORWARD, 1) if action.kind == FORWARD else (BACKWARD, -1)
        source = action.stage if is_sent else action.stage - offset
        target = source + offset
        if action.kind == WEIGHT_GRADIENT or min(source, target) < 0 or max(source, target) >= self.stages:
            return None
        return self.process_of(target if is_sent else source), f"{source}{direction}{action.micro_batch}"

    def live_activations(self, sizes: Sequence[float] | None = None) -> tuple[float, ...]:
        """Returns the maximum total size of the activations that each process keeps for backward passes.

        Activations live from the forward pass of a micro-batch until the end of its backward pass, "B" or "W". `sizes` are
        the sizes for one micro-batch in each stage; 1 by default, which counts micro-batches.
        """
        sizes = sizes or [1] * self.stages
        if not self.has_flush:  # micro-batches of later steps replace those that have ended
            return tuple(size * (self.stages - stage) for stage, size in enumerate(sizes))
        changes = [[_CHANGES[action.kind] * sizes[action.stage] for action in actions] for actions in self.actions]
        return tuple(max(itertools.accumulate(process_changes)) for process_changes in changes)


def result_of(action: Action) -> Action:
    """Returns the action that stands for the result of an action in `Schedule.requirements`: "I" for "B"."""
    return dataclasses.replace(action, kind=INPUT_GRADIENT) if action.kind == BACKWARD else action
