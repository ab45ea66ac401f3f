"""Schedules by name, as in `--pipeline_schedule`."""

import dataclasses
from collections.abc import Callable, Mapping

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer
from tfdist.grammar import pipeline_schedule as grammar
from tfdist.pipelining.schedules.checks import check_schedule
from tfdist.pipelining.schedules.csv_file import read_csv
from tfdist.pipelining.schedules.orders import gpipe, interleaved, one_f_one_b, zb_h1
from tfdist.pipelining.schedules.pipedream import pipedream, two_bw
from tfdist.pipelining.schedules.schedule import Schedule

# Functions of the numbers of processes and micro-batches, and of the parameters in the flag.
_SCHEDULES: Mapping[type[grammar.PipelineSchedule], Callable[..., Schedule]] = {
    grammar.GPipe: gpipe,
    grammar.OneFOneB: one_f_one_b,
    grammar.Interleaved: interleaved,
    grammar.ZBH1: zb_h1,
    grammar.PipeDream: pipedream,
    grammar.TwoBW: two_bw,
    grammar.FromCSV: read_csv,
}


def make_schedule(spec: str | grammar.PipelineSchedule, processes: int, micro_batches: int) -> Schedule:
    """Returns a schedule, checked.

    Args:
      spec: "gpipe", "1f1b", "interleaved(chunks=2)", "zb_h1", "pipedream", "2bw" or "csv:FILE", or what
        `parse_pipeline_schedule` makes of it.
      processes: number of processes of a pipeline, at least 1.
      micro_batches: number of micro-batches of a batch, at least 1.

    Raises:
      InputError: the spec is unknown, its file is invalid, or the numbers do not suit it.
    """
    for name, number in (("processes", processes), ("micro_batches", micro_batches)):
        if not is_integer(number) or number < 1:
            raise InputError(f"{name} must be an integer of at least 1. Received: {number!r}. Use 4, for example.")
    kind = grammar.parse_pipeline_schedule(spec) if isinstance(spec, str) else spec
    return check_schedule(_SCHEDULES[type(kind)](processes, micro_batches, **dataclasses.asdict(kind)))
