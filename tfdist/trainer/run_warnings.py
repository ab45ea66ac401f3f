"""Warns about suspicious settings of a run before it starts."""

from collections.abc import Iterator, Sequence

import keras

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster
from tfdist.config.decay import Step, parse_decay
from tfdist.config.strategy_registry import DECLARATIONS
from tfdist.config.sync import Periodic
from tfdist.data import DatasetSplits
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.distribution.strategy import Strategy
from tfdist.errors import with_argument_names
from tfdist.optimizers import WarmupAndDecay
from tfdist.reporting.warn_once import warn_once
from tfdist.trainer.program import Program

ONE_DEVICE = "one device"  # see `warn_once`; `tfdist verify` has a different message for this situation


def _one_device_warning(strategy: Strategy) -> str | None:
    # A launcher may start a single process, for example in an elastic job that has lost all other processes.
    remedy = next((d.single_device_advice for d in DECLARATIONS if d.name == strategy.name), "")
    if not remedy or strategy.total_devices > 1 or strategy.cluster.source != Cluster().source:
        return None
    return f"Strategy {strategy.name} has one device here, so nothing is distributed. {remedy}"


def _length_warnings(data: DatasetSplits, batches: BatchSchedule, step: int, end: int) -> Iterator[str]:
    batch_size, examples = batches.position.batch_size, data.train.size
    if batch_size > examples and not data.train.batch_text:
        yield (
            f"A batch of {batch_size} examples is larger than the data, which has {examples}: every step is "
            f"{batch_size / examples:.3g} epochs, and repeats examples within a batch. Lower --batch_size to at most "
            f"{examples}, or use more data."
        )
    if step >= end and step != batches.begun_at:
        position = "has reached its end" if step == end else f"is beyond its end, step {end}"
        yield (
            f"The run resumes at step {step} and {position}: there is nothing left to train. To continue, specify more than "
            f"{step - batches.begun_at} steps, or more epochs."
        )


def _learning_rate_warnings(optimizer: keras.Optimizer, end: int) -> Iterator[str]:
    rate = keras_internals.scheduled_learning_rate(optimizer)
    if not isinstance(rate, WarmupAndDecay):
        return
    if rate.warmup_steps and rate.warmup_steps >= end:
        yield (
            f"The warmup takes {rate.warmup_steps} steps and the run ends at step {end}, so the learning rate never "
            f"reaches {rate.peak:g}. Lower --warmup_steps, or train longer."
        )
    decay = parse_decay(rate.decay)
    if isinstance(decay, Step) and decay.every >= end:
        yield (
            f"The learning rate is reduced every {decay.every} steps and the run ends at step {end}, so it is never reduced. "
            "Lower `every` of --decay=step(every=...), or remove --decay."
        )


def _exchange_warning(program: Program, end: int) -> str | None:
    sync, replicas = program.settings.sync, program.strategy.replicas
    if not isinstance(sync, Periodic) or (replicas == 1 and not sync.acts_on_one_replica):
        return None
    if (exchange := sync.first_local_step + sync.period) <= end:
        return None
    effect = "evaluations and saved models use the mean of weights that have never been exchanged"
    if sync.has_center:
        effect = "the center, which is evaluated and saved, keeps its initial weights"
    elif sync.first_local_step >= end:
        effect = "replicas never train locally"
    return (
        f"With --sync={sync}, the first exchange of all weights is after step {exchange} and the run ends at step {end}: "
        f"{effect}. Use a shorter period or warmup in --sync, or train longer."
    )


def _evaluation_warning(period: int, evaluates: bool, begun_at: int, end: int) -> str | None:
    if period and not evaluates:
        return (
            f"--eval_every={period} has no effect, because there is no data to evaluate. Specify evaluation data, or remove "
            "--eval_every."
        )
    # Counted from the beginning of the run, because a resumed run may have been evaluated before.
    if period and end // period <= begun_at // period:
        return (
            f"--eval_every={period} is more than the steps of the run, which ends at step {end}: the run is never evaluated, "
            "not even at its end. Lower --eval_every, or train longer."
        )
    return None


def warn_about_run(
    program: Program,
    data: DatasetSplits,
    batches: BatchSchedule,
    step: int,
    end: int,
    eval_every: int,
    data_warnings: Sequence[tuple[str, str]],
) -> None:
    """Logs a warning on the chief for each suspicious setting of a run that begins after `step` updates and ends at `end`.

    Also logs `data_warnings`, the result of `check_examples`. See `Schedule` for `eval_every`.
    """
    if not program.strategy.is_chief:
        return
    if text := _one_device_warning(program.strategy):
        warn_once(with_argument_names(text), situation=ONE_DEVICE)
    warnings = (
        *_length_warnings(data, batches, step, end),
        *_learning_rate_warnings(program.model.optimizer, end),
        _exchange_warning(program, end),
        _evaluation_warning(eval_every, data.test is not None, batches.begun_at, end),
        program.steps.idle_compression,
    )
    for text in filter(None, warnings):
        warn_once(with_argument_names(text))
    for text, situation in data_warnings:
        warn_once(text, situation)
