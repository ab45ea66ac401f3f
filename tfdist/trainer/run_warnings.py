"""Warnings about suspicious situations of a run before it starts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster
from tfdist.config.decay import Step, parse_decay
from tfdist.config.strategy_registry import DECLARATIONS
from tfdist.config.sync import Periodic
from tfdist.data import DataSet
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.distribution.strategy import Strategy
from tfdist.errors import with_argument_names
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


def _one_device_warning(strategy: Strategy) -> str | None:
    # A launcher may start a single process, for example in an elastic job that has lost all others.
    remedy = next(
        (declaration.single_device_advice for declaration in DECLARATIONS if declaration.name == strategy.name), ""
    )
    if not remedy or strategy.total_devices > 1 or strategy.cluster.source != Cluster().source:
        return None
    return f"Strategy {strategy.name} has one device here, so nothing is distributed. {remedy}"


def _warnings(run: RunFacts) -> Iterator[str | None]:
    yield from _length_warnings(run)
    yield from _learning_rate_warnings(run)
    yield _exchange_warning(run)
    yield from _period_warnings(run)
    yield run.program.steps.idle_compression


def _length_warnings(run: RunFacts) -> Iterator[str]:
    batch_size, examples = run.batches.position.batch_size, run.data.train.size
    if batch_size > examples and not run.data.train.batch_text:
        yield (
            f"A batch of {batch_size} examples is larger than the data, which has {examples}: every step is "
            f"{batch_size / examples:.3g} epochs, and repeats examples within a batch. Lower --batch_size to at most "
            f"{examples}, or give more data."
        )
    if run.step >= run.end and run.step != run.batches.begun_at:
        position = "has reached its end" if run.step == run.end else f"is beyond its end, step {run.end}"
        yield (
            f"The run resumes at step {run.step} and {position}: nothing is left to train. To continue, give more than "
            f"{run.step - run.batches.begun_at} steps, or more epochs."
        )


def _learning_rate_warnings(run: RunFacts) -> Iterator[str]:
    rate = keras_internals.scheduled_learning_rate(run.program.model.optimizer)
    if not isinstance(rate, WarmupAndDecay):
        return
    if rate.warmup_steps and rate.warmup_steps >= run.end:
        yield (
            f"The warmup takes {rate.warmup_steps} steps and the run ends at step {run.end}, so the learning rate never "
            f"reaches {rate.peak:g}. Lower --warmup_steps, or train longer."
        )
    decay = parse_decay(rate.decay)
    if isinstance(decay, Step) and decay.every >= run.end:
        yield (
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


def _period_warnings(run: RunFacts) -> Iterator[str]:
    schedule, checks, checkpoints = run.options.schedule, run.options.checks, run.options.checkpoints
    evaluates = run.data.test is not None
    if schedule.eval_every and not evaluates:
        yield (
            f"--eval_every={schedule.eval_every} has no effect, because there is no data to evaluate. Give evaluation data, "
            "or leave it out."
        )
    # The number of steps, 0 for never or the default, of each flag; and the effect if it exceeds the run.
    periods = (
        ("eval_every", schedule.eval_every * evaluates, "the run is never evaluated, not even at its end"),
        (
            "log_every",
            schedule.log_every * (schedule.log_every != Schedule().log_every),
            "only its last step is recorded",
        ),
        (
            "checkpoint_every",
            checkpoints.interval.steps if checkpoints and not checkpoints.best else 0,
            "only its last step is saved",
        ),
        ("commit_every", checkpoints.commit_every if checkpoints else 0, "no in-memory checkpoint is made"),
        ("check_sync_every", checks.check_sync_every, "replicas are never compared"),
        ("compression_check_every", checks.compression_check_every, "the compression error is never measured"),
    )
    for name, period, effect in periods:
        # Counted from the beginning of the run, so that a resumed run has no warning about earlier steps.
        if period and run.end // period <= run.batches.begun_at // period:
            yield (
                f"--{name}={period} is longer than the run, which ends at step {run.end}: {effect}. Lower --{name}, or train "
                "longer."
            )
    first_step = min(run.options.reporting.profile.boundaries, default=0)
    if first_step and first_step >= run.end:
        yield (
            f"The profile begins at step {first_step} and the run ends at step {run.end}, so there is no profile. "
            "Lower --profile_steps, or train longer."
        )


def warn_about_run(run: RunFacts, data_warnings: Sequence[tuple[str, str]]) -> None:
    """Logs a warning on the chief for each suspicious situation, and `data_warnings`, pairs (text, situation)."""
    strategy = run.program.strategy
    if not strategy.is_chief:
        return
    if text := _one_device_warning(strategy):
        warn_once(with_argument_names(text), situation=ONE_DEVICE)
    for text in filter(None, _warnings(run)):
        warn_once(with_argument_names(text))
    for text, situation in data_warnings:
        warn_once(text, situation)
