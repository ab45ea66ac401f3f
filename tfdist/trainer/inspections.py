"""Chooses the inspections of a run by its `Checks`."""

from collections.abc import Callable, Mapping

import tensorflow as tf

from tfdist.diagnostics import (
    Auto,
    AutoAllReduce,
    CompressionErrorMonitor,
    Exposure,
    GradientNorms,
    Inspection,
    PipelineTimeline,
    ReplicaDivergence,
    RunView,
)
from tfdist.pipelining.has_stages import pipeline_of
from tfdist.pipelining.staleness import without_flush_of
from tfdist.trainer.options import Checks, Reporting


def inspections(
    checks: Checks,
    run_view: RunView,
    replicated: Callable[[], Mapping[str, tf.Variable]],
    reporting: Reporting,
) -> list[Inspection]:
    """Returns the inspections of a run, the same on every process.

    Args:
      checks: what to inspect.
      run_view: the run.
      replicated: returns the variables that are equal on all replicas, by name.
      reporting: gets what was measured, on the chief.
    """
    choice, summed = run_view.steps.compression.choice, run_view.steps.sums_gradients
    found: list[Inspection] = []
    if run_view.steps.needs_all_reduce_table:
        found.append(AutoAllReduce(run_view, reporting.record_all_reduce_table))
    if choice and summed:
        found.append(Auto(run_view, choice))
    if checks.compression_check_every and summed:
        found.append(CompressionErrorMonitor(run_view, checks.compression_check_every, checks.compression_max_error))
    # Its probe steps have a flush.
    if checks.measure_every and summed and not without_flush_of(run_view.steps.strategy):
        found.append(Exposure(run_view, checks.measure_every))
    if checks.check_sync_every and checks.check_sync == "gradients":
        found.append(GradientNorms(run_view, checks.check_sync_every))
    elif checks.check_sync_every:
        found.append(ReplicaDivergence(run_view, checks.check_sync_every, replicated))
    if reporting.profile.boundaries and (pipeline := pipeline_of(run_view.steps.strategy)):
        found.append(
            PipelineTimeline(run_view, pipeline, min(reporting.profile.boundaries), reporting.record_timelines)
        )
    return found
