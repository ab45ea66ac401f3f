"""Measures when the processes of a pipeline run their actions, and how long a step waits for communication."""

import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import NoCommunication
from tfdist.coordination.group import LONG_SECONDS
from tfdist.gradients import Bucketed, Sum
from tfdist.pipelining.execution import ActionClock
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.schedule import KINDS, Action, Schedule
from tfdist.pipelining.schedule_catalog import order_without_flush, steady_state, steps_until_steady
from tfdist.pipelining.timeline import Span, Timeline, simulate
from tfdist.trainer.inspections import REPEATS, Inspection, PeriodicInspection, RunView, time_interleaved

_TRIALS = 3  # number of probe steps; the last is measured, the others compile and fill caches

Record = Callable[[Mapping[str, Timeline]], None]
_log = logging.getLogger(__name__)


class PipelineTimeline(Inspection):
    """Measures the timeline of one step, and compares it with the prediction from the durations of its actions."""

    def __init__(self, run_view: RunView, pipeline: HasStages, step: int, record: Record):
        """Initializes the inspection; `record` is called with timelines by title on the chief."""
        self._run_view, self._pipeline, self._step, self._record = run_view, pipeline, step, record

    def next_step(self, step: int) -> int | None:
        return self._step if step <= self._step else None

    def inspect(self, step: int) -> dict[str, float]:
        strategy = self._pipeline
        if strategy.schedule.has_flush:
            measured_timeline = measure_timeline(self._run_view, strategy, step)
            prediction = expected_timeline(strategy.schedule, measured_timeline)
        else:
            measured_timeline, prediction = measure_steady_state(self._run_view, strategy, step)
        name = strategy.schedule.name
        if strategy.is_chief:
            predicted_title, measured_title = "predicted from median durations", f"measured at step {step}"
            self._record({f"{name}, {predicted_title}": prediction, f"{name}, {measured_title}": measured_timeline})
            measured_text, predicted_text = (
                f"{timeline.makespan:.4g} s, {100 * timeline.bubble:.0f}% idle"
                for timeline in (measured_timeline, prediction)
            )
            text = "Timeline of %s at step %d: %s; predicted without communication and delays: %s."
            _log.info(text, name, step, measured_text, predicted_text)
        return {}


def measure_timeline(run_view: RunView, strategy: HasStages, step: int) -> Timeline:
    """Computes the gradients of a step, without applying them; every process must call it.

    Returns the timeline of the first replica, measured with the clocks of its processes, which may differ between hosts.
    """
    clock = ActionClock()
    probe = run_view.steps.probe(run_view.batch_size, read=clock.read, clock=clock)
    batch, number = run_view.batch(step), tf.constant(step, tf.int64)
    times = _measure_last_trial(lambda: strategy.local(probe(batch, number)[2])[0], strategy)
    return _timeline(strategy.schedule, times)


def measure_steady_state(run_view: RunView, strategy: HasStages, step: int) -> tuple[Timeline, Timeline]:
    """Computes steps of a pipeline without a flush, without updating weights; every process must call it.

    Returns the measured and the expected timeline of one step of the first replica in the steady state.
    """
    count, clock = steps_until_steady(strategy.schedule), ActionClock()
    compute = run_view.steps.timed_steps(run_view.batch_size, clock, count)
    batch, number = run_view.batch(step), tf.constant(step, tf.int64)
    times = _measure_last_trial(lambda: compute(batch, number), strategy)
    order = order_without_flush(strategy.schedule, count)
    rows = [row[len(row) - len(process_times) :] for row, process_times in zip(order.actions, times, strict=True)]
    measured_timeline = _timeline(dataclasses.replace(order, actions=tuple(rows)), times)
    prediction = expected_timeline(order, measured_timeline)
    micro_batches = strategy.micro_batches
    return steady_state(measured_timeline, micro_batches), steady_state(prediction, micro_batches)


def _measure_last_trial(compute: Callable[[], tf.Tensor], strategy: HasStages) -> list[list[list[float]]]:
    """Returns the start and end times of the actions of each process of the first replica in the last probe step."""
    for _ in range(_TRIALS):
        strategy.group.barrier("timeline", LONG_SECONDS)
        times = compute()
    all_times = strategy.group.gather("timeline/times", times.numpy().tolist(), LONG_SECONDS)
    return [all_times[rank] for rank in strategy.grid.ranks_of_replica(0)]


