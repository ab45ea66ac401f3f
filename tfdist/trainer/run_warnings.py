"""Warnings about a run before it starts: one rule for each suspicious situation."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster
from tfdist.config.decay import Step, parse_decay
from tfdist.config.strategy_registry import DECLARATIONS
from tfdist.config.sync import Periodic
from tfdist.data import DataSet
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.distribution.strategy import Strategy
from tfdist.errors.exceptions import with_argument_names
from tfdist.optimizers import WarmupAndDecay
from tfdist.reporting.warn_once import warn_once
from tfdist.trainer.options import FitOptions, Schedule
from tfdist.trainer.program import Program

ONE_DEVICE = "one device"  # a situation for which `tfdist verify` has a different message


class RunFacts(NamedTuple):
    """The facts of a run before its first step.

    Attributes:
      program: the program.
      data: the data.
      batches: the batch schedule.
      step: number of completed updates.
      end: step at which the run ends.
      options: options of the run.
    """

    program: Program
    data: DataSet
    batches: BatchSchedule
    step: int
    end: int
    options: FitOptions

    @property
    def rate(self) -> WarmupAndDecay | None:
        """The learning-rate schedule of tfdist; None for another or no schedule."""
        schedule = keras_internals.scheduled_learning_rate(self.program.model.optimizer)
        return schedule if isinstance(schedule, WarmupAndDecay) else None


def _one_device_warning(strategy: Strategy) -> str | None:
    # A launcher may start a single process, for example in an elastic job that has lost all others.
    remedy = next(
        (declaration.single_device_advice for declaration in DECLARATIONS if declaration.name == strategy.name), ""
    )
    if not remedy or strategy.total_devices > 1 or strategy.cluster.source != Cluster().source:
        return None
    return f"Strategy {strategy.name} has one device here, so nothing is distributed. {remedy}"


def _batch_size_warning(run: RunFacts) -> str | None:
    batch_size, examples = run.batches.position.batch_size, run.data.train.size
    if batch_size <= examples or run.data.train.batch_text:
        return None
    return (
        f"A batch of {batch_size} examples is larger than the data, which has {examples}: every step is "
        f"{batch_size / examples:.3g} epochs, and repeats examples within a batch. Lower --batch_size to at most "
        f"{examples}, or give more data."
    )


def _completed_run_warning(run: RunFacts) -> str | None:
    if run.step < run.end or run.step == run.batches.begun_at:
        return None
    position = "has reached its end" if run.step == run.end else f"is beyond its end, step {run.end}"
    return (
        f"The run resumes at step {run.step} and {position}: nothing is left to train. To continue, give more than "
        f"{run.step - run.batches.begun_at} steps, or more epochs."
    )


def _warmup_warning(run: RunFacts) -> str | None:
    rate = run.rate
    if rate is None or not rate.warmup_steps or rate.warmup_steps < run.end:
        return None
    return (
        f"The warmup takes {rate.warmup_steps} steps and the run ends at step {run.end}, so the learning rate never "
        f"reaches {rate.peak:g}. Lower --warmup_steps, or train longer."
    )


def _decay_warning(run: RunFacts) -> str | None:
    decay = parse_decay(run.rate.decay) if run.rate else None
    if not isinstance(decay, Step) or decay.every < run.end:
        return None
    return (
        f"The learning rate falls every {decay.every} steps and the run ends at step {run.end}, so it never falls. "
        "Lower `every` of --decay=step(every=...), or leave the decay out."
    )


def _exchange_warning(run: RunFacts) -> str | None:
    sync, replicas = run.program.settings.sync, run.program.strategy.replicas
    if not isinstance(sync, Periodic) or (replicas == 1 and not sync.acts_on_one_replica):
        return None
    if (exchange := sync.first_local_step + sync.period) <= run.end:
        return None
    effect = "evaluations and saved models use the mean of weights that have never been exchanged"
    if sync.has_center:
        effect = "the center, which is evaluated and saved, keeps its initial weights"
    elif sync.first_local_step >= run.end:
        effect = "replicas never train locally"
    return (
        f"The first exchange of all weights of --sync={sync} is after step {exchange} and the run ends at step {run.end}: "
        f"{effect}. Use a shorter period or warmup of --sync, or train longer."
    )


def _evaluation_warning(run: RunFacts) -> str | None:
    period = run.options.schedule.eval_every
    if not period or run.data.test is not None:
        return None
    return f"--eval_every={period} has no effect, because there is no data to evaluate. Give evaluation data, or leave it out."


def _profile_warning(run: RunFacts) -> str | None:
    first_step = min(run.options.reporting.profile.boundaries, default=0)
    if not first_step or first_step < run.end:
        return None
    return (
        f"The profile begins at step {first_step} and the run ends at step {run.end}, so there is no profile. "
        "Lower --profile_steps, or train longer."
    )


def _steps_between_checkpoints(run: RunFacts) -> int:
    checkpoints = run.options.checkpoints
    return checkpoints.interval.steps if checkpoints and not checkpoints.best else 0


# Flags with a number of steps; the number, 0 for never or the default; and the effect if it exceeds the run.
_PERIODS: tuple[tuple[str, Callable[[RunFacts], int], str], ...] = (
    (
        "eval_every",
        lambda run: 0 if run.data.test is None else run.options.schedule.eval_every,
        "the run is never evaluated, not even at its end",
    ),
    (
        "log_every",
        lambda run: 0 if run.options.schedule.log_every == Schedule().log_every else run.options.schedule.log_every,
        "only its last step is recorded",
    ),
    ("checkpoint_every", _steps_between_checkpoints, "only its last step is saved"),
    (
        "commit_every",
        lambda run: run.options.checkpoints.commit_every if run.options.checkpoints else 0,
        "no in-memory checkpoint is made",
    ),
    ("check_sync_every", lambda run: run.options.checks.check_sync_every, "replicas are never compared"),
    (
        "compression_check_every",
        lambda run: run.options.checks.compression_check_every,
        "the compression error is never measured",
    ),
)


def _period_warning(name: str, steps: Callable[[RunFacts], int], effect: str, run: RunFacts) -> str | None:
    period = steps(run)
    # Counted from the beginning of the run, so that a resumed run has no warning about earlier steps.
    if not period or run.end // period > run.batches.begun_at // period:
        return None
    return f"--{name}={period} is longer than the run, which ends at step {run.end}: {effect}. Lower --{name}, or train longer."


RULES: tuple[Callable[[RunFacts], str | None], ...] = (
    _batch_size_warning,
    _completed_run_warning,
    _warmup_warning,
    _decay_warning,
    _exchange_warning,
    _evaluation_warning,
    *(functools.partial(_period_warning, *row) for row in _PERIODS),
    _profile_warning,
    lambda run: run.program.steps.idle_compression,
)


def warn_about_run(run: RunFacts, data_warnings: Sequence[tuple[str, str]]) -> None:
    """Logs a warning on the chief for each suspicious situation, and `data_warnings`, pairs (text, situation)."""
    strategy = run.program.strategy
    if not strategy.is_chief:
        return
    if text := _one_device_warning(strategy):
        warn_once(with_argument_names(text), situation=ONE_DEVICE)
    for rule in RULES:
        if text := rule(run):
            warn_once(with_argument_names(text))
    for text, situation in data_warnings:
        warn_once(text, situation)
