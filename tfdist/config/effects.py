"""Warnings about flags that were set but have no effect in a job.

`tfdist.config.conflicts` raises errors for contradictory flags. A flag in this table is harmless, but its user expects an
effect.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfdist.config.all_reduce import AUTO, parse_all_reduce
from tfdist.config.conflicts import flag_text
from tfdist.config.pipeline import NO_FLUSH_SCHEDULES
from tfdist.config.strategy_registry import Declaration, strategies_with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Properties of a job that decide whether a flag has an effect.

    Attributes:
      replicas: number of replicas.
      sums_gradients: whether the engine itself sums gradients.
      has_batch_norm: whether the model has batch normalization.
      uses_data_dir: whether the data set takes `--data_dir`.
    """

    replicas: int
    sums_gradients: bool = False
    has_batch_norm: bool = True
    uses_data_dir: bool = True


class Effect(NamedTuple):
    """The condition under which flags have an effect.

    Attributes:
      flags: names of the flags.
      has_effect: takes the configuration and the `Job`; returns whether the flags have an effect.
      reason: why it has no effect, and the remedy, as a clause.
    """

    flags: str
    has_effect: Callable[[Any, Job], Any]
    reason: str


EFFECTS = (
    Effect(
        "bucket_mb bucket_order all_reduce topology measure_every",
        lambda c, job: job.replicas > 1,
        "one replica sends no gradients. Leave it out, or use several replicas",
    ),
    Effect(
        "topology",
        lambda c, job: parse_all_reduce(c.all_reduce).name in (AUTO, "hierarchical"),
        "the all-reduce algorithm does not depend on hosts. Add --all_reduce=hierarchical, or leave it out",
    ),
    Effect(
        "sync",
        lambda c, job: job.replicas > 1 or c.parsed.sync.acts_on_one_replica,
        "one replica exchanges nothing. Leave it out, or use several replicas",
    ),
    Effect(
        "compression_check_every measure_every",
        lambda c, job: not c.parsed.sync.exchanges_weights,
        "no step sums gradients with this --sync. Leave it out",
    ),
    Effect(
        "compression_min_bytes compression_check_every",
        lambda c, job: c.compression != "none",
        "nothing is compressed. Add --compression, or leave it out",
    ),
    Effect(
        "measure_every",
        lambda c, job: not isinstance(getattr(c.parsed, "pipeline_schedule", None), NO_FLUSH_SCHEDULES),
        "communication is measured in steps that end with a flush. Leave it out, or use another --pipeline_schedule",
    ),
    Effect(
        "check_sync_every",
        lambda c, job: job.replicas > 1 or job.sums_gradients or c.check_sync == "gradients",
        "with one replica, there is nothing to compare. Leave it out, or use several replicas",
    ),
    Effect(
        "keep checkpoint_async checkpoint_strict",
        lambda c, job: c.best or any(c.parsed.checkpoint_every),
        "no checkpoint is saved, except on preemption. Add --checkpoint_every or --best, or leave it out",
    ),
    Effect(
        "momentum_correction",
        lambda c, job: c.parsed.optimizer.name != "sgd" or c.parsed.optimizer.args.get("momentum"),
        "sgd has no momentum by default. Write --optimizer='sgd(momentum=0.9)', or leave it out",
    ),
    Effect("shard_min_elements", lambda c, job: c.shard != "none", "nothing is sharded. Add --shard, or leave it out"),
    Effect(
        "batch_norm",
        lambda c, job: job.has_batch_norm,
        "the model has no BatchNormalization layer. Leave it out, or add such layers",
    ),
    Effect(
        "data_dir",
        lambda c, job: job.uses_data_dir,
        "the data set does not read files from there. Leave it out, or choose another --dataset",
    ),
)


def effect_warnings(config: Any, job: Job, strategy: Declaration) -> list[str]:
    """Returns a warning for each flag that differs from its default but has no effect, in field order.

    The strategy must not be "auto". Flags that the configuration does not have are skipped.
    """
    warnings: dict[str, str] = {}
    for name, reason in (*_unsupported_options(config, strategy), *_ineffective_flags(config, job)):
        warnings.setdefault(name, f"{flag_text(name, getattr(config, name))} has no effect: {reason}.")
    return [warnings[field.name] for field in dataclasses.fields(config) if field.name in warnings]


def _unsupported_options(config: Any, strategy: Declaration) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(config):
        flag = field.metadata["flag"]
        is_other_option = flag.is_option and strategy.options is not None and field.name not in strategy.options
        if is_other_option and not flag.neutral_values and getattr(config, field.name) != field.default:
            names = " or ".join(strategies_with(field.name))
            yield field.name, f"it is for --strategy={names}, and the strategy is {strategy.name}. Leave it out"


def _ineffective_flags(config: Any, job: Job) -> Iterator[tuple[str, str]]:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for flags, has_effect, reason in EFFECTS:
        for flag in flags.split():
            is_set = flag in defaults and getattr(config, flag) != defaults[flag]
            is_off = flag == "measure_every" and is_set and not config.measure_every
            if is_set and not is_off and not has_effect(config, job):
                yield flag, reason
