"""The registry of strategies: their declarations, and the flags that are their options.

The strategy NAME is the class `STRATEGY` of `strategies/NAME.py`. All other modules look up strategies and their
differences here, without importing TensorFlow or a strategy.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.cluster.environment import HOROVOD_LAUNCHERS, Cluster
from tfdist.cluster.topology import parse_topology
from tfdist.config import fields
from tfdist.config.all_reduce import ENGINE, TFDIST_ALGORITHMS, AlgorithmTable, parse_all_reduce, parse_table
from tfdist.config.fields import Flags, device_flag, normalize_address, normalize_layout, strategy_option
from tfdist.config.layouts import REPLICA_STAGES, STAGES, parse_grid, parse_layout, parse_shard
from tfdist.config.mesh import mesh_of, parse_mesh
from tfdist.config.pipeline import PipelineOptions, check_pipeline
from tfdist.config.rules import is_auto, method_names
from tfdist.config.staleness import PUSHED_METHODS, ParameterServerOptions, count_workers, parse_staleness
from tfdist.errors import InputError, nearest
from tfdist.storage.registry import read_user_file


def validate_all_reduce(text: str) -> str:
    """Validates `--all_reduce`, including its file."""
    choice = parse_all_reduce(text)
    if choice.table:
        read_table(choice.table)
    return text


def normalize_topology(text: str) -> str:
    """Normalizes comma-separated numbers of replicas per host; may be empty."""
    counts = parse_topology(text) if text else ()
    if counts is None:
        raise InputError(f"{text} must be numbers of replicas above 0, one for each host. Write 2,2")
    return ",".join(map(str, counts))


def read_table(file: str) -> AlgorithmTable:
    """Reads a table of algorithms; raises `InputError` if the file does not exist or is invalid."""
    rule = "table must be a file with a table of algorithms, such as all_reduce.csv of another run."
    return parse_table(read_user_file(file, rule), file)


class Processes(enum.Enum):
    """The processes of a strategy's job."""

    ONE = "one process"
    SEVERAL = "one or several processes; the environment provides rank, size and the address of rank 0"
    ANY = "one or several processes; the strategy detects what the environment does not provide"


