"""What a run is, as a frozen and validated value: the commands make it of flags, and a program may make it without."""

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

WHAT = "What to train"
LONG = "How long"
WHERE = "Where it runs"
LEARNS = "How it learns"
GRADIENTS = "What becomes of gradients"
WRITTEN = "What is written"
CHECKS = "Checks"
TOPICS = (WHAT, LONG, WHERE, LEARNS, GRADIENTS, WRITTEN, CHECKS)  # in the help's order

_DEFAULT_EPOCHS = 10
_LARGEST_SEED = 2**31 - 1
_OWN = "or your own package.module:name(...)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Where a job runs and what becomes of its gradients, whatever it trains. A field has the name and meaning of its flag.

    Raises:
      InputError: a field is out of its range, or two exclude each other.
    """

    strategy: str = flag_field(
        "auto", WHERE, "auto, single, mirrored, multiworker, horovod, tpu, mesh, or package.module:Class."
    )
    devices: int = flag_field(
        0, WHERE, "Devices of this process, for mirrored and mesh; 0: all GPUs, or one CPU device; a mesh's."
    )
    communication: str = flag_field(
        "auto", WHERE, "What carries multiworker's tensors: auto, ring or nccl.", choices=("auto", "ring", "nccl")
    )
    coordinator: str = flag_field(
        "", WHERE, "HOST:PORT at which rank 0 is met, where the environment does not say it.", check=address_text
    )
    start_timeout_seconds: float = flag_field(120.0, WHERE, "How long to wait for the other processes.", least=1)
    intra_op_threads: int = flag_field(
        0, WHERE, "Threads of one operation; 0: a fair share of the host's cores, to which the process keeps."
    )
    steps_per_call: int = flag_field(10, WHERE, "Steps in one call of the compiled loop; changes speed alone.", least=1)
    jit_compile: bool = flag_field(False, WHERE, "Compile forward and backward with XLA.")
    precision: str = flag_field(
        "float32",
        LEARNS,
        "float32, mixed_bfloat16 or mixed_float16: layers compute in 16 bits, weights stay in 32.",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )
    loss_scale: str = flag_field(
        "",
        LEARNS,
        "dynamic(initial_power=15, growth_interval=2000, hysteresis=1, floor=..., cap=...) or a number, for "
        "mixed_float16; empty: dynamic there.",
        check=number_or_spec_text,
    )
    max_skipped_steps: int = flag_field(
        50, LEARNS, "So many steps in a row skipped because of overflow end the run.", least=1
    )
    accumulate_steps: int = flag_field(
        1, GRADIENTS, "Parts in which a replica computes its rows of a step; changes memory and time alone.", least=1
    )
    clip_norm: float = flag_field(0.0, GRADIENTS, "Largest global norm of the whole gradient; 0: no limit.")
    clip_value: float = flag_field(0.0, GRADIENTS, "Largest absolute value in the whole gradient; 0: no limit.")
    recompute: str = flag_field(
        "none",
        GRADIENTS,
        "Layers computed again in the backward pass, which saves memory for time: none, full, or a regular expression for "
        "the whole path of a layer.",
    )
    compression: str = flag_field(
        "none",
        GRADIENTS,
        "How gradients travel: a method such as powersgd(rank=4), topk(ratio=0.01)|fp16, "
        f"{_OWN}, or rules such as 'size>=10000: int8; *: none'.",
        check=methods_text,
    )
    compression_min_bytes: int = flag_field(65536, GRADIENTS, "Gradients smaller than this are not compressed.")
    bucket_mb: float = flag_field(
        4.0, GRADIENTS, "Small gradients travel together in messages of at most so many MiB.", least=0.001, most=1024
    )
    batch_norm: str = flag_field(
        "local",
        LEARNS,
        "BatchNormalization's moments: local (a replica's rows; on a mesh all) or synchronized (the global batch).",
        choices=("local", "synchronized"),
    )
    seed: int = flag_field(
        0, LEARNS, "Of initial weights, the order of examples and random layers.", most=_LARGEST_SEED
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
    """How a program of the user's own runs, which calls Keras's `fit`, `evaluate` and `predict`."""

    strategy: str = flag_field("auto", WHERE, "auto, single, mirrored, multiworker, horovod, or package.module:Class.")
    devices: int = flag_field(0, WHERE, "Devices of this process, for mirrored; 0: all GPUs, or one CPU device.")
    stall_shutdown_seconds: float = flag_field(
        600.0,
        CHECKS,
        "How long a process waits for the others: at a call of Keras's fit, evaluate or predict, and at the program's end.",
        least=1,
    )
    check_first_batch: bool = flag_field(
        True,
        CHECKS,
        "Compare what a program's own losses, metrics and steps compute from the first batch on replicas with what one device "
        "computes. Where no mean or sum over replicas is equal, every replica computes whole batches.",
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
    """One training run; `python -m tfdist.train --help` shows its fields."""

    model: str = flag_field(
        "cnn", WHAT, f"mlp, cnn, resnet50 or transformer, with arguments if wanted, {_OWN}.", check=spec_text
    )
    dataset: str = flag_field(
        "digits", WHAT, f"digits, mnist5k, fashion_mnist, text, synthetic:SHAPE, tfds:NAME, {_OWN}.", check=spec_text
    )
    data_dir: str | None = flag_field(
        None, WHAT, "Folder of the data set's files; empty: where the data set looks by itself."
    )
    steps: int = flag_field(0, LONG, "How many updates; 0: --epochs says how long.")
    epochs: int = flag_field(
        0, LONG, f"How many times every example is used; 0: {_DEFAULT_EPOCHS}, unless --steps is given."
    )
    tpu: str = flag_field("", WHERE, "Name or address of the TPU, for --strategy=tpu; `local` on a TPU VM.")
    mesh_shape: str = flag_field(
        "", WHERE, "The mesh's axes, such as data:2;model:4, for --strategy=mesh; empty: data:DEVICES.", check=mesh_text
    )
    layout: str = flag_field(
        "",
        WHERE,
        "Which named dims of tensors are split over which axes, such as batch:data;heads:model, for --strategy=mesh; "
        "the batch lies on the first axis unless this says otherwise.",
        check=layout_text,
    )
    shard: str = flag_field(
        "none",
        WHERE,
        "What lies in parts over the batch's axis of a mesh: none, optimizer (its slots), gradients (they, too) or "
        "parameters (all of them).",
        choices=STAGES,
    )
    shard_axis: str = flag_field("", WHERE, "The mesh's axis for --shard; empty: the batch's.")
    shard_min_elements: int = flag_field(1024, WHERE, "Variables with fewer elements stay whole under --shard.")
    batch_size: int = flag_field(64, LEARNS, "Examples in a step, over all replicas.", least=1)
    elastic_batch: str = flag_field(
        "global",
        LEARNS,
        "What stays when a run goes on with another number of replicas: global (the batch, and so the result) or replica (the "
        "batch of one replica: the global one and the learning rate follow the number of replicas).",
        choices=("global", "replica"),
    )
    optimizer: str = flag_field(
        "adamw", LEARNS, f"A Keras optimizer in lower case, as in sgd(momentum=0.9), {_OWN}.", check=spec_text
    )
    learning_rate: float = flag_field(0.001, LEARNS, "Given to the optimizer.")
    lr_scaling: str = flag_field(
        "none",
        LEARNS,
        "What a batch k times --base_batch_size makes of the rate: linear (k), sqrt or none.",
        choices=("none", "linear", "sqrt"),
    )
    base_batch_size: int = flag_field(0, LEARNS, "The batch size that --learning_rate suits, for --lr_scaling.")
    warmup_steps: int = flag_field(0, LEARNS, "Steps in which the rate rises to its peak.")
    warmup_start: float = flag_field(0.0, LEARNS, "The first step's rate as a part of the peak.", most=1)
    decay: str = flag_field(
        "none",
        LEARNS,
        "How the rate falls: cosine(to=0.0), linear(to=0.0), step(every=..., factor=0.1) or none.",
        check=decay_text,
    )
    momentum_correction: bool = flag_field(
        False, LEARNS, "Keep momentum apart from the rate, so that it follows a change at once; for sgd and lars."
    )
    loss: str = flag_field(
        "sparse_categorical_crossentropy(from_logits=True)",
        LEARNS,
        f"A Keras loss in snake case, {_OWN}.",
        check=spec_text,
    )
    metrics: str = flag_field(
        "accuracy", LEARNS, "Keras metrics, with commas between; empty: the loss alone.", check=names_text
    )
    compression_check_every: int = flag_field(
        0, GRADIENTS, "Steps between two comparisons of compressed gradients with exact ones; 0: never."
    )
    compression_max_error: float = flag_field(
        0.0, GRADIENTS, "Compression that errs by more than this part of a gradient's norm is given up; 0: no limit."
    )
    output_dir: str = flag_field(
        "",
        WRITTEN,
        "Folder of the run: new, empty, or of a run to go on with; empty: runs/DATASET-MODEL-STRATEGY-TIME.",
    )
    checkpoint_every: str = flag_field(
        "0",
        WRITTEN,
        "Steps, or seconds as in 600s, between two checkpoints; 0: only when preempted.",
        check=period_text,
    )
    keep: int = flag_field(3, WRITTEN, "So many checkpoints stay, the newest ones.", least=1)
    checkpoint_async: bool = flag_field(True, WRITTEN, "Write checkpoints in the background, while training goes on.")
    checkpoint_strict: bool = flag_field(
        True, WRITTEN, "End the run when a checkpoint cannot be written; else warn, and try again at the next."
    )
    commit_every: int = flag_field(
        0, WRITTEN, "Steps between two commits, checkpoints in memory for when a process dies; 0: never."
    )
    commit_dir: str = flag_field(
        "", WRITTEN, "Directory for commits, such as /dev/shm/mine; empty: the one that the launcher has made."
    )
    resume: str = flag_field(
        "auto",
        WRITTEN,
        "auto: go on from the newest good checkpoint in --output_dir, if there is one; never; or the folder of a checkpoint or "
        "run to begin with.",
    )
    log_every: int = flag_field(10, WRITTEN, "Steps between two records of metrics.", least=1)
    eval_every: int = flag_field(0, WRITTEN, "Steps between two evaluations; 0: at each epoch's end.")
    measure_every: int = flag_field(
        1000, WRITTEN, "Steps between two measurements of what communication costs a step; 0: never."
    )
    profile_steps: str = flag_field("", WRITTEN, "A:B writes a profile of the steps from A to B.", check=window_text)
    stall_warning_seconds: float = flag_field(
        60.0,
        CHECKS,
        "A call of the compiled loop that lasts so much longer than twice its usual time is reported, with where each process"
        " is; 0: never. The first, which compiles, only if a process is not in it.",
    )
    stall_shutdown_seconds: float = flag_field(
        600.0,
        CHECKS,
        "One that lasts so much longer ends all processes with code 4; 0: never. The first, which compiles, may last.",
    )
    check_sync_every: int = flag_field(
        0, CHECKS, "Steps between two looks at whether all replicas are alike; 0: never."
    )
    check_sync: str = flag_field(
        "variables",
        CHECKS,
        "What is looked at: variables (a difference ends the run) or gradients (the norms of all, by replica, to the log).",
        choices=("variables", "gradients"),
    )
    dry_run: bool = flag_field(False, CHECKS, "Print what would run, and end.")

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
    """A plan of a mesh: train's fields; the strategy is mesh if nothing is said."""

    strategy: str = flag_field("mesh", WHERE, "mesh.", choices=("mesh",))
    layout: str = flag_field(
        "",
        WHERE,
        "As for training; or auto: the layout that sends least of those that fit --memory_gb, printed as a flag.",
        check=lambda text: text if text == AUTO else layout_text(text),
    )
    memory_gb: float = flag_field(0.0, WHERE, "GiB of a device for state and activations, for --layout=auto.")

    def __post_init__(self) -> None:
        """Checks that a search has a limit; then as for training."""
        super().__post_init__()
        if (self.layout == AUTO) != bool(self.memory_gb):
            raise InputError(
                "A search for a layout needs room to fit into: give both --layout=auto and --memory_gb or neither. Received: "
                f"{flag_text('layout', self.layout)} {flag_text('memory_gb', self.memory_gb)}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(TrainConfig):
    """One comparison of a strategy with a single device: train's fields, and how exact it has to be."""

    steps: int = flag_field(10, LONG, "How many updates; 0: --epochs says how long.")
    float64: bool = flag_field(False, CHECKS, "Compute in float64, where rounding and mistakes are far apart.")
    tolerance: float = flag_field(
        0.0,
        CHECKS,
        "Largest relative difference that passes; 0: by optimizer and --float64, and 4 times its own rounding in bfloat16. "
        "Needed with float16 or --compression; dgc and signsgd are other algorithms than a sum, near one device's result at no "
        "tolerance.",
    )

    def __post_init__(self) -> None:
        """Checks what differs from one device by design: a loss scale skips steps, codes leave out."""
        super().__post_init__()
        if not self.tolerance and (self.precision == "mixed_float16" or self.compression != "none"):
            raise InputError(
                "Neither float16 nor compression give the result of one device to rounding: say with --tolerance how near it "
                "has to be, or leave them out. Received: "
                f"{flag_text('precision', self.precision)} {flag_text('compression', self.compression)}."
            )