def expected_timeline(schedule: Schedule, measured_timeline: Timeline) -> Timeline:
    """Predicts the timeline of a schedule without communication, from the measured median durations in each stage."""
    durations: dict[tuple[str, int], list[float]] = {}
    for row in measured_timeline.spans:
        for span in row:
            durations.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)
    medians = {key: statistics.median(seconds) for key, seconds in durations.items()}
    forward, backward, input_gradient, weight = (
        [medians.get((kind, stage), 0.0) for stage in range(schedule.stages)] for kind in KINDS
    )
    return simulate(schedule, forward=forward, backward=backward, input_gradient=input_gradient, weight=weight)


def _timeline(schedule: Schedule, times: Sequence[Sequence[Sequence[float]]]) -> Timeline:
    start_time = min(start for row in times for start, _ in row)

    def spans(actions: Sequence[Action], row: Sequence[Sequence[float]]) -> tuple[Span, ...]:
        return tuple(
            Span(action, start - start_time, end - start_time)
            for action, (start, end) in zip(actions, row, strict=True)
        )

    return Timeline(tuple(spans(actions, row) for actions, row in zip(schedule.actions, times, strict=True)))


# Measures how long a step waits for communication, and how long compression takes.
# The compiled step is timed as it is, and with collectives that send nothing: the difference is the exposed communication.
# A third measurement without compression gives the time of encoding and decoding. Probe steps change no state.

_LARGE_FRACTION = 0.2  # fraction of a step
_FIRST_STEP = 100  # step of the first measurement, if the period is longer


class ExposedCommunication(PeriodicInspection):
    """Measures exposed communication periodically, for the first time early in the run."""

    def __init__(self, run_view: RunView, period: int):
        """Initializes the inspection; the first one is before step min(period, 100)."""
        super().__init__(period, first=min(period, _FIRST_STEP))
        self._run_view = run_view
        self._probes = functools.lru_cache(maxsize=1)(self._create_probes)

    def inspect(self, step: int) -> dict[str, float]:
        """See base class. Returns `exposed_communication_seconds` and, with compression, `codec_seconds`."""
        times = self._time(self._run_view.batch(step), tf.constant(step, tf.int64))
        fields = {"exposed_communication_seconds": max(0.0, times["real"] - times["unsent"])}
        if "plain" in times:
            fields["codec_seconds"] = max(0.0, times["unsent"] - times["plain"])
        return fields

    def _time(self, batch: Any, number: tf.Tensor) -> dict[str, float]:
        """Returns the median seconds of each probe step. The steps alternate, and each starts on all processes together."""
        group = self._run_view.steps.strategy.group
        probes = self._probes(*self._run_view.steps.overrides.items())
        for probe in probes.values():
            _run_and_wait(probe, batch, number)  # compiles
        calls = {name: functools.partial(_run_and_wait, probe, batch, number) for name, probe in probes.items()}
        times = time_interleaved(calls, lambda: group.barrier("exposure", LONG_SECONDS), REPEATS)
        return {name: statistics.median(seconds) for name, seconds in times.items()}

    def _create_probes(self, *overrides: tuple[str, str]) -> dict[str, Callable[[Any, tf.Tensor], Any]]:
        steps, size = self._run_view.steps, self._run_view.batch_size
        no_communication = NoCommunication(steps.strategy.collectives)
        probes = {"real": steps.probe(size), "unsent": steps.probe(size, collectives=no_communication)}
        if steps.compressed_names():
            probes["plain"] = steps.probe(size, Bucketed(Sum()), no_communication)
        return probes


def advice(record: Mapping[str, float], compresses: bool, is_small: bool = False) -> str | None:
    """Returns a one-line suggestion if a record shows that a step waits long for communication, else None.

    `compresses` indicates whether gradients are compressed, and `is_small` whether every gradient is too small to be
    compressed.
    """
    exposed_seconds, step = record.get("exposed_communication_seconds", 0.0), record.get("step_seconds", 0.0)
    if not step or exposed_seconds <= _LARGE_FRACTION * step:
        return None
    stronger_method = "a stronger --compression" if compresses else "--compression=auto, bf16 or powersgd(rank=4)"
    compression_hint = "" if is_small else f"{stronger_method}, "
    return (
        f"A step waits for communication for {100 * min(1.0, exposed_seconds / step):.0f}% of its time. "
        f"Try {compression_hint}a larger --batch_size, or a larger --batch_size with --accumulate_steps."
    )


def _run_and_wait(function: Callable[..., Any], *args: Any) -> None:
    for tensor in tf.nest.flatten(function(*args), expand_composites=True):
        tensor.numpy()
