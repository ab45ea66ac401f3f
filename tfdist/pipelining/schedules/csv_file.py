"""Schedules as CSV files, in the format of torch.distributed.pipelining and of torchtitan's `pipeline_parallel_schedule_csv`.

One line for each process, one cell for each action in order: `0F0,0F1,,0B0`. A cell is the stage, the kind (F; B, or I and W)
and the micro-batch; empty cells show idle time and have no effect. Cells of communication (`0SEND_F0`, `1RECV_F0`), which
`_dump_csv` writes as well, are skipped, as messages follow from the actions.
"""

import re

from tfdist.errors import InputError
from tfdist.pipelining.schedules.schedule import Action, Schedule
from tfdist.storage import AnyPath, path_of, storage_of
from tfdist.storage.text import read_text

_ACTION = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_SKIPPED = re.compile(r"[0-9]*(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*|")


def to_csv(schedule: Schedule) -> str:
    """Returns the text of a file that `parse_csv` reads, and torch.distributed.pipelining's `_load_csv`."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def parse_csv(processes: int, micro_batches: int, text: str, source: str) -> Schedule:
    """Returns the schedule in a file, which `check_schedule` has yet to check.

    Args:
      processes: number of processes.
      micro_batches: number of micro-batches.
      text: contents of the file.
      source: its path, for errors.

    Raises:
      InputError: a cell is not an action; the message has the number of its line.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        actions = []
        for cell in map(str.strip, line.split(",")):
            found = _ACTION.fullmatch(cell)
            if found:
                actions.append(Action(found[2], int(found[1]), int(found[3])))
            elif not _SKIPPED.fullmatch(cell):
                raise InputError(
                    f"{source}, line {number}: a cell must be stage, F, B, I or W, and micro-batch, such as 0F0, or empty. "
                    f"Received: {cell[:40]}. Write the schedule with a line for each process."
                )
        rows.append(tuple(actions))
    while rows and not rows[-1]:
        rows.pop()
    stages = 1 + max((action.stage for row in rows for action in row), default=-1)
    if not stages:
        raise InputError(
            f"{source} must have a line of actions for each process. Received: none. Write 0F0,0F1,0B0,0B1."
        )
    return Schedule(f"csv:{source}", processes, stages, micro_batches, tuple(rows))


def read_csv(processes: int, micro_batches: int, file: AnyPath) -> Schedule:
    """Reads a schedule; see `parse_csv`.

    Raises:
      InputError: there is no such file, or it contains something else.
    """
    rule = "csv:FILE must name a file with a schedule, a line for each process."
    text = read_text(file, rule, "Write, for example, csv:schedule.csv.")
    return parse_csv(processes, micro_batches, text, str(file))


def write_csv(schedule: Schedule, file: AnyPath) -> None:
    """Writes a schedule as a file that `read_csv` reads."""
    path = path_of(file)
    storage_of(path).replace(path, to_csv(schedule).encode())
