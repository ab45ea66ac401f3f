"""The configuration of training, and of commands that take the same flags."""

import dataclasses
import types
from typing import Any, ClassVar

from tfdist.config.balance import parse_balance
from tfdist.config.conflicts import check_refusals, check_rules, conflict_error
from tfdist.config.dataset_files import DATASETS, SAFE_DATASETS
from tfdist.config.decay import DECAYS, Plateau, parse_decay
from tfdist.config.fields import (
    ANY_TEXT,
    CATALOG_NAME,
    check_flag,
    duration_flag,
    gradient_flag,
    model_flag,
    normalize_names,
    normalize_user_function,
    output_flag,
    parse_loggers,
    parse_step_range,
    training_flag,
)
from tfdist.config.job_config import USER_CODE, JobConfig
from tfdist.config.monitor import parse_early_stopping, parse_interval, parse_monitor
from tfdist.config.pipeline import NO_FLUSH_SCHEDULES
from tfdist.config.rules import parse_chain, parse_rules
from tfdist.config.search import parse_search
from tfdist.config.spec import parse
from tfdist.config.staleness import SYNC, parse_staleness
from tfdist.config.strategy_registry import DECLARATIONS, Declaration, Refusals, TrainerOptions
from tfdist.config.sync import SYNCS, EveryStep, Sync, parse_sync

