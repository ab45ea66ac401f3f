"""Checks for combinations of flags that are not allowed, and warnings about flags without effect."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.config.all_reduce import AUTO, parse_all_reduce
from tfdist.config.decay import DECAYS
from tfdist.config.pipeline import NO_FLUSH_SCHEDULES
from tfdist.config.rules import GRADIENT_METHODS, has_gradient_method, is_auto
from tfdist.config.search import LearningRateSearch
from tfdist.config.staleness import BACKUP, QUORUM, SSP
from tfdist.config.strategy_registry import Declaration, Refusals, strategies_with, strategy_declaration
from tfdist.errors import InputError

_WARMUP_CONFLICTS = {name: kind.warmup_conflict for name, kind in DECAYS.items() if kind.warmup_conflict}
# Flags that a --sync with local training excludes.
_LOCAL_TRAINING: Refusals = {
    "batch_norm": "Replicas that train locally cannot normalize over all replicas: leave out --batch_norm or use "
    "--sync=every_step.",
    "compression": (
        is_auto,
        "Compression is chosen by measuring steps, which send nothing with this --sync: specify a method.",
    ),
    "shard": "Replicas that train locally need their whole optimizer: leave out --shard or use --sync=every_step.",
    "find": "A search measures steps in which gradients are summed: leave out --sync while searching.",
}
_CLIENTS: Refusals = {
    "accumulate_steps": "Clients make no micro-steps: lower --batch_size, the batch size of a client, or leave out "
    "--accumulate_steps.",
    "ema": "Clients start each round from the global weights: leave out --ema, or specify an outer optimizer.",
    "precision": (
        lambda precision: precision == "mixed_float16",
        "Clients have no loss scale: use --precision=mixed_bfloat16.",
    ),
    "elastic_batch": "The batch size of a client does not depend on the number of replicas: leave out --elastic_batch.",
    "balance": "Whole clients are allocated to replicas, by their examples: leave out --balance.",
    "augment": "The examples of clients are not augmented: leave out --augment, or use another --sync.",
}
_SEARCH: Refusals = {
    "resume": "A search begins with new weights: leave out --resume or --find.",
    "overwrite": "A search deletes nothing: leave out --overwrite, and specify an --output_dir without a run.",
    "dry_run": "--dry_run and --find are mutually exclusive: leave out one of them.",
    "elastic_batch": "A search is for a fixed global batch: leave out --elastic_batch.",
}
_EXCLUDING_FLAGS: tuple[tuple[str, Callable[[Any], Any], Refusals], ...] = (
    ("sync", lambda c: c.parsed.sync.exchanges_weights, _LOCAL_TRAINING),
    ("sync", lambda c: c.parsed.sync.trains_clients, _CLIENTS),
    ("find", lambda c: c.find, _SEARCH),
)
# By flag, the flag without which it has no meaning.
_REQUIRED_FLAGS = {
    "check_sync": "check_sync_every",
    "commit_dir": "commit_every",
    "compression_max_error": "compression_check_every",
    "shard_axis": "shard",
    "warmup_start": "warmup_steps",
}
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], Any], str], ...] = (
    (
        ("steps", "epochs"),
        lambda c: c.steps and c.epochs,
        "The length of a run is specified in steps or in epochs: one of --steps and --epochs must be 0.",
    ),
    (
        ("jit_compile", "batch_norm"),
        lambda c: c.jit_compile and c.batch_norm == "synchronized",
        "XLA cannot compile the collectives of synchronized normalization: leave out --jit_compile or --batch_norm.",
    ),
    (
        ("lr_scaling", "base_batch_size"),
        lambda c: (c.lr_scaling != "none") != bool(c.base_batch_size),
        "Learning-rate scaling needs the batch size for which --learning_rate was tuned: specify both --lr_scaling and "
        "--base_batch_size or neither.",
    ),
    (
        ("decay", "warmup_steps"),
        lambda c: c.warmup_steps and c.parsed.decay.warmup_conflict,
        f"{' and '.join(_WARMUP_CONFLICTS)} cannot have a warmup: {', and '.join(_WARMUP_CONFLICTS.values())}. Leave out "
        "--warmup_steps or choose another --decay.",
    ),
    (
        ("momentum_correction", "optimizer"),
        lambda c: c.momentum_correction and c.parsed.optimizer.name not in ("sgd", "lars"),
        "Momentum correction is for --optimizer=sgd or lars: use one of them or leave out --momentum_correction.",
    ),
    (
        ("ema",),
        lambda c: c.ema >= 1,
        "The momentum of the average of the weights must be less than 1: use --ema=0.999, or 0 for no average.",
    ),
    (
        ("sync", "compression"),
        lambda c: c.parsed.sync.exchanges_weights and has_gradient_method(c.parsed.compression),
        f"{' and '.join(GRADIENT_METHODS)} are for gradients, not for the changes of weights that are exchanged: use another "
        "--compression, such as int8, or --sync=every_step.",
    ),
    (
        ("sync", "ema"),
        lambda c: c.parsed.sync.has_center and c.ema,
        "The center that easgd evaluates is already an average over steps: leave out --ema or use another --sync.",
    ),
    (
        ("staleness", "batch_norm"),
        lambda c: c.parsed.staleness.kind in (SSP, BACKUP, QUORUM) and c.batch_norm == "synchronized",
        "Workers that compute different steps cannot normalize over all workers: leave out --batch_norm or --staleness.",
    ),
    (
        ("loss_scale", "precision"),
        lambda c: c.loss_scale and c.precision != "mixed_float16",
        "Only float16 needs a loss scale: add --precision=mixed_float16 or leave out --loss_scale.",
    ),
    (
        ("precision", "float64"),
        lambda c: c.float64 and c.precision != "float32",
        "--float64 sets the precision: leave out --precision or --float64.",
    ),
    (
        ("clip_norm", "clip_value"),
        lambda c: c.clip_norm and c.clip_value,
        "Gradients are clipped by norm or by value: one of --clip_norm and --clip_value must be 0.",
    ),
    (
        ("accumulate_steps", "batch_size"),
        lambda c: c.accumulate_steps > c.batch_size,
        "Every micro-step needs at least one example: lower --accumulate_steps or raise --batch_size.",
    ),
    (
        ("accumulate_steps", "batch_norm"),
        lambda c: c.accumulate_steps > 1 and c.batch_norm == "synchronized",
        "Synchronized normalization computes its moments over all rows at once, but accumulation splits the rows: use "
        "--batch_norm=local or --accumulate_steps=1.",
    ),
    (
        ("learning_rate", "optimizer"),
        lambda c: c.learning_rate != type(c).learning_rate and "learning_rate" in c.parsed.optimizer.args,
        "The learning rate must be specified only once: remove it from --optimizer or leave out --learning_rate.",
    ),
    (
        ("optimizer", "lr_scaling", "warmup_steps", "decay"),
        lambda c: (
            "learning_rate" in c.parsed.optimizer.args
            and (c.lr_scaling, c.warmup_steps, c.decay) != ("none", 0, "none")
        ),
        "Scaling, warmup and decay apply to --learning_rate: specify the rate there, and remove it from --optimizer.",
    ),
    (
        ("find", "optimizer"),
        lambda c: isinstance(c.parsed.find, LearningRateSearch) and "learning_rate" in c.parsed.optimizer.args,
        "A search replaces the learning rate: remove it from --optimizer.",
    ),
    (
        ("profile_steps", "steps"),
        lambda c: c.profile_steps and 0 < c.steps <= c.parsed.profile_steps[0],
        "A profile must begin before the run ends: lower --profile_steps or raise --steps.",
    ),
)


def check_combinations(config: Any) -> None:
    """Raises `InputError` with the first rule that a configuration violates and the values of its flags.

    Rules for flags that the configuration does not have are skipped.
    """
    check_rules(config, type(config))
    check_strategy(config, strategy_declaration(config.strategy))


def check_rules(config: Any, defaults: Any) -> None:
    """Raises `InputError` for a rule that does not depend on the strategy; `defaults` has a default for each value."""
    for names, is_violated, rule in _RULES:
        if all(hasattr(config, name) for name in names) and is_violated(config):
            raise conflict_error(rule, config, names)
    for name, other in _REQUIRED_FLAGS.items():
        flags = [flag for flag in (name, other) if hasattr(config, flag)]
        if [getattr(config, flag) != getattr(defaults, flag) for flag in flags] == [True, False]:
            raise conflict_error(f"--{name} needs --{other}: add it or leave out --{name}.", config, (name, other))
    for name, excludes, refusals in _EXCLUDING_FLAGS:
        if hasattr(config, name) and excludes(config):
            check_refusals(config, refusals, name, defaults)


def check_refusals(config: Any, refusals: Refusals, context: str, defaults: Any) -> None:
    """Raises `InputError` for the first flag with a rejected value; `context` is the flag that excludes it, if any."""
    for name, refusal in refusals.items():
        if hasattr(config, name) and getattr(config, name) not in ("", getattr(defaults, name)):
            condition, rule = refusal if isinstance(refusal, tuple) else (lambda _: True, refusal)
            if condition(getattr(config.parsed, name)):
                raise conflict_error(rule, config, (name, context) if context else (name,))


def check_strategy(config: Any, strategy: Declaration) -> None:
    """Raises `InputError` for the first flag whose value the strategy does not accept."""
    for field in dataclasses.fields(config):
        neutral_values, value = field.metadata["flag"].neutral_values, getattr(config, field.name)
        is_unsupported = strategy.options is not None and field.name not in strategy.options
        if is_unsupported and neutral_values and value not in neutral_values:
            names = [
                name
                for name in strategies_with(field.name)
                if value in strategy_declaration(name).accepts.get(field.name, (value,))
            ]
            depends_on_value = len(names) < len(strategies_with(field.name))
            raise conflict_error(
                f"{flag_text(field.name, value) if depends_on_value else f'--{field.name}'} is for --strategy="
                f"{' or '.join(names)}: use {'it' if len(names) == 1 else 'one of them'} or leave out --{field.name}.",
                config,
                (field.name, "strategy"),
            )
    check_refusals(config, strategy.refuses, "strategy", type(config))
    if rejection := find_rejected_option(vars(config), strategy):
        name, rule = rejection
        raise conflict_error(rule, config, (name, "strategy"))
    if strategy.check:
        strategy.check(config)


def find_rejected_option(options: Mapping[str, Any], strategy: Declaration) -> tuple[str, str] | None:
    """Returns the first option whose value the strategy does not accept, and the rule; None if all are accepted."""
    for name, values in strategy.accepts.items():
        if options.get(name, values[0]) not in values:
            return name, f"--{name} must be {', '.join(values[:-1])} or {values[-1]} for --strategy={strategy.name}."
    return None


def conflict_error(rule: str, config: Any, names: Sequence[str]) -> InputError:
    """Returns the error for flags that violate a rule; it lists their values, except empty ones."""
    values = [(name, getattr(config, name)) for name in names]
    received = " ".join(flag_text(name, value) for name, value in values if value != "")
    return InputError(f"{rule} Received: {received}.")


def flag_text(name: str, value: Any) -> str:
    """Returns `--name=value` in the form that the command line and `--flagfile` accept."""
    text = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
    return f"--{name}={text}"


# Flags without effect are harmless, but users who set them expect an effect, so they are warned.


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobProperties:
    """Properties of a job that decide whether a flag has an effect."""

    replicas: int
    sums_gradients: bool = False  # whether the engine itself sums gradients
    has_batch_norm: bool = True  # whether the model has batch normalization
    uses_data_dir: bool = True  # whether the dataset takes `--data_dir`


class Effect(NamedTuple):
    """The condition under which flags have an effect."""

    flags: str  # names of the flags
    # Takes the configuration and the `JobProperties`; returns whether the flags have an effect.
    has_effect: Callable[[Any, JobProperties], Any]
    reason: str  # why a flag has no effect otherwise, as a clause, and the remedy


EFFECTS = (
    Effect(
        "bucket_mb bucket_order all_reduce topology measure_every",
        lambda c, job: job.replicas > 1,
        "one replica sends no gradients. Remove the flag, or use several replicas",
    ),
    Effect(
        "topology",
        lambda c, job: parse_all_reduce(c.all_reduce).name in (AUTO, "hierarchical"),
        "the all-reduce algorithm does not depend on hosts. Add --all_reduce=hierarchical, or remove the flag",
    ),
    Effect(
        "sync",
        lambda c, job: job.replicas > 1 or c.parsed.sync.acts_on_one_replica,
        "one replica exchanges nothing. Remove the flag, or use several replicas",
    ),
    Effect(
        "compression_check_every measure_every",
        lambda c, job: not c.parsed.sync.exchanges_weights,
        "no step sums gradients with this --sync. Remove the flag",
    ),
    Effect(
        "compression_min_bytes compression_check_every",
        lambda c, job: c.compression != "none",
        "nothing is compressed. Add --compression, or remove the flag",
    ),
    Effect(
        "measure_every",
        lambda c, job: not isinstance(getattr(c.parsed, "pipeline_schedule", None), NO_FLUSH_SCHEDULES),
        "communication is measured in steps that end with a flush. Remove the flag, or use another --pipeline_schedule",
    ),
    Effect(
        "check_sync_every",
        lambda c, job: job.replicas > 1 or job.sums_gradients,
        "with one replica, there is nothing to compare. Remove the flag, or use several replicas",
    ),
    Effect(
        "keep checkpoint_async checkpoint_strict",
        lambda c, job: c.best or any(c.parsed.checkpoint_every),
        "no checkpoint is saved, except on preemption. Add --checkpoint_every or --best, or remove the flag",
    ),
    Effect(
        "momentum_correction",
        lambda c, job: c.parsed.optimizer.name != "sgd" or c.parsed.optimizer.args.get("momentum"),
        "sgd has no momentum by default. Use --optimizer='sgd(momentum=0.9)', or remove the flag",
    ),
    Effect("shard_min_elements", lambda c, job: c.shard != "none", "nothing is sharded. Add --shard, or remove it"),
    Effect(
        "batch_norm",
        lambda c, job: job.has_batch_norm,
        "the model has no BatchNormalization layer. Remove the flag, or add such layers",
    ),
    Effect(
        "data_dir",
        lambda c, job: job.uses_data_dir,
        "the dataset does not read files from there. Remove the flag, or choose another --dataset",
    ),
)


def effect_warnings(config: Any, job: JobProperties, strategy: Declaration) -> list[str]:
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
            yield field.name, f"it is for --strategy={names}, and the strategy is {strategy.name}. Remove the flag"


def _ineffective_flags(config: Any, job: JobProperties) -> Iterator[tuple[str, str]]:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for flags, has_effect, reason in EFFECTS:
        for flag in flags.split():
            is_set = flag in defaults and getattr(config, flag) != defaults[flag]
            is_off = flag == "measure_every" and is_set and not config.measure_every
            if is_set and not is_off and not has_effect(config, job):
                yield flag, reason
