"""Chooses the inspections of a run by its `Checks`."""

from collections.abc import Callable, Mapping

import tensorflow as tf

from tfdist.diagnostics import (
    Auto,
    CompressionErrorMonitor,
    Exposure,
    GradientNorms,
    Inspection,
    ReplicaDivergence,
    Site,
)
from tfdist.trainer.options import Checks


def inspections(checks: Checks, site: Site, replicated: Callable[[], Mapping[str, tf.Variable]]) -> list[Inspection]:
    """Returns the inspections of a run, the same on every process.

    Args:
      checks: what to inspect.
      site: the run.
      replicated: returns the variables that are equal on all replicas, by name.
    """
    choice, several = site.steps.compression.choice, site.steps.strategy.replicas > 1
    found: list[Inspection] = []
    if choice and several:
        found.append(Auto(site, choice))
    if checks.compression_check_every:
        found.append(CompressionErrorMonitor(site, checks.compression_check_every, checks.compression_max_error))
    if checks.measure_every and several:
        found.append(Exposure(site, checks.measure_every))
    if checks.check_sync_every and checks.check_sync == "gradients":
        found.append(GradientNorms(site, checks.check_sync_every))
    elif checks.check_sync_every:
        found.append(ReplicaDivergence(site, checks.check_sync_every, replicated))
    return found
