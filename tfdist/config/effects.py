"""Flags that were set but have no effect in a job: for each, the condition under which it has one.

Combinations that contradict each other are refused by `tfdist.config.conflicts`. A flag in this table is harmless,
but its user expects an effect.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfdist.config.all_reduce import AUTO, parse_all_reduce
from tfdist.config.conflicts import flag_text
from tfdist.config.pipeline import WITHOUT_FLUSH
from tfdist.config.strategy_registry import Declaration, strategies_with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Properties of a job, besides its flags, that decide whether a flag has an effect.

    Attributes:
      replicas: number of replicas.
      processes: number of processes.
      sums_gradients: whether the engine sums gradients by itself.
      has_batch_norm: whether the model has batch normalization.
      uses_data_dir: whether the data set takes `--data_dir`.
    """

    replicas: int
    processes: int
    sums_gradients: bool = False
    has_batch_norm: bool = True
    uses_data_dir: bool = True


class Effect(NamedTuple):
    """When a flag has an effect.

    Attributes:
      flag: name of the flag.
      has_effect: takes the configuration and the `Job`; returns whether the flag has an effect.
      why_not: the reason if it has none, and the remedy, as a clause.
    """

    flag: str
    has_effect: Callable[[Any, Job], Any]
    why_not: str


def _sends(config: Any, job: Job) -> bool:
    return job.replicas > 1


def _has_processes(config: Any, job: Job) -> bool:
    return job.processes > 1


def _compresses(config: Any, job: Job) -> bool:
    return bool(config.compression != "none")


def _sums_gradients(config: Any, job: Job) -> bool:
    return not config.parsed.sync.exchanges_weights


def _saves(config: Any, job: Job) -> bool:
    return bool(config.best) or any(config.parsed.checkpoint_every)


def _has_momentum(config: Any, job: Job) -> bool:
    optimizer = config.parsed.optimizer
    return optimizer.name != "sgd" or bool(optimizer.args.get("momentum"))


def _scales_loss(config: Any, job: Job) -> bool:
    # A script, or a model of the user's own, may compute in float16 by itself.
    return config.precision == "mixed_float16" or ":" in getattr(config, "model", ":")


_NOTHING_SENT = "one replica sends no gradients. Leave it out, or use several replicas"
_ONE_PROCESS = "the job is one process. Leave it out, or start several"
_NO_COMPRESSION = "nothing is compressed. Add --compression, or leave it out"
_NO_CHECKPOINTS = "no checkpoint is saved, except on preemption. Add --checkpoint_every or --best, or leave it out"

EFFECTS = (
    Effect("bucket_mb", _sends, _NOTHING_SENT),
    Effect("bucket_order", _sends, _NOTHING_SENT),
    Effect("all_reduce", _sends, _NOTHING_SENT),
    Effect("topology", _sends, _NOTHING_SENT),
    Effect(
        "topology",
        lambda c, job: parse_all_reduce(c.all_reduce).name in (AUTO, "hierarchical"),
        "the all-reduce algorithm does not depend on hosts. Add --all_reduce=hierarchical, or leave it out",
    ),
    Effect(
        "sync",
        lambda c, job: _sends(c, job) or c.parsed.sync.acts_on_one_replica,
        "one replica exchanges nothing. Leave it out, or use several replicas",
    ),
    Effect("compression_check_every", _sums_gradients, "no step sums gradients with this --sync. Leave it out"),
    Effect(
        "balance",
        lambda c, job: job.replicas > 1 or c.balance != "measured",  # weights of other replicas are refused
        "one replica computes all rows. Leave it out, or use several replicas",
    ),
    Effect("compression_min_bytes", _compresses, _NO_COMPRESSION),
    Effect("compression_check_every", _compresses, _NO_COMPRESSION),
    Effect(
        "measure_every",
        lambda c, job: _sums_gradients(c, job) or not c.measure_every,
        "no step sums gradients with this --sync. Leave it out",
    ),
    Effect("measure_every", lambda c, job: _sends(c, job) or not c.measure_every, _NOTHING_SENT),
    Effect(
        "measure_every",
        lambda c, job: (
            not c.measure_every or not isinstance(getattr(c.parsed, "pipeline_schedule", None), WITHOUT_FLUSH)
        ),
        "communication is measured in steps that end with a flush. Leave it out, or use another --pipeline_schedule",
    ),
    Effect(
        "check_sync_every",
        lambda c, job: job.replicas > 1 or job.sums_gradients or c.check_sync == "gradients",
        "one replica has no other to be compared with. Leave it out, or use several replicas",
    ),
    Effect("keep", _saves, _NO_CHECKPOINTS),
    Effect("checkpoint_async", _saves, _NO_CHECKPOINTS),
    Effect("checkpoint_strict", _saves, _NO_CHECKPOINTS),
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
    Effect("start_timeout_seconds", _has_processes, _ONE_PROCESS),
    Effect("coordinator", _has_processes, _ONE_PROCESS),
    Effect("token_file", _has_processes, _ONE_PROCESS),
    Effect("insecure", _has_processes, _ONE_PROCESS),
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


def without_effect(config: Any, job: Job, strategy: Declaration) -> list[str]:
    """Returns a warning for each flag that differs from its default but has no effect, in the order of the fields.

    Args:
      config: a configuration whose strategy is not "auto" any more. Flags that it does not have are skipped.
      job: the job.
      strategy: declaration of the configuration's strategy.
    """
    warnings: dict[str, str] = {}
    for name, why_not in (*_other_options(config, strategy), *_ineffective(config, job)):
        warnings.setdefault(name, f"{flag_text(name, getattr(config, name))} has no effect: {why_not}.")
    return [warnings[field.name] for field in dataclasses.fields(config) if field.name in warnings]


def _other_options(config: Any, strategy: Declaration) -> Iterator[tuple[str, str]]:
    """Yields options that only other strategies take, and that this one ignores."""
    for field in dataclasses.fields(config):
        flag = field.metadata["flag"]
        is_other_option = flag.is_option and strategy.options is not None and field.name not in strategy.options
        if is_other_option and not flag.neutral_values and getattr(config, field.name) != field.default:
            names = " or ".join(strategies_with(field.name))
            yield field.name, f"it is for --strategy={names}, and the strategy is {strategy.name}. Leave it out"


def _ineffective(config: Any, job: Job) -> Iterator[tuple[str, str]]:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for flag, has_effect, why_not in EFFECTS:
        if flag in defaults and getattr(config, flag) != defaults[flag] and not has_effect(config, job):
            yield flag, why_not
