"""The configuration of a run as a frozen, validated value. Commands build it from flags; a program may build it directly."""

import dataclasses

from tfdist.config.conflicts import check_combinations, flag_text
from tfdist.config.fields import (
    AUTO,
    address_text,
    check_fields,
    decay_text,
    flag_field,
    layout_text,
    mesh_text,
    methods_text,
    names_text,
    number_or_spec_text,
    period_text,
    spec_text,
    window_text,
)
from tfdist.errors import InputError
from tfdist.sharding.layouts import STAGES, parse_layout, parse_shard
from tfdist.sharding.mesh import mesh_of

MODEL = "Model and data"
DURATION = "Duration"
DEVICES = "Strategy and devices"
TRAINING = "Training"
GRADIENTS = "Gradients"
OUTPUT = "Output and checkpoints"
CHECKS = "Checks"
TOPICS = (MODEL, DURATION, DEVICES, TRAINING, GRADIENTS, OUTPUT, CHECKS)  # in the order of --help

_DEFAULT_EPOCHS = 10
_LARGEST_SEED = 2**31 - 1
_OWN = "or your own package.module:name(...)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Strategy, devices, precision and gradients, whatever is trained. Each field has the name and meaning of its flag.

    Raises:
      InputError: a field is out of range, or two fields exclude each other.
    """

    strategy: str = flag_field(
        "auto",
        DEVICES,
        "Distribution strategy: auto, single, mirrored, multiworker, horovod, tpu, mesh, or package.module:Class.",
    )
    devices: int = flag_field(
        0,
        DEVICES,
        "Number of devices per process, for mirrored and mesh. 0 uses all GPUs, or one CPU device; with a mesh, as "
        "many as it needs.",
    )
    communication: str = flag_field(
        "auto",
        DEVICES,
        "Collective implementation for multiworker: auto, ring or nccl.",
        choices=("auto", "ring", "nccl"),
    )
    coordinator: str = flag_field(
        "", DEVICES, "HOST:PORT of rank 0, if the environment does not provide it.", check=address_text
    )
    start_timeout_seconds: float = flag_field(
        120.0, DEVICES, "Seconds to wait for the other processes at start-up.", least=1
    )
    intra_op_threads: int = flag_field(
        0, DEVICES, "Number of threads within an operation. 0 pins the process to its share of the host's cores."
    )
    steps_per_call: int = flag_field(
        10, DEVICES, "Number of steps per call of the compiled loop. Affects speed only.", least=1
    )
    jit_compile: bool = flag_field(False, DEVICES, "Compile the forward and backward pass with XLA.")
    precision: str = flag_field(
        "float32",
        TRAINING,
        "float32, mixed_bfloat16 or mixed_float16. Mixed precision computes in 16 bits and keeps weights in 32.",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )
    loss_scale: str = flag_field(
        "",
        TRAINING,
        "Loss scale for mixed_float16: a number, or dynamic(initial_power=15, growth_interval=2000, hysteresis=1, "
        "floor=..., cap=...). Defaults to dynamic with mixed_float16.",
        check=number_or_spec_text,
    )
    max_skipped_steps: int = flag_field(
        50, TRAINING, "Maximum number of consecutive steps skipped because of overflow before the run ends.", least=1
    )
    accumulate_steps: int = flag_field(
        1,
        GRADIENTS,
        "Number of micro-steps per step (gradient accumulation). Affects memory and time, not the result.",
        least=1,
    )
    clip_norm: float = flag_field(0.0, GRADIENTS, "Maximum global norm of the gradient. 0 disables clipping.")
    clip_value: float = flag_field(
        0.0, GRADIENTS, "Maximum absolute value of any element of the gradient. 0 disables clipping."
    )
    recompute: str = flag_field(
        "none",
        GRADIENTS,
        "Activation checkpointing: none, full, or a regular expression that matches the whole paths of the layers to "
        "recompute in the backward pass.",
    )
    compression: str = flag_field(
        "none",
        GRADIENTS,
        f"Gradient compression: a method such as powersgd(rank=4) or topk(ratio=0.01)|fp16, {_OWN}, or rules for each "
        "variable such as 'size>=10000: int8; *: none'.",
        check=methods_text,
    )
    compression_min_bytes: int = flag_field(65536, GRADIENTS, "Minimum size in bytes of gradients to compress.")
    bucket_mb: float = flag_field(
        4.0,
        GRADIENTS,
        "Size in MiB of the buckets in which small gradients are reduced together.",
        least=0.001,
        most=1024,
    )
    batch_norm: str = flag_field(
        "local",
        TRAINING,
        "Statistics of BatchNormalization: local (the rows of each replica; on a mesh, all) or synchronized (the "
        "global batch).",
        choices=("local", "synchronized"),
    )
    seed: int = flag_field(
        0, TRAINING, "Seed for initial weights, the order of examples, and random layers.", most=_LARGEST_SEED
    )

    def __post_init__(self) -> None:
        """Checks each field, then all rules between fields."""
        check_fields(self)
        self._complete()
        check_combinations(self)

    def _complete(self) -> None:
        """Fills in what depends on several fields, and checks what is not a rule about them alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """The configuration of a user's program that calls Keras's `fit`, `evaluate` and `predict`."""

    strategy: str = flag_field(
        "auto", DEVICES, "Distribution strategy: auto, single, mirrored, multiworker, horovod, or package.module:Class."
    )
    devices: int = flag_field(
        0, DEVICES, "Number of devices per process, for mirrored. 0 uses all GPUs, or one CPU device."
    )
    stall_shutdown_seconds: float = flag_field(
        600.0,
        CHECKS,
        "Seconds a process waits for the others at a call of fit, evaluate or predict, and at the end of the program.",
        least=1,
    )
    check_first_batch: bool = flag_field(
        True,
        CHECKS,
        "Compare custom losses, metrics and train steps on replicas with one device, on the first batch. If neither "
        "the mean nor the sum over replicas is equal, every replica computes whole batches.",
    )

    def _complete(self) -> None:
        """See base class."""
        if self.strategy in ("mesh", "tpu"):
            raise InputError(
                "Keras's own fit runs on single, mirrored, multiworker and horovod. Received: "
                f"{flag_text('strategy', self.strategy)}. Use one of these, or tfdist.Trainer."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(JobConfig):
    """The configuration of a training run; `python -m tfdist.train --help` lists its fields."""

    model: str = flag_field(
        "cnn", MODEL, f"Model: mlp, cnn, resnet50 or transformer, optionally with arguments, {_OWN}.", check=spec_text
    )
    dataset: str = flag_field(
        "digits",
        MODEL,
        f"Data set: digits, mnist5k, fashion_mnist, text, synthetic:SHAPE, tfds:NAME, {_OWN}.",
        check=spec_text,
    )
    data_dir: str | None = flag_field(
        None, MODEL, "Directory with the files of the data set. Defaults to the data set's own location."
    )
    steps: int = flag_field(0, DURATION, "Number of steps (optimizer updates). 0 trains for --epochs.")
    epochs: int = flag_field(0, DURATION, f"Number of epochs. 0 means {_DEFAULT_EPOCHS}, unless --steps is given.")
    tpu: str = flag_field("", DEVICES, "Name or address of the TPU, for --strategy=tpu; local on a TPU VM.")
    mesh_shape: str = flag_field(
        "",
        DEVICES,
        "Axes of the device mesh for --strategy=mesh, such as data:2;model:4. Defaults to data:DEVICES.",
        check=mesh_text,
    )
    layout: str = flag_field(
        "",
        DEVICES,
        "Mapping of named tensor dims to mesh axes for --strategy=mesh, such as batch:data;heads:model. By default, "
        "the batch is sharded over the first axis.",
        check=layout_text,
    )
    shard: str = flag_field(
        "none",
        DEVICES,
        "State to shard over the batch axis of a mesh, as in ZeRO: none, optimizer (optimizer state), gradients (and "
        "gradients) or parameters (and parameters).",
        choices=STAGES,
    )
    shard_axis: str = flag_field("", DEVICES, "Mesh axis for --shard. Defaults to the axis of the batch.")
    shard_min_elements: int = flag_field(
        1024, DEVICES, "Minimum number of elements of variables to shard with --shard."
    )
    batch_size: int = flag_field(
        64, TRAINING, "Global batch size: number of examples per step, over all replicas.", least=1
    )
    elastic_batch: str = flag_field(
        "global",
        TRAINING,
        "What to keep when a run resumes with another number of replicas: global (the global batch size, and so the "
        "result) or replica (the batch size per replica; the global batch size and the learning rate scale with the "
        "number of replicas).",
        choices=("global", "replica"),
    )
    optimizer: str = flag_field(
        "adamw",
        TRAINING,
        f"Optimizer: a Keras optimizer in lower case, such as sgd(momentum=0.9), {_OWN}.",
        check=spec_text,
    )
    learning_rate: float = flag_field(0.001, TRAINING, "Learning rate.")
    lr_scaling: str = flag_field(
        "none",
        TRAINING,
        "Scaling of the learning rate with --batch_size / --base_batch_size: none, linear or sqrt.",
        choices=("none", "linear", "sqrt"),
    )
    base_batch_size: int = flag_field(0, TRAINING, "Batch size for which --learning_rate was tuned, for --lr_scaling.")
    warmup_steps: int = flag_field(0, TRAINING, "Number of steps of linear learning-rate warmup.")
    warmup_start: float = flag_field(0.0, TRAINING, "Learning rate at step 0 as a fraction of the peak.", most=1)
    decay: str = flag_field(
        "none",
        TRAINING,
        "Learning-rate decay: none, cosine(to=0.0), linear(to=0.0) or step(every=..., factor=0.1).",
        check=decay_text,
    )
    momentum_correction: bool = flag_field(
        False, TRAINING, "Momentum correction, for sgd and lars: changes of the learning rate do not distort momentum."
    )
    loss: str = flag_field(
        "sparse_categorical_crossentropy(from_logits=True)",
        TRAINING,
        f"Loss: a Keras loss in snake case, {_OWN}.",
        check=spec_text,
    )
    metrics: str = flag_field(
        "accuracy", TRAINING, "Comma-separated Keras metrics. Empty records the loss only.", check=names_text
    )
    compression_check_every: int = flag_field(
        0, GRADIENTS, "Number of steps between comparisons of compressed gradients with exact ones. 0 disables them."
    )
    compression_max_error: float = flag_field(
        0.0,
        GRADIENTS,
        "Maximum compression error as a fraction of the gradient norm; beyond it, compression is disabled. 0 means no limit.",
    )
    output_dir: str = flag_field(
        "",
        OUTPUT,
        "Directory of the run: new, empty, or of a run to resume. Defaults to runs/DATASET-MODEL-STRATEGY-TIME.",
    )
    checkpoint_every: str = flag_field(
        "0",
        OUTPUT,
        "Interval between checkpoints, in steps, or in seconds such as 600s. 0 saves only on preemption.",
        check=period_text,
    )
    keep: int = flag_field(3, OUTPUT, "Maximum number of checkpoints to keep.", least=1)
    checkpoint_async: bool = flag_field(True, OUTPUT, "Write checkpoints in the background while training continues.")
    checkpoint_strict: bool = flag_field(
        True, OUTPUT, "End the run if a checkpoint cannot be written. Otherwise, log a warning and continue."
    )
    commit_every: int = flag_field(
        0,
        OUTPUT,
        "Number of steps between in-memory checkpoints (commits), from which a run resumes after a process fails. 0 "
        "disables them.",
    )
    commit_dir: str = flag_field(
        "",
        OUTPUT,
        "Directory for in-memory checkpoints, such as /dev/shm/mine. Defaults to one that the launcher creates.",
    )
    resume: str = flag_field(
        "auto",
        OUTPUT,
        "auto resumes from the newest valid checkpoint in --output_dir, if any; never starts anew; a directory of a "
        "checkpoint or of a run starts from it.",
    )
    log_every: int = flag_field(10, OUTPUT, "Number of steps between metric records.", least=1)
    eval_every: int = flag_field(
        0, OUTPUT, "Number of steps between evaluations. 0 evaluates at the end of each epoch."
    )
    measure_every: int = flag_field(
        1000, OUTPUT, "Number of steps between measurements of the communication time of a step. 0 disables them."
    )
    profile_steps: str = flag_field("", OUTPUT, "A:B profiles steps A to B for TensorBoard.", check=window_text)
    stall_warning_seconds: float = flag_field(
        60.0,
        CHECKS,
        "Report a stall, with the stack of each process, if a call of the compiled loop takes this much longer than "
        "twice its usual time. 0 disables the report. The first call, which compiles, is reported only if a process "
        "is missing from it.",
    )
    stall_shutdown_seconds: float = flag_field(
        600.0,
        CHECKS,
        "End all processes with exit code 4 if a call takes this much longer. 0 disables it. The first call is exempt.",
    )
    check_sync_every: int = flag_field(
        0, CHECKS, "Number of steps between checks that all replicas are identical. 0 disables them."
    )
    check_sync: str = flag_field(
        "variables",
        CHECKS,
        "What to check: variables (a difference ends the run) or gradients (logs the norm of each replica).",
        choices=("variables", "gradients"),
    )
    dry_run: bool = flag_field(False, CHECKS, "Print the configuration of the run and exit.")

    def _complete(self) -> None:
        """See base class."""
        if not self.steps and not self.epochs:
            object.__setattr__(self, "epochs", _DEFAULT_EPOCHS)
        if self.strategy == "mesh":
            mesh = mesh_of(self.mesh_shape, 0 if self.mesh_shape else self.devices)
            rules = parse_layout("" if self.layout == AUTO else self.layout, mesh)
            parse_shard(self.shard, self.shard_axis or rules["batch"], self.shard_min_elements, mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig(TrainConfig):
    """The configuration of `tfdist.layout`: the fields of training, with --strategy=mesh by default."""

    strategy: str = flag_field("mesh", DEVICES, "Distribution strategy: mesh.", choices=("mesh",))
    layout: str = flag_field(
        "",
        DEVICES,
        "As for training; auto searches for the layout that communicates least and fits into --memory_gb.",
        check=lambda text: text if text == AUTO else layout_text(text),
    )
    memory_gb: float = flag_field(
        0.0, DEVICES, "Memory per device in GiB for state and activations, for --layout=auto."
    )

    def __post_init__(self) -> None:
        """Checks that a search has a limit; then as for training."""
        super().__post_init__()
        if (self.layout == AUTO) != bool(self.memory_gb):
            raise InputError(
                "A search for a layout needs room to fit into: give both --layout=auto and --memory_gb or neither. "
                f"Received: {flag_text('layout', self.layout)} {flag_text('memory_gb', self.memory_gb)}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(TrainConfig):
    """The configuration of `tfdist.verify`: the fields of training, and the tolerance of the comparison."""

    steps: int = flag_field(10, DURATION, "Number of steps (optimizer updates). 0 trains for --epochs.")
    float64: bool = flag_field(
        False, CHECKS, "Compute in float64, in which rounding errors are far smaller than real differences."
    )
    tolerance: float = flag_field(
        0.0,
        CHECKS,
        "Maximum relative difference that passes. 0 chooses it by optimizer and --float64, and 4 times the rounding "
        "error in bfloat16. Required with float16 or --compression; dgc and signsgd are different algorithms, close "
        "to one device at no tolerance.",
    )

    def __post_init__(self) -> None:
        """Checks what differs from one device by design: a loss scale skips steps, codes leave out."""
        super().__post_init__()
        if not self.tolerance and (self.precision == "mixed_float16" or self.compression != "none"):
            raise InputError(
                "Neither float16 nor compression give the result of one device to rounding: say with --tolerance how "
                f"near it has to be, or leave them out. Received: {flag_text('precision', self.precision)} "
                f"{flag_text('compression', self.compression)}."
            )
