"""The configuration fields shared by all commands, and the configuration of `tfdist run`."""

import dataclasses

from tfdist.config.all_reduce import parse_all_reduce
from tfdist.config.conflicts import check_combinations, flag_text
from tfdist.config.fields import (
    ANY_TEXT,
    check_fields,
    check_flag,
    device_flag,
    gradient_flag,
    normalize_number_or_spec,
    strategy_option,
    training_flag,
)
from tfdist.config.rules import parse_rules
from tfdist.config.staleness import ParameterServerOptions
from tfdist.config.strategy_registry import (
    AUTO,
    RUN_KERAS_FIT,
    JobOptions,
    strategies_with,
    strategy_declaration,
    strategy_help,
)
from tfdist.errors import InputError

_MAX_SEED = 2**31 - 1
USER_CODE = "or your own package.module:name(...)"
_ENGINES = f"{', '.join(RUN_KERAS_FIT[:-1])} and {RUN_KERAS_FIT[-1]}"
_DEVICE_STRATEGIES = tuple(name for name in strategies_with("devices") if name in RUN_KERAS_FIT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(JobOptions):
    """Strategy, devices, precision and gradients of any job. Each field has the name and meaning of its flag.

    Raises:
      InputError: a field is out of range, or fields conflict.
    """

    steps_per_call: int = device_flag(
        10, "Number of steps per call of the compiled loop. Affects speed only.", minimum=1
    )
    jit_compile: bool = device_flag(False, "Compile the forward and backward pass with XLA.", training_only=True)
    precision: str = training_flag(
        "float32",
        "float32, mixed_bfloat16 or mixed_float16. Mixed precision computes in 16 bits and keeps weights in 32.",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        fixed=True,
    )
    loss_scale: str = training_flag(
        "",
        "Loss scale for mixed_float16: a number, or dynamic(initial_power=15, growth_interval=2000, hysteresis=1, "
        "floor=..., cap=...). Defaults to dynamic with mixed_float16.",
        check=normalize_number_or_spec,
        safe_values=ANY_TEXT,
    )
    max_skipped_steps: int = training_flag(
        50, "Maximum number of consecutive steps skipped because of overflow before the run ends.", minimum=1
    )
    accumulate_steps: int = gradient_flag(
        1, "Number of micro-steps per step (gradient accumulation). Affects memory and time, not the result.", minimum=1
    )
    clip_norm: float = gradient_flag(0.0, "Maximum global norm of the gradient. 0 disables clipping.")
    clip_value: float = gradient_flag(
        0.0, "Maximum absolute value of any element of the gradient. 0 disables clipping."
    )
    recompute: str = gradient_flag(
        "none",
        "Activation checkpointing: none, full, or a regular expression that matches the whole paths of the layers to "
        "recompute in the backward pass.",
        safe_values=ANY_TEXT,
    )
    compression: str = gradient_flag(
        "none",
        f"Gradient compression: a method such as powersgd(rank=4) or topk(ratio=0.01)|fp16, {USER_CODE}, or rules for each "
        "variable such as 'size>=10000: int8; *: none'.",
        check=str,
        parse=parse_rules,
        training_only=True,
    )
    compression_min_bytes: int = gradient_flag(65536, "Minimum size in bytes of gradients to compress.")
    bucket_mb: float = gradient_flag(
        4.0, "Size in MiB of the buckets in which small gradients are reduced together.", minimum=0.001, maximum=1024
    )
    bucket_order: str = gradient_flag(
        "backward",
        "Order in which gradients are sent: backward (as the backward pass computes them) or smallest (smaller buckets first).",
        choices=("backward", "smallest"),
    )
    batch_norm: str = training_flag(
        "local",
        "Statistics of BatchNormalization: local (the rows of each replica; on a mesh, all) or synchronized (the "
        "global batch).",
        choices=("local", "synchronized"),
        fixed=True,
    )
    seed: int = training_flag(
        0, "Seed for initial weights, the order of examples, and random layers.", maximum=_MAX_SEED, fixed=True
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self._complete()
        check_combinations(self)

    def _complete(self) -> None:
        """Sets defaults that depend on several fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig, ParameterServerOptions):
    """Configuration of a program that calls Keras's `fit`, `evaluate` and `predict`."""

    strategy: str = device_flag(AUTO, strategy_help(RUN_KERAS_FIT))
    devices: int = strategy_option(
        0,
        f"Number of devices per process, for {' and '.join(_DEVICE_STRATEGIES)}. 0 uses all GPUs, or one CPU device.",
        neutral_values=(0, 1),
    )
    stall_shutdown_seconds: float = check_flag(
        600.0,
        "Seconds that a process waits for the others in a call of fit, evaluate or predict, and at the end of the "
        "program.",
        minimum=1,
    )
    rows: str = check_flag(
        "gather",
        "What to do with a loss, a metric or a step that needs all rows of a batch, and is neither a mean nor a sum over "
        "them. gather: replicas communicate the rows that it needs. strict: raise an error.",
        choices=("gather", "strict"),
    )

    def _complete(self) -> None:
        if not strategy_declaration(self.strategy).runs_keras_fit:
            raise InputError(
                f"A script with Keras's own fit runs on {_ENGINES}. Received: {flag_text('strategy', self.strategy)}. Use one "
                "of these, tfdist.Trainer or, for a mesh, tfdist.distribute."
            )
        if parse_all_reduce(self.all_reduce).is_measured:
            raise InputError(
                "--all_reduce=auto is measured by tfdist's own trainer only. Received: "
                f"{flag_text('all_reduce', self.all_reduce)}. Specify an algorithm, pass the table of another run as "
                "auto(table=FILE), or use `tfdist train`."
            )
