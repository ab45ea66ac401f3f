"""Warnings about a run before it starts: one function for each suspicious situation, and the table of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

from tfdist import keras_internals
from tfdist.checkpoint.manager import Checkpoints
from tfdist.cluster.environment import Cluster
from tfdist.config.decay import Step, parse_decay
from tfdist.config.monitor import parse_period
from tfdist.config.strategy_registry import DECLARATIONS
from tfdist.config.sync import Periodic, Sync
from tfdist.data import DataSet
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.distribution.strategy import Strategy
from tfdist.errors.exceptions import with_argument_names
from tfdist.optimizers import WarmupAndDecay
from tfdist.reporting.warn_once import warn_once
from tfdist.trainer.options import Checks, Reporting, Schedule

ONE_DEVICE = "one device"  # a situation of which `tfdist verify` has its own text


class RunFacts(NamedTuple):
    """What is known of a run before its first step.

    Attributes:
      optimizer: the optimizer.
      data: the data.
      batches: its batches.
      step: updates done so far.
      end: step at which it ends.
      schedule: what happens at which step.
      checks: what is measured and checked.
      reporting: where it is recorded.
      checkpoints: how it is saved; None if it is not.
      sync: how replicas are kept in agreement.
      replicas: number of replicas.
      idle_compression: what to say about a compression without effect; "" if it has one.
    """

    optimizer: keras.Optimizer
    data: DataSet
    batches: BatchSchedule
    step: int
    end: int
    schedule: Schedule
    checks: Checks
    reporting: Reporting
    checkpoints: Checkpoints | None
    sync: Sync
    replicas: int
    idle_compression: str = ""

    @property
    def rate(self) -> WarmupAndDecay | None:
        """The schedule of the learning rate; None without one, or for one of Keras's."""
        found = keras_internals.scheduled_learning_rate(self.optimizer)
        return found if isinstance(found, WarmupAndDecay) else None


def _one_device(strategy: Strategy) -> str | None:
    # A launcher may start a single process, for example an elastic job that has lost all others.
    remedy = next((found.with_one_device for found in DECLARATIONS if found.name == strategy.name), "")
    if not remedy or strategy.devices_in_total > 1 or strategy.cluster.source != Cluster().source:
        return None
    return f"Strategy {strategy.name} has one device here, so nothing is distributed. {remedy}"


def _batch_exceeds_data(run: RunFacts) -> str | None:
    batch_size, examples = run.batches.position.batch_size, run.data.train.size
    if batch_size <= examples or run.data.train.batch_text:
        return None
    return (
        f"A batch of {batch_size} examples is larger than the data, which has {examples}: every step is "
        f"{batch_size / examples:.3g} epochs, and repeats examples within a batch. Lower --batch_size to at most "
        f"{examples}, or give more data."
    )


def _nothing_left(run: RunFacts) -> str | None:
    if run.step < run.end or run.step == run.batches.begun_at:
        return None
    where = "has reached its end" if run.step == run.end else f"is beyond its end, step {run.end}"
    return (
        f"The run resumes at step {run.step} and {where}: nothing is left to train. To train on, give more than "
        f"{run.step - run.batches.begun_at} steps, or more epochs."
    )


def _warmup_exceeds_run(run: RunFacts) -> str | None:
    rate = run.rate
    if rate is None or not rate.warmup_steps or rate.warmup_steps < run.end:
        return None
    return (
        f"The warmup takes {rate.warmup_steps} steps and the run ends at step {run.end}, so the learning rate never "
        f"reaches {rate.peak:g}. Lower --warmup_steps, or train longer."
    )


def _never_decays(run: RunFacts) -> str | None:
    decay = parse_decay(run.rate.decay) if run.rate else None
    if not isinstance(decay, Step) or decay.every < run.end:
        return None
    return (
        f"The learning rate falls every {decay.every} steps and the run ends at step {run.end}, so it never falls. "
        "Lower `every` of --decay=step(every=...), or leave the decay out."
    )


def _never_exchanges(run: RunFacts) -> str | None:
    sync = run.sync
    if not isinstance(sync, Periodic) or (run.replicas == 1 and not sync.acts_on_one_replica):
        return None
    if (exchange := sync.first_local_step + sync.period) <= run.end:
        return None
    effect = "what is evaluated and saved is the mean of weights that have never been exchanged"
    if sync.has_center:
        effect = "the center, which is evaluated and saved, keeps its initial weights"
    elif sync.first_local_step >= run.end:
        effect = "replicas never train locally"
    return (
        f"The first exchange of all weights of --sync={sync} is after step {exchange} and the run ends at step {run.end}: "
        f"{effect}. Use a shorter period or warmup of --sync, or train longer."
    )


def _never_evaluates(run: RunFacts) -> str | None:
    every = run.schedule.eval_every
    if every and run.data.test is None:
        return (
            f"--eval_every={every} has no effect, because there is no data to evaluate. Give evaluation data, or leave it "
            "out."
        )
    return _never("eval_every", every, "the run is never evaluated, not even at its end", run)


def _never_records(run: RunFacts) -> str | None:
    every = run.schedule.log_every
    if every == Schedule().log_every:
        return None
    return _never("log_every", every, "only its last step is recorded", run)


def _never_saves(run: RunFacts) -> str | None:
    if run.checkpoints and run.checkpoints.best:
        return None
    every = parse_period(run.checkpoints.every).steps if run.checkpoints else 0
    return _never("checkpoint_every", every, "only its last step is saved", run)


def _never_commits(run: RunFacts) -> str | None:
    every = run.checkpoints.commit_every if run.checkpoints else 0
    return _never("commit_every", every, "no in-memory checkpoint is made", run)


def _never_checks_replicas(run: RunFacts) -> str | None:
    return _never("check_sync_every", run.checks.check_sync_every, "replicas are never compared", run)


def _never_checks_compression(run: RunFacts) -> str | None:
    every = run.checks.compression_check_every
    return _never("compression_check_every", every, "the compression error is never measured", run)


def _never_profiles(run: RunFacts) -> str | None:
    first = min(run.reporting.profile.boundaries, default=0)
    if not first or first < run.end:
        return None
    return (
        f"The profile begins at step {first} and the run ends at step {run.end}, so there is no profile. "
        "Lower --profile_steps, or train longer."
    )


def _never(name: str, every: int, what: str, run: RunFacts) -> str | None:
    # Counted from the beginning of the run, so that a resumed run is not told what has already happened.
    if not every or run.end // every > run.batches.begun_at // every:
        return None
    return f"--{name}={every} is longer than the run, which ends at step {run.end}: {what}. Lower --{name}, or train longer."


RULES: tuple[Callable[[RunFacts], str | None], ...] = (
    _batch_exceeds_data,
    _nothing_left,
    _warmup_exceeds_run,
    _never_decays,
    _never_exchanges,
    _never_evaluates,
    _never_records,
    _never_saves,
    _never_commits,
    _never_checks_replicas,
    _never_checks_compression,
    _never_profiles,
    lambda run: run.idle_compression,
)


def warn_of_run(strategy: Strategy, facts: RunFacts, of_data: Sequence[tuple[str, str]]) -> None:
    """Logs a warning for each suspicious situation, on the chief.

    Args:
      strategy: strategy of the run.
      facts: what is known of the run.
      of_data: texts and situations of warnings about its data.
    """
    if not strategy.is_chief:
        return
    if text := _one_device(strategy):
        warn_once(with_argument_names(text), situation=ONE_DEVICE)
    for rule in RULES:
        if text := rule(facts):
            warn_once(with_argument_names(text))
    for text, situation in of_data:
        warn_once(text, situation)
