"""Measures how long a step waits for communication, and how long compression takes.

The same compiled step is timed as it is and with collectives that send nothing: the difference is the communication
that is not hidden by computation. The difference to a third timing, also without compression, is the time spent in
encoders and decoders. These probe steps leave weights, optimizer state and all other state unchanged.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.collectives import NoCommunication
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.diagnostics.interface import Periodic, RunView
from tfdist.diagnostics.timing import REPEATS
from tfdist.gradients import Bucketed, Sum

MUCH = 0.2  # fraction of a step
EARLY = 100  # step of the first measurement, if the period is longer

_log = logging.getLogger(__name__)


class Exposure(Periodic):
    """Measures exposed communication periodically, the first time early in the run."""

    def __init__(self, run_view: RunView, every: int):
        """Initializes the inspection.

        Args:
          run_view: the run to inspect.
          every: steps between measurements; the first is before step min(every, 100).
        """
        super().__init__(every, first=min(every, EARLY))
        self._run_view = run_view
        self._plan: dict[str, str] | None = None
        self._probes: dict[str, Callable[[Any, tf.Tensor], Any]] = {}

    def look(self, step: int) -> dict[str, float]:
        """See base class; `exposed_communication_seconds` and `codec_seconds`."""
        times = self._time(self._run_view.batch(step), tf.constant(step, tf.int64))
        found = {"exposed_communication_seconds": max(0.0, times["real"] - times["unsent"])}
        if "plain" in times:
            found["codec_seconds"] = max(0.0, times["unsent"] - times["plain"])
        return found

    def _time(self, batch: Any, number: tf.Tensor) -> dict[str, float]:
        """Returns the median seconds of each probe step; the steps alternate, synchronized over all processes."""
        group = self._run_view.steps.strategy.group
        probes = self._made()
        for probe in probes.values():
            _wait(probe(batch, number))  # compiles
        seconds: dict[str, list[float]] = {name: [] for name in probes}
        for _ in range(REPEATS):
            for name, probe in probes.items():
                group.barrier("exposure", LONG_SECONDS)
                began = time.perf_counter()
                _wait(probe(batch, number))
                seconds[name].append(time.perf_counter() - began)
        return {name: statistics.median(values) for name, values in seconds.items()}

    def _made(self) -> dict[str, Callable[[Any, tf.Tensor], Any]]:
        steps, size = self._run_view.steps, self._run_view.batch_size
        unsent = NoCommunication(steps.strategy.collectives)
        if self._plan != steps.overrides:
            self._plan = dict(steps.overrides)
            self._probes = {"real": steps.probe(size), "unsent": steps.probe(size, collectives=unsent)}
            if steps.compresses:
                self._probes["plain"] = steps.probe(size, Bucketed(Sum()), unsent)
        return self._probes


def advice(record: Mapping[str, float], compresses: bool, is_small: bool = False) -> str | None:
    """Returns a one-line suggestion if communication is exposed for a large part of a step, else None.

    Args:
      record: a training record.
      compresses: whether gradients are compressed.
      is_small: whether every gradient is smaller than those that are compressed.
    """
    exposed, step = record.get("exposed_communication_seconds", 0.0), record.get("step_seconds", 0.0)
    if not step or exposed <= MUCH * step:
        return None
    first = "a stronger --compression" if compresses else "--compression=auto, bf16 or powersgd(rank=4)"
    tried = "" if is_small else f"{first}, "
    return (
        f"A step waits {100 * min(1.0, exposed / step):.0f}% of its time on communication. Try {tried}a larger "
        "--batch_size, or --accumulate_steps with it."
    )


def _wait(result: Any) -> None:
    for tensor in tf.nest.flatten(result, expand_composites=True):
        tensor.numpy()
