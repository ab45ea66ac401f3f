"""PipeDream as data: 1F1B without a flush, and the versions of the weights that it uses.

Not a value of `--pipeline_schedule`: nothing executes it yet, as each stage has to keep several versions of its weights.

Every micro-batch is an update of its own. In the order of 1F1B, process s starts the forward pass of micro-batch m when it has
applied the updates of m - (S - 1 - s) micro-batches, so its weights are S - 1 - s updates old. With weight stashing, the
backward pass of a micro-batch uses the weights of its forward pass:

    w_s(m + 1) = w_s(m) - lr * gradient_s(w_0(m - S + 1), w_1(m - S + 2), ..., w_{S-1}(m)),  w_s(v) = w_s(0) for v < 0

with vertical sync, all stages use those of process 0: gradient_s(w_0(m - S + 1), w_1(m - S + 1), ..., w_{S-1}(m - S + 1)).

Narayanan et al., PipeDream, SOSP 2019; Harlap et al., arXiv:1806.03377.
"""

import dataclasses

from tfdist.pipelining.schedules.orders import one_f_one_b
from tfdist.pipelining.schedules.schedule import FORWARD, Schedule


def pipedream(processes: int, micro_batches: int) -> Schedule:
    """Returns the order of 1F1B for micro-batches that are updates of their own, from an empty pipeline until it is empty.

        time = (M + S - 1)(F + B), of which S - 1 only at the beginning and the end of training

    Args:
      processes: number of processes, S.
      micro_batches: number of micro-batches from one time that the pipeline is empty to the next, such as a checkpoint.
    """
    return dataclasses.replace(one_f_one_b(processes, micro_batches), name="pipedream")


def weight_versions(schedule: Schedule, *, vertical_sync: bool = False) -> dict[tuple[int, int], int]:
    """Returns the number of updates in the weights of a stage that compute a micro-batch, by (stage, micro-batch).

    Args:
      schedule: a schedule in which each whole backward pass, "B" or "W", is followed by the update of its stage.
      vertical_sync: whether all stages use the version of the first stage, which is the oldest.
    """
    versions = {}
    for row in schedule.actions:
        updates = dict.fromkeys((action.stage for action in row), 0)
        for action in row:
            if action.kind == FORWARD:
                versions[action.stage, action.micro_batch] = updates[action.stage]
            elif action.completes_backward:
                updates[action.stage] += 1
    return {(v, m): versions[0, m] for v, m in versions} if vertical_sync else versions


def stashed_versions(schedule: Schedule, *, vertical_sync: bool = False) -> tuple[int, ...]:
    """Returns the largest number of versions of a stage's weights that are kept at a time, the newest included, by stage.

    For stage s it is S - s, and S with vertical sync, if there are at least 2 S micro-batches.
    """
    versions = weight_versions(schedule, vertical_sync=vertical_sync)
    found = []
    for stage in range(schedule.stages):
        row = schedule.actions[schedule.process_of(stage)]
        left = [action.micro_batch for action in row if action.stage == stage and action.completes_backward]
        needed = [{versions[stage, m] for m in left[updates:]} for updates in range(len(left) + 1)]
        found.append(max(len({v for v in old if v <= updates} | {updates}) for updates, old in enumerate(needed)))
    return tuple(found)
