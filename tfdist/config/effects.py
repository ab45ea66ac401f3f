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
      processes: number of processes.
      sums_gradients: whether the engine itself sums gradients.
      has_batch_norm: whether the model has batch normalization.
      uses_data_dir: whether the data set takes `--data_dir`.
    """

    replicas: int
    processes: int
    sums_gradients: bool = False
    has_batch_norm: bool = True
    uses_data_dir: bool = True


class Effect(NamedTuple):
    """The condition under which a flag has an effect.

    Attributes:
      flag: name of the flag.
      has_effect: takes the configuration and the `Job`; returns whether the flag has an effect.
      reason: why it has no effect, and the remedy, as a clause.
    """

    flag: str
    has_effect: Callable[[Any, Job], Any]
    reason: str


def _has_several_replicas(config: Any, job: Job) -> bool:
    return job.replicas > 1


def _has_several_processes(config: Any, job: Job) -> bool:
    return job.processes > 1


def _has_compression(config: Any, job: Job) -> bool:
    return bool(config.compression != "none")


def _sums_gradients(config: Any, job: Job) -> bool:
    return not config.parsed.sync.exchanges_weights


def _saves_checkpoints(config: Any, job: Job) -> bool:
    return bool(config.best) or any(config.parsed.checkpoint_every)


def _has_momentum(config: Any, job: Job) -> bool:
    optimizer = config.parsed.optimizer
    return optimizer.name != "sgd" or bool(optimizer.args.get("momentum"))


def _scales_loss(config: Any, job: Job) -> bool:
    # A script or a user-defined model may compute in float16 itself.
    return config.precision == "mixed_float16" or ":" in getattr(config, "model", ":")


_ONE_REPLICA = "one replica sends no gradients. Leave it out, or use several replicas"
_ONE_PROCESS = "the job is one process. Leave it out, or start several"
_NO_COMPRESSION = "nothing is compressed. Add --compression, or leave it out"
_NO_CHECKPOINTS = "no checkpoint is saved, except on preemption. Add --checkpoint_every or --best, or leave it out"

EFFECTS = (
    Effect("bucket_mb", _has_several_replicas, _ONE_REPLICA),
    Effect("bucket_order", _has_several_replicas, _ONE_REPLICA),
    Effect("all_reduce", _has_several_replicas, _ONE_REPLICA),
    Effect("topology", _has_several_replicas, _ONE_REPLICA),
    Effect(
        "topology",
        lambda c, job: parse_all_reduce(c.all_reduce).name in (AUTO, "hierarchical"),
        "the all-reduce algorithm does not depend on hosts. Add --all_reduce=hierarchical, or leave it out",
    ),
    Effect(
        "sync",
        lambda c, job: _has_several_replicas(c, job) or c.parsed.sync.acts_on_one_replica,
        "one replica exchanges nothing. Leave it out, or use several replicas",
    ),
    Effect("compression_check_every", _sums_gradients, "no step sums gradients with this --sync. Leave it out"),
    Effect(
        "balance",
        lambda c, job: job.replicas > 1 or c.balance != "measured",  # weights for missing replicas raise an error
        "one replica computes all rows. Leave it out, or use several replicas",
    ),
    Effect("compression_min_bytes", _has_compression, _NO_COMPRESSION),
    Effect("compression_check_every", _has_compression, _NO_COMPRESSION),
    Effect(
        "measure_every",
        lambda c, job: _sums_gradients(c, job) or not c.measure_every,
        "no step sums gradients with this --sync. Leave it out",
    ),
    Effect("measure_every", lambda c, job: _has_several_replicas(c, job) or not c.measure_every, _ONE_REPLICA),
    Effect(
        "measure_every",
        lambda c, job: (
            not c.measure_every or not isinstance(getattr(c.parsed, "pipeline_schedule", None), NO_FLUSH_SCHEDULES)
        ),
        "communication is measured in steps that end with a flush. Leave it out, or use another --pipeline_schedule",
    ),
    Effect(
        "check_sync_every",
        lambda c, job: job.replicas > 1 or job.sums_gradients or c.check_sync == "gradients",
        "with one replica, there is nothing to compare. Leave it out, or use several replicas",
    ),
    Effect("keep", _saves_checkpoints, _NO_CHECKPOINTS),
    Effect("checkpoint_async", _saves_checkpoints, _NO_CHECKPOINTS),
    Effect("checkpoint_strict", _saves_checkpoints, _NO_CHECKPOINTS),
    Effect(
        "momentum_correction",
        _has_momentum,
        "sgd has no momentum by default. Write --optimizer='sgd(momentum=0.9)', or leave it out",
    ),
    Effect(
        "momentum_correction",
        lambda c, job: c.warmup_steps or c.decay != "none" or c.elastic_batch != "global",
        "the learning rate is constant. Add --warmup_steps or --decay, or leave it out",
    ),
    Effect(
        "max_skipped_steps",
        _scales_loss,
        "no step is skipped without a loss scale. Add --precision=mixed_float16, or leave it out",
    ),
    Effect("start_timeout_seconds", _has_several_processes, _ONE_PROCESS),
    Effect("coordinator", _has_several_processes, _ONE_PROCESS),
    Effect("token_file", _has_several_processes, _ONE_PROCESS),
    Effect("insecure", _has_several_processes, _ONE_PROCESS),
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
    for flag, has_effect, reason in EFFECTS:
        if flag in defaults and getattr(config, flag) != defaults[flag] and not has_effect(config, job):
            yield flag, reason