# By flag, a sentence: the reason why the flag must keep its default, and the remedy. Or a pair of a condition on the parsed
# value, in which the flag is refused, and this sentence.
Refusals = Mapping[str, str | tuple[Callable[[Any], bool], str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmokeTest:
    """A test of a strategy by `tfdist doctor`: a few steps on one machine."""

    processes: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values of the strategy's options
    package: str = ""  # the Python package that it needs besides TensorFlow; may be empty
    library: str = ""  # the library that the package must be built with
    install: str = ""  # command that installs the package with the library

    @property
    def devices(self) -> int:
        """Number of devices of each process."""
        mesh = parse_mesh(self.options.get("mesh_shape", "model:1"))
        return int(self.options.get("devices", mesh.axes.get("model", 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """The declaration of a strategy."""

    name: str  # as in `--strategy`
    help: str = ""  # the devices or processes that it uses, in a few words
    processes: Processes = Processes.ANY  # the processes of its job
    options: tuple[str, ...] | None = None  # names of the flags that its constructor takes; None if unknown
    refuses: Refusals = dataclasses.field(default_factory=dict)  # flags whose values it rejects
    # The accepted values of flags that several strategies take.
    accepts: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # Takes this process's position in the job and its number of devices; returns whether `--strategy=auto` selects this
    # strategy; at most one strategy may return True. None for never.
    auto: Callable[[Cluster, int], bool] | None = None
    # Takes a configuration; raises `InputError` if the strategy's options conflict.
    check: Callable[[Any], None] | None = None
    # Takes a configuration and the job's `Cluster`; raises `InputError` if they do not match.
    check_cluster: Callable[[Any, Any], object] | None = None
    # Whether it runs Keras's own `fit` in any script. Replicas must then accept any number of rows, and models may be
    # created outside of its scope.
    runs_keras_fit: bool = True
    single_device_advice: str = ""  # advice for a user who selects it with a single device, as a sentence; may be empty
    adopts: tuple[str, ...] = ()  # names of the tf.distribute classes whose instances it can use
    smoke_tests: tuple[SmokeTest, ...] = ()  # tests on one machine; empty if the strategy needs special hardware


_ALL_REDUCE_OPTIONS = ("all_reduce", "topology")


def _is_one_process(cluster: Cluster) -> bool:
    return cluster.size == 1 and cluster.source not in HOROVOD_LAUNCHERS


def _check_mesh(config: Any) -> None:
    mesh = mesh_of(config.mesh_shape, 0 if config.mesh_shape else config.devices)
    rules = parse_layout("" if config.layout == fields.AUTO else config.layout, mesh)
    parse_shard(config.shard, config.shard_axis or rules["batch"], config.shard_min_elements, mesh)


_EQUAL_ROWS = (
    "Every replica needs the same number of rows on a mesh and on a TPU: leave out --balance or use another --strategy."
)

_INSTALL_HOROVOD = "tfdist install_horovod"
_GLOO_TEST = SmokeTest(
    processes=2, options={"communication": "gloo"}, package="horovod", library="Gloo", install=_INSTALL_HOROVOD
)

DECLARATIONS = (
    Declaration(
        name="single",
        help="one device",
        processes=Processes.ONE,
        options=(),
        auto=lambda cluster, devices: _is_one_process(cluster) and devices == 1,
        smoke_tests=(SmokeTest(),),
    ),
    Declaration(
        name="mirrored",
        help="the devices of one process",
        processes=Processes.ONE,
        options=("devices", *_ALL_REDUCE_OPTIONS),
        auto=lambda cluster, devices: _is_one_process(cluster) and devices > 1,
        single_device_advice="Pass --devices=N to use N devices, or use --strategy=single.",
        adopts=("MirroredStrategy", "OneDeviceStrategy"),
        smoke_tests=(SmokeTest(options={"devices": 2}),),
    ),
    Declaration(
        name="multiworker",
        help="several processes, with TensorFlow's collectives",
        processes=Processes.SEVERAL,
        options=("communication", "intra_op_threads", "shard", *_ALL_REDUCE_OPTIONS),
        accepts={"communication": ("auto", "ring", "nccl"), "shard": REPLICA_STAGES},
        auto=lambda cluster, devices: (
            cluster.size > 1 and cluster.source not in HOROVOD_LAUNCHERS and not cluster.servers
        ),
        adopts=("MultiWorkerMirroredStrategy",),
        smoke_tests=(SmokeTest(processes=2), SmokeTest(processes=2, options={"shard": "optimizer"})),
    ),
    Declaration(
        name="tpu",
        help="the cores of a TPU",
        processes=Processes.ONE,
        options=("tpu",),
        refuses={
            "compression": "No compression method has been tested on a TPU: use --compression=none there.",
            "sync": "On a TPU, all replicas run one program and cannot have weights of their own: use --sync=every_step.",
            "balance": _EQUAL_ROWS,
            "all_reduce": "The cores of a TPU cannot communicate in groups: leave out --all_reduce or use another --strategy.",
        },
        runs_keras_fit=False,
    ),
    Declaration(
        name="horovod",
        help="several processes, with Horovod",
        options=("communication", "intra_op_threads", "shard", *_ALL_REDUCE_OPTIONS),
        accepts={"communication": ("auto", "gloo", "mpi"), "shard": REPLICA_STAGES},
        auto=lambda cluster, devices: cluster.source in HOROVOD_LAUNCHERS,
        smoke_tests=(
            _GLOO_TEST,
            dataclasses.replace(_GLOO_TEST, options={"communication": "gloo", "shard": "optimizer"}),
            dataclasses.replace(
                _GLOO_TEST,
                options={"communication": "mpi"},
                library="MPI",
                install=f"pip install mpich && {_INSTALL_HOROVOD} --mpi",
            ),
        ),
        single_device_advice="No launcher started this process: start it with `tfdist launch --processes=N "
        "--launcher=horovod -- ...` or horovodrun, or use strategy single.",
    ),
    Declaration(
        name="mesh",
        help="a mesh of devices over which the model is sharded",
        options=("devices", "mesh_shape", "layout", "shard", "shard_axis", "shard_min_elements", "intra_op_threads"),
        refuses={
            "balance": _EQUAL_ROWS,
            "compression": "On a mesh, DTensor reduces gradients itself: leave out --compression or use another --strategy.",
            "sync": "On a mesh, there is one replica, sharded over devices: leave out --sync or use another --strategy.",
            "all_reduce": "On a mesh, DTensor reduces gradients itself: leave out --all_reduce or use another --strategy.",
            "jit_compile": "On a mesh, DTensor compiles its programs itself: leave out --jit_compile or use another "
            "--strategy.",
        },
        check=_check_mesh,
        runs_keras_fit=False,
        smoke_tests=(SmokeTest(options={"devices": 2}),),
        single_device_advice="Pass --devices=N or --mesh_shape=data:2;model:2, or use --strategy=single.",
    ),
    Declaration(
        name="pipeline",
        help="stages of the model in several processes",
        options=(
            "mesh_shape",
            "layout",
            "pipeline_schedule",
            "micro_batches",
            "cut",
            "activation_compression",
            "shard",
            "communication",
            "intra_op_threads",
        ),
        accepts={"communication": ("auto", "ring", "nccl", "gloo", "mpi"), "shard": REPLICA_STAGES},
        refuses={
            "accumulate_steps": "A pipeline computes a step in micro-batches: use --micro_batches instead of "
            "--accumulate_steps.",
            "balance": "All micro-batches of a pipeline have the same size: leave out --balance.",
            "all_reduce": "The stages of a pipeline use the engine's all-reduce: leave out --all_reduce.",
            "sync": "The stages of a pipeline are updated together, in every step: leave out --sync or use another --strategy.",
            "jit_compile": "Stages of a pipeline communicate within a step: leave out --jit_compile.",
            "compression": (
                is_auto,
                "Each stage of a pipeline would measure and choose by itself: specify a method instead of --compression=auto.",
            ),
        },
        check=check_pipeline,
        check_cluster=lambda config, cluster: parse_grid(config.mesh_shape, cluster.size, config.layout),
        runs_keras_fit=False,
        smoke_tests=(
            SmokeTest(processes=2, options={"micro_batches": 2}),
            SmokeTest(processes=2, options={"micro_batches": 2, "mesh_shape": "stage:2;model:2", "layout": "in:model"}),
        ),
        single_device_advice="Start several processes with `tfdist launch --processes=N -- ...`, or use --strategy=single.",
    ),
    Declaration(
        name="parameter_server",
        help="workers that pull variables from servers",
        processes=Processes.ANY,
        options=("servers", "staleness", "sparse_updates", "shard_variables", "min_table_bytes", "intra_op_threads"),
        refuses={
            "compression": (
                lambda rules: not method_names(rules) <= {*PUSHED_METHODS, "none"},
                "A server decodes the gradients of each worker separately, and without the user's code: use "
                f"{', '.join(PUSHED_METHODS)}, or leave out --compression.",
            ),
            "compression_check_every": "Workers of parameter servers have no exact sum to compare with: leave out "
            "--compression_check_every.",
            "sync": "Workers of parameter servers have no optimizer to train locally: leave out --sync, and see --staleness.",
            "balance": "Parameter servers assign work to any worker that is free: leave out --balance.",
            "all_reduce": "Parameter servers add gradients themselves: leave out --all_reduce.",
            "ema": "Parameter servers keep no average of the weights: leave out --ema.",
            "find": "A search needs gradients of one step at a time: use another --strategy for --find.",
        },
        auto=lambda cluster, devices: cluster.servers > 0,
        check_cluster=lambda config, cluster: parse_staleness(config.staleness).needed_shares(
            count_workers(config.servers, cluster.size, cluster.servers)
        ),
        smoke_tests=(SmokeTest(processes=2),),
        single_device_advice="Start several processes with `tfdist launch --processes=N -- ...`, or use --strategy=single.",
    ),
)
AUTO = "auto"
PARAMETER_SERVER = "parameter_server"
REFERENCE = "single"  # the strategy for comparisons and for exporting a model

NAMES = tuple(declaration.name for declaration in DECLARATIONS)
RUN_KERAS_FIT = tuple(declaration.name for declaration in DECLARATIONS if declaration.runs_keras_fit)
_AUTO_DECLARATION = Declaration(
    name=AUTO,
    options=tuple(option for declaration in DECLARATIONS if declaration.auto for option in declaration.options or ()),
)
_DECLARATIONS_BY_NAME = {declaration.name: declaration for declaration in (_AUTO_DECLARATION, *DECLARATIONS)}


def strategy_declaration(name: str) -> Declaration:
    """Returns the declaration of a strategy, or an empty one for `package.module:Class`, which is loaded later."""
    if name not in _DECLARATIONS_BY_NAME and ":" not in name:
        raise InputError(f"--strategy={name} is not known.{nearest(name, tuple(_DECLARATIONS_BY_NAME))}")
    return _DECLARATIONS_BY_NAME.get(name) or Declaration(name=name)


def strategies_with(option: str) -> tuple[str, ...]:
    """Returns the names of the strategies that take an option."""
    return tuple(declaration.name for declaration in DECLARATIONS if option in (declaration.options or ()))


def strategy_help(names: tuple[str, ...] = NAMES) -> str:
    """Returns the help of `--strategy` with these names."""
    descriptions = ", ".join(f"{name} ({strategy_declaration(name).help})" for name in names)
    return f"Distribution strategy: auto, {descriptions}, or package.module:Class."


_COMMUNICATION_HELP = "Collective implementation: {}.".format(
    "; ".join(
        f"{d.name} accepts {', '.join(d.accepts['communication'])}"
        for d in DECLARATIONS
        if "communication" in d.accepts
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(Flags):
    """The strategy, its options for any job, and how the job's processes find each other."""

    strategy: str = device_flag(AUTO, strategy_help())
    devices: int = strategy_option(
        0,
        f"Number of devices per process, for {' and '.join(strategies_with('devices'))}. 0 uses all GPUs, or one CPU device; "
        "for a mesh, as many as it needs.",
        neutral_values=(0, 1),
    )
    communication: str = strategy_option("auto", _COMMUNICATION_HELP, choices=("auto", "ring", "nccl", "gloo", "mpi"))
    intra_op_threads: int = strategy_option(
        0,
        "Number of threads within an operation. 0 pins the process to its share of the host's cores.",
        per_process=True,
        neutral_values=(),
    )
    all_reduce: str = strategy_option(
        ENGINE,
        f"Algorithm for sums over replicas: engine (its own all-reduce), {', '.join(TFDIST_ALGORITHMS)}, auto (measures which "
        "is fastest, by size) or auto(table=FILE) (as measured before). docs/guides/all_reduce.md explains them.",
        check=validate_all_reduce,
        safe_values=fields.ANY_TEXT,
        neutral_values=(),
    )
    topology: str = strategy_option(
        "",
        "Numbers of consecutive replicas on each host, such as 2,2, for --all_reduce. Set by the launcher by default.",
        check=normalize_topology,
        safe_values=fields.ANY_TEXT,
        neutral_values=(),
    )
    coordinator: str = device_flag(
        "", "HOST:PORT of rank 0, if the environment does not provide it.", check=normalize_address, training_only=True
    )
    token_file: str = device_flag(
        "",
        "File with the token that the processes of a job on several hosts share, if TFDIST_TOKEN is not set. Its mode must "
        "be 0600.",
        per_process=True,
        training_only=True,
    )
    insecure: bool = device_flag(
        False,
        "Run a job on several hosts without a token: anyone who can reach the coordinator can join it.",
        training_only=True,
    )
    start_timeout_seconds: float = device_flag(120.0, "Seconds to wait for the other processes at start-up.", minimum=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions(PipelineOptions, ParameterServerOptions):
    """Options of strategies that run `tfdist.Trainer`, but not Keras's own `fit`."""

    tpu: str = strategy_option("", "Name or address of the TPU, for --strategy=tpu; local on a TPU VM.")
    mesh_shape: str = strategy_option(
        "",
        "Axes of the device mesh for --strategy=mesh, such as data:2;model:4, by default data:DEVICES; or of the processes for "
        "--strategy=pipeline, such as stage:2;data:2, by default stage:PROCESSES, and of the devices in each: "
        "stage:2;data:2;model:2.",
        parse=parse_mesh,
        safe_values=fields.ANY_TEXT,
    )
    layout: str = strategy_option(
        "",
        "Mapping of named tensor dims to mesh axes for --strategy=mesh, such as batch:data;heads:model. By default, "
        "the batch is sharded over the first axis. For --strategy=pipeline, a mapping to the axis model, such as "
        "heads:model.",
        check=normalize_layout,
        safe_values=fields.ANY_TEXT,
    )
    shard: str = strategy_option(
        "none",
        "State to shard over replicas, as in ZeRO: none, optimizer (optimizer state) or, over the batch axis of a mesh, "
        "gradients (optimizer state and gradients) or parameters (optimizer state, gradients and parameters).",
        choices=STAGES,
    )
    shard_axis: str = strategy_option(
        "", "Mesh axis for --shard. Defaults to the axis of the batch.", safe_values=fields.ANY_TEXT
    )
    shard_min_elements: int = strategy_option(
        1024, "Minimum number of elements of variables to shard with --shard, for --strategy=mesh."
    )