_DEFAULT_EPOCHS = 10
_MODELS = ("mlp", "cnn", "resnet50", "transformer")
_RUN_FLAGS = (  # flags of a run with a directory, without effect on `verify`
    "elastic_batch compression_check_every compression_max_error output_dir checkpoint_every keep checkpoint_async"
    " checkpoint_strict commit_dir commit_every resume log_every eval_every loggers measure_every profile_steps"
    " stall_warning_seconds stall_shutdown_seconds check_sync_every dry_run steps_per_call"
    " best early_stopping callbacks overwrite find"
).split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainerOptions, JobConfig):
    """Configuration of a training run; `tfdist train --help` lists its fields."""

    model: str = model_flag(
        "cnn",
        f"Model: mlp, cnn, resnet50 or transformer, optionally with arguments, {USER_CODE}.",
        parse=parse,
        fixed=True,
        known=_MODELS,
        safe_values="|".join(_MODELS),
    )
    dataset: str = model_flag(
        "digits",
        "Dataset: digits, mnist5k, fashion_mnist, text, synthetic:SHAPE, tfds:NAME; your own files, as images:DIR (a "
        "folder per class), csv:FILE(label=...), npz:FILE or tfrecord:PATTERN(features=...), which docs/guides/data.md "
        f"explains; {USER_CODE}.",
        parse=parse,
        fixed=True,
        known=DATASETS,
        safe_values=SAFE_DATASETS,
    )
    data_dir: str | None = model_flag(
        None,
        "Directory with the files of the dataset, to which relative paths refer. Defaults to the dataset's own "
        "location, or the current directory.",
        per_process=True,
        safe_values=ANY_TEXT,
    )
    augment: str = model_flag(
        "",
        "Random changes of training images, applied in order, such as flip|crop(padding=4): flip, crop, resized_crop, rotate, "
        f"brightness, contrast, cutout, erase, {USER_CODE}.",
        check=lambda text: "|".join(map(str, parse_chain(text))),
        fixed=True,
        training_only=True,
    )
    steps: int = duration_flag(0, "Number of steps (optimizer updates). 0 trains for --epochs.")
    epochs: int = duration_flag(0, f"Number of epochs. 0 means {_DEFAULT_EPOCHS}, unless --steps is set.")
    early_stopping: str = duration_flag(
        "",
        "Metric that ends the run when it no longer improves, such as val_loss(patience=3, min_delta=0): patience is "
        "counted in evaluations. Empty disables it.",
        parse=parse_early_stopping,
        training_only=True,
    )
    batch_size: int = training_flag(
        64, "Global batch size: number of examples per step, over all replicas.", minimum=1, fixed=True
    )
    elastic_batch: str = training_flag(
        "global",
        "What to keep when a run resumes with a different number of replicas: global (the global batch size, and so the "
        "result) or replica (the batch size per replica; the global batch size and the learning rate scale with the "
        "number of replicas).",
        choices=("global", "replica"),
    )
    balance: str = training_flag(
        "equal",
        "How rows are allocated to replicas: equal, measured (by speed) or weights(2,1,1). Affects time, not the result.",
        parse=parse_balance,
        training_only=True,
    )
    optimizer: str = training_flag(
        "adamw",
        f"Optimizer: a Keras optimizer in lower case, such as sgd(momentum=0.9), {USER_CODE}.",
        parse=parse,
        fixed=True,
        safe_values=CATALOG_NAME,
    )
    learning_rate: float = training_flag(0.001, "Learning rate.")
    lr_scaling: str = training_flag(
        "none",
        "Scaling of the learning rate with --batch_size / --base_batch_size: none, linear or sqrt.",
        choices=("none", "linear", "sqrt"),
    )
    base_batch_size: int = training_flag(0, "Batch size for which --learning_rate was tuned, for --lr_scaling.")
    warmup_steps: int = training_flag(0, "Number of steps of linear learning-rate warmup.")
    warmup_start: float = training_flag(0.0, "Learning rate at step 0 as a fraction of the peak.", maximum=1)
    decay: str = training_flag(
        "none",
        "Learning-rate schedule: none, cosine(to=0.0), cosine_restarts(first=...), exponential(factor=0.01), linear(to=0.0), "
        "one_cycle(pct_start=0.3), plateau(monitor=val_loss, factor=0.1, patience=10), polynomial(to=0.0, power=1.0), "
        f"step(every=..., factor=0.1), {USER_CODE}. docs/guides/gradients.md has the equations.",
        parse=parse_decay,
        safe_values="|".join(DECAYS),
    )
    momentum_correction: bool = training_flag(
        False, "Momentum correction, for sgd and lars: changes of the learning rate do not distort momentum."
    )
    ema: float = training_flag(
        0.0,
        "Momentum of an exponential moving average of the weights, such as 0.999, which is evaluated and exported. 0 "
        "disables averaging.",
        fixed=True,
    )
    loss: str = training_flag(
        "sparse_categorical_crossentropy(from_logits=True)",
        f"Loss: a Keras loss in snake case, {USER_CODE}.",
        parse=parse,
        fixed=True,
        safe_values=CATALOG_NAME,
    )
    sync: str = gradient_flag(
        "every_step",
        "How replicas are synchronized: every_step (gradients are summed in every step), or by exchanges of weights: "
        "local_sgd, post_local_sgd, hierarchical_local_sgd, diloco, easgd or fedavg (docs/guides/local_sgd.md).",
        parse=parse_sync,
        fixed=True,
        safe_values="|".join(SYNCS),
    )
    metrics: str = training_flag(
        "accuracy",
        "Comma-separated Keras metrics. Empty records the loss only.",
        check=normalize_names,
        fixed=True,
        safe_values=rf"{CATALOG_NAME}(,{CATALOG_NAME})*",
    )
    callbacks: str = training_flag(
        "",
        "Your own function that returns a Keras callback or a list of them: package.module:name(...).",
        check=normalize_user_function,
        training_only=True,
    )
    compression_check_every: int = gradient_flag(
        0,
        "Number of steps between comparisons of compressed gradients with exact ones. 0 disables them.",
        training_only=True,
    )
    compression_max_error: float = gradient_flag(
        0.0,
        "Maximum compression error as a fraction of the gradient norm; beyond it, compression is disabled. 0 means no limit.",
        training_only=True,
    )
    output_dir: str = output_flag(
        "",
        "Directory of the run: new, empty, or of a run to resume. Defaults to runs/DATASET-MODEL-STRATEGY-TIME.",
        per_process=True,
        safe_values=ANY_TEXT,
    )
    checkpoint_every: str = output_flag(
        "0",
        "Interval between checkpoints, in steps, or in seconds such as 600s. 0 saves only on preemption and for --best.",
        check=str,
        parse=parse_interval,
        safe_values=ANY_TEXT,
    )
    keep: int = output_flag(3, "Maximum number of checkpoints to keep.", minimum=1)
    checkpoint_async: bool = output_flag(True, "Write checkpoints in the background while training continues.")
    checkpoint_strict: bool = output_flag(
        True, "End the run if a checkpoint cannot be written. Otherwise, log a warning and continue."
    )
    best: str = output_flag(
        "",
        "Metric whose best checkpoint is also kept, and exported at the end, such as val_accuracy or val_auc(mode=max). "
        "Empty exports the last step.",
        parse=parse_monitor,
        training_only=True,
    )
    commit_every: int = output_flag(
        0,
        "Number of steps between in-memory checkpoints (commits), from which a run resumes after a failure. 0 disables them.",
    )
    commit_dir: str = output_flag(
        "",
        "Directory for in-memory checkpoints, such as /dev/shm/mine. Defaults to one that the launcher creates.",
        safe_values=ANY_TEXT,
    )
    resume: str = output_flag(
        "auto",
        "auto (resume from the newest valid checkpoint in --output_dir, if any), never (start from scratch), or the "
        "directory of a checkpoint or of a run (start from its weights and state).",
        safe_values=ANY_TEXT,
    )
    overwrite: bool = output_flag(
        False, "Delete the run that is in --output_dir, and start over. Other files there are kept.", training_only=True
    )
    log_every: int = output_flag(10, "Number of steps between metric records.", minimum=1)
    eval_every: int = output_flag(
        0,
        "Number of steps between evaluations. The last evaluation is at the end of the run. 0 evaluates at the end of each "
        "epoch.",
    )
    measure_every: int = output_flag(
        1000, "Number of steps between measurements of the communication time of a step. 0 disables them."
    )
    loggers: str = output_flag(
        "tensorboard",
        f"Comma-separated experiment trackers, in addition to metrics.jsonl: tensorboard, mlflow(experiment='tfdist'), "
        f"wandb(project='tfdist'), {USER_CODE}. Empty for none.",
        parse=parse_loggers,
        training_only=True,
    )
    profile_steps: str = output_flag(
        "",
        "A:B profiles steps A to B for TensorBoard. A pipeline also draws the timeline of step A.",
        check=str,
        parse=parse_step_range,
        training_only=True,
    )
    stall_warning_seconds: float = check_flag(
        60.0,
        "Report a stall, with the stack of each process, if a call of the compiled loop takes this much longer than "
        "twice its usual time. 0 disables the report. The first call, which compiles, is reported only if a process "
        "is missing from it.",
    )
    stall_shutdown_seconds: float = check_flag(
        600.0,
        "End all processes with exit code 4 if a call of the compiled loop takes this much longer than twice its usual "
        "time. 0 disables this. The first call is exempt.",
    )
    check_sync_every: int = check_flag(
        0,
        "Number of steps between checks that replicas are identical, except for what --sync makes local. 0 disables them.",
    )
    find: str = check_flag(
        "",
        "Search instead of training: learning_rate(min=1e-7, max=10, steps=100), by a sweep over rates; or "
        "batch_size(memory=..., max=..., steps=20, processes=1), by trials in separate processes. docs/guides/finders.md "
        "explains both.",
        parse=parse_search,
        training_only=True,
    )
    dry_run: bool = check_flag(False, "Print the configuration of the run and exit.")

    def _complete(self) -> None:
        if not self.steps and not self.epochs:
            object.__setattr__(self, "epochs", _DEFAULT_EPOCHS)


def check_arguments(name: str, declaration: Declaration | None, sync: Sync | None = None, **arguments: Any) -> None:
    """Checks `arguments` of a program, which are named like flags, for a strategy; see `check_combinations`.

    A strategy that is not in the registry needs its `declaration`; `sync` defaults to every step.
    """
    sync = sync or EveryStep()
    texts = {"sync": str(sync), **arguments}
    typed_values = texts | {"sync": sync, "compression": parse_rules(arguments.get("compression", "none"))}
    config = types.SimpleNamespace(strategy=name, parsed=types.SimpleNamespace(**typed_values), **texts)
    check_rules(config, TrainConfig)
    declaration = declaration or next((entry for entry in DECLARATIONS if entry.name == name), Declaration(name=name))
    check_refusals(config, declaration.refuses, "strategy", TrainConfig)


_NOT_VERIFIED: Refusals = {
    "sync": "Replicas that train locally do not match one device at any tolerance: leave out --sync.",
    "pipeline_schedule": (
        lambda schedule: isinstance(schedule, NO_FLUSH_SCHEDULES),
        "Gradients of older weights do not match one device at any tolerance: use another --pipeline_schedule.",
    ),
    "decay": (
        lambda decay: isinstance(decay, Plateau),
        "--decay=plateau depends on evaluations, and verify makes none. Use another --decay.",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(TrainConfig):
    """Configuration of `tfdist verify`: the training flags, and the tolerance of the comparison."""

    ignored_flags: ClassVar[tuple[str, ...]] = tuple(_RUN_FLAGS)
    steps: int = duration_flag(10, "Number of steps (optimizer updates). 0 trains for --epochs.")
    float64: bool = check_flag(
        False, "Compute in float64, in which rounding errors are far smaller than real differences."
    )
    tolerance: float = check_flag(
        0.0,
        "Maximum relative difference that passes. 0 chooses it by optimizer and --float64, and 4 times the rounding "
        "error in bfloat16. Required with float16, --compression (but not with --staleness=async or bounded) or "
        "--activation_compression; dgc and signsgd are different algorithms and do not match one device at any tolerance.",
    )

    def __post_init__(self) -> None:
        """Requires a tolerance for loss scaling and compression, whose results differ from one device's by design."""
        super().__post_init__()
        is_replayed = parse_staleness(self.staleness).kind != SYNC  # on one device, with the same compression
        names = () if is_replayed else ("compression", "activation_compression")
        lossy_flags = [name for name in names if getattr(self, name) != "none"]
        if not self.tolerance and (self.precision == "mixed_float16" or lossy_flags):
            raise conflict_error(
                "With float16 or compression, results differ from those of one device by more than rounding: set "
                "--tolerance, or use neither.",
                self,
                ("precision", *(lossy_flags or ("compression",))),
            )
        check_refusals(self, _NOT_VERIFIED, "", type(self))
