"""Updates per second on parameter servers, beside TensorFlow's own: in loops as published, and in `fit` of `tf_keras`.

    make peers                            # once: tf_keras, in an environment of its own
    python benchmarks/server_speed.py     # about eight minutes
    python benchmarks/server_speed.py --parts=wide_and_deep --rounds=20

All jobs of a table run at the same time and take turns, one epoch each, so that a drift of the machine's speed meets all of
them; a job that waits for its turn computes nothing. Every job has the same model, optimizer, batch and steps per update, two
workers and a server, one thread within an operation, and waits for all updates at the end of an epoch. Optimizers are those
whose sparse update equals an exact one, because `tf_keras` makes sparse ones.

Parts: `mlp` and `wide_and_deep` (updates per second beside the peers), `exchange` (33.6 MB to a server and back, beside an
all-reduce, and a reduction and a broadcast, of the same bytes by Horovod over Gloo) and `workers` (examples per second by
number of workers, of steps that wait for a known time, so that this machine's cores do not matter).
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__)
PEERS = HERE.parent.parent / ".venv-peers" / "bin" / "python"
SIDES = {
    "mlp": ("async", "bounded(4)", "coordinator", "tf_keras"),
    "wide_and_deep": ("async", "bounded(4)", "coordinator", "tf_keras"),
    "exchange": ("push and pull", "all-reduce", "reduce and broadcast"),
    "workers": ("1 worker", "2 workers", "3 workers"),
}
PEER_SIDES = ("coordinator", "tf_keras", "all-reduce", "reduce and broadcast")
ROWS, FIELDS, WIDTH = 100_000, 26, 32  # of the table of wide_and_deep, its keys per example and its columns
BATCH = {"exchange": 0, "mlp": 64, "wide_and_deep": 256, "workers": 32}
EXCHANGED_MB = 33.6
_PART_SECONDS, _MIN_ROUNDS = 75.0, 3  # without the start; a loaded machine makes fewer rounds
STEP_SECONDS = 0.05  # that a step of `workers` waits
EXCHANGED = [(1024, 2048), (2048,), (2048, 2048), (2048,), (2048, 1024), (1024,)]  # 33.6 MB in float32


def make_model(keras: Any, name: str) -> Any:
    """Returns a compiled model of Keras 3 or of `tf_keras`."""
    layers, compiled = keras.layers, {"jit_compile": False}
    keras.utils.set_random_seed(0)
    if name == "wide_and_deep":
        ids = keras.Input((FIELDS,), dtype="int64")
        wide = layers.Flatten()(layers.Embedding(ROWS, 1)(ids))
        deep = layers.Flatten()(layers.Embedding(ROWS, WIDTH)(ids))
        for units in (128, 64):
            deep = layers.Dense(units, activation="relu")(deep)
        model = keras.Model(ids, layers.Dense(1)(layers.Concatenate()([wide, deep])))
        model.compile(keras.optimizers.Adagrad(0.01), keras.losses.BinaryCrossentropy(from_logits=True), **compiled)
        return model
    x = keras.Input((8,) if name == "workers" else (1024,))
    outputs = _wait(keras)(x) if name == "workers" else x
    for _ in range(0 if name == "workers" else 2):
        outputs = layers.Dense(2048, activation="relu")(outputs)
    model = keras.Model(x, layers.Dense(1024)(outputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.001), loss, **compiled)
    return model


def _wait(keras: Any) -> Any:
    import tensorflow as tf

    class Wait(keras.layers.Layer):  # type: ignore[misc]
        """Waits in training."""

        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                return x
            with tf.control_dependencies([tf.py_function(lambda: time.sleep(STEP_SECONDS), [], [])]):
                return tf.identity(x)

    return Wait()


def examples(name: str, steps: int) -> tuple[Any, Any]:
    """Returns the random examples of an epoch. Keys are long-tailed."""
    import numpy as np

    random, count = np.random.default_rng(0), steps * BATCH[name]
    if name == "wide_and_deep":
        keys = np.minimum(ROWS ** random.random((count, FIELDS)), ROWS - 1).astype(np.int64) * 7919 % ROWS
        return keys, random.integers(0, 2, (count, 1)).astype(np.float32)
    x = random.standard_normal((count, 8 if name == "workers" else 1024), dtype=np.float32)
    return x, random.integers(0, 1024, count)


Epoch = Callable[[], tuple[float, float]]


class Turns:
    """The turns of one job: files in a directory, which the first worker reads and writes."""

    def __init__(self, directory: str):
        self._directory, self._number = pathlib.Path(directory), 0

    def wait(self) -> None:
        """Waits until this job's next epoch may begin."""
        while not (self._directory / f"begin{self._number}").exists():
            time.sleep(0.002)

    def end(self, seconds: float) -> None:
        """Reports how long the epoch took."""
        path = self._directory / "result"
        path.write_text(str(seconds))
        path.rename(self._directory / f"end{self._number}")
        self._number += 1

    def run(self, job: subprocess.Popen, deadline: float) -> float:
        """Lets the job make its next epoch; returns the seconds that it took. Called in the parent."""
        (self._directory / f"begin{self._number}").touch()
        result, limit = self._directory / f"end{self._number}", time.monotonic() + deadline
        while not result.exists():
            if job.poll() is not None or time.monotonic() > limit:
                log = (self._directory / "log").read_text()[-3000:]
                raise SystemExit(f"{log}\nNo result from {self._directory.name}; its log is above.")
            time.sleep(0.002)
        self._number += 1
        return float(result.read_text())


def fit(keras: Any, model: Any, epochs: int, turns: Turns, data: dict[str, Any], *, is_first: bool = True) -> None:
    """Trains by `fit`."""

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        """Takes turns, and measures epochs."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if is_first:
                turns.wait()
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if is_first:
                turns.end(time.perf_counter() - self.started)

    model.fit(**data, epochs=epochs, callbacks=[Clock()], verbose=0)


def served(name: str, steps: int, epochs: int, turns: Turns, staleness: str) -> None:
    """Trains with tfdist."""
    import keras

    import tfdist

    options = {"staleness": staleness, "sparse_updates": "lazy", "intra_op_threads": 1}
    strategy = tfdist.load_strategy("parameter_server", **options)
    with strategy.scope():
        model = make_model(keras, name)
        model.compile(model.optimizer, model.loss, jit_compile=False, steps_per_execution=steps)
    x, y = examples(name, steps)
    data = {"x": x, "y": y, "batch_size": BATCH[name]}
    fit(keras, tfdist.distribute(model), epochs, turns, data, is_first=strategy.is_chief)


def dataset(name: str, steps: int) -> Any:
    """Returns the endless dataset of a peer's worker."""
    import tensorflow as tf

    x, y = examples(name, steps)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(BATCH[name]).prefetch(2)


def peer_strategy() -> Any:
    """Returns a `ParameterServerStrategy` in the chief; serves in other processes."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        ).join()
    return tf.distribute.ParameterServerStrategy(resolver)


def coordinator(name: str, steps: int, epochs: int, turns: Turns) -> None:
    """Trains a Keras 3 model by TensorFlow's coordinator, in a loop of one's own."""
    strategy = peer_strategy()
    import keras
    import tensorflow as tf

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = make_model(keras, name)
        model.optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(iterator: Any) -> Any:
        def replica_step(batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(next(iterator),)), axis=None)

    per_worker = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(lambda _: dataset(name, steps))
    )
    iterator = iter(per_worker)
    for _ in range(epochs):
        turns.wait()
        started = time.perf_counter()
        for _ in range(steps):
            loss = coordinator.schedule(train_step, args=(iterator,))
        coordinator.join()
        float(loss.fetch())
        turns.end(time.perf_counter() - started)


def legacy(name: str, steps: int, epochs: int, turns: Turns) -> None:
    """Trains by `fit` of `tf_keras`."""
    strategy = peer_strategy()
    import tensorflow as tf

    with strategy.scope():
        creator = tf.keras.utils.experimental.DatasetCreator(lambda _: dataset(name, steps))
        fit(tf.keras, make_model(tf.keras, name), epochs, turns, {"x": creator, "steps_per_epoch": steps})


def exchange(side: str, steps: int, epochs: int, turns: Turns) -> None:
    """Exchanges arrays between two processes."""
    rank = int(os.environ["RANK"])
    step = (_push_and_pull if side == "push and pull" else _horovod)(rank, side)
    for _ in range(epochs if rank == 0 or side != "push and pull" else 0):
        if rank == 0:
            turns.wait()
        step()  # waits for the other process
        started = time.perf_counter()
        for _ in range(steps):
            step()
        if rank == 0:
            turns.end(time.perf_counter() - started)


def _push_and_pull(rank: int, _: str) -> Callable[[], object]:
    """Returns the exchange of worker 0 with the variables of a server, rank 1, which does not update them."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.coordination.calls import Connection, Service
    from tfdist.coordination.job_token import listen
    from tfdist.parameter_server.pushed_gradients import as_tensor
    from tfdist.parameter_server.servers import Servers
    from tfdist.parameter_server.variable_server import VariableServer

    tf.config.threading.set_intra_op_parallelism_threads(1)
    port = int(os.environ["PORT"])
    if rank == 1:
        variables = VariableServer(lambda _, seconds: time.sleep(seconds) or [], lambda _, value: value)
        service = Service(variables.handlers, "token", listen(f"127.0.0.1:{port}", ""))
        os.read(0, 1)  # until the parent ends
        service.close()
        return lambda: None
    with contextlib.closing(socket.socket()) as client:
        while client.connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
    arrays = [np.ones(shape, np.float32) for shape in EXCHANGED]
    gradients = [tf.constant(array) for array in arrays]
    copies = [tf.Variable(array) for array in arrays]
    methods = ["none"] * len(arrays)
    servers = Servers([Connection(f"127.0.0.1:{port}", "token", "server 0")], 0, 1)
    servers.place([(f"w{number}", array.nbytes) for number, array in enumerate(arrays)], [])
    forms = {number: (f"w{number}", None, False) for number in range(len(arrays))}
    optimizer = keras.saving.serialize_keras_object(keras.optimizers.SGD())
    options = {"floatx": "float32", "epsilon": 1e-7, "clip_norm": 0.0, "clip_value": 0.0}
    servers.define(dict(enumerate(arrays)), [], forms, optimizer=optimizer, lazy=False, **options)

    def step() -> None:
        servers.push(0, [0], list(map(np.asarray, gradients)), (), (), methods=methods)
        _, values, *_ = servers.pull(0)
        for variable, value in zip(copies, values, strict=True):
            variable.assign(as_tensor(value))

    return step


def _horovod(_: int, side: str) -> Callable[[], object]:
    """Returns the exchange of the same arrays between two ranks of Horovod."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    tensors = [tf.ones(shape) for shape in EXCHANGED]
    variables = [tf.Variable(tensor) for tensor in tensors]

    @tf.function
    def exchanged(*tensors: Any) -> None:
        values = hvd.grouped_allreduce(list(tensors), op=hvd.Sum)
        if side == "reduce and broadcast":  # Horovod has no reduction to one rank
            values = [hvd.broadcast(value, 0, name=f"value{i}") for i, value in enumerate(values)]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    return lambda: exchanged(*tensors)


def main_of_side(options: argparse.Namespace) -> None:
    """Runs in each process of a job."""
    turns, arguments = Turns(options.turns), (options.steps, options.epochs)
    if options.part == "exchange":
        exchange(options.side, *arguments, turns)
    elif options.side == "coordinator":
        coordinator(options.part, *arguments, turns)
    elif options.side == "tf_keras":
        legacy(options.part, *arguments, turns)
    else:
        served(options.part, *arguments, turns, "async" if options.part == "workers" else options.side)


def _start(part: str, side: str, steps: int, epochs: int, directory: pathlib.Path) -> list[subprocess.Popen]:
    """Starts the processes of a job; the first one ends when the job does."""
    (directory / part / side).mkdir(parents=True)
    turns = directory / part / side
    script = [
        str(HERE),
        f"--side={side}",
        f"--parts={part}",
        f"--turns={turns}",
        f"--steps={steps}",
        f"--epochs={epochs}",
    ]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_FAIL_FAST": "use_caller", **os.environ}

    def start(command: Sequence[str], **variables: str) -> subprocess.Popen:
        with (turns / "log").open("a") as log:
            return subprocess.Popen(
                command, env=environment | variables, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )

    if side in ("coordinator", "tf_keras"):
        python = sys.executable if side == "coordinator" else str(PEERS)
        cluster = {"chief": _addresses(1), "worker": _addresses(2), "ps": _addresses(1)}
        tasks = [(kind, index) for kind, addresses in cluster.items() for index in range(len(addresses))]
        legacy = {"TF_USE_LEGACY_KERAS": "1"} if side == "tf_keras" else {}
        return [
            start(
                [python, *script], TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": k, "index": i}}), **legacy
            )
            for k, i in tasks
        ]
    if side == "push and pull":
        [port] = (address.rpartition(":")[2] for address in _addresses(1))
        return [start([sys.executable, *script], RANK=rank, PORT=port) for rank in ("0", "1")]
    launch = [sys.executable, "-m", "tfdist", "launch", f"--log_dir={turns}/logs"]
    if part == "exchange":
        code = "import os, runpy, sys; os.environ['RANK'] = os.environ['HOROVOD_RANK']; sys.argv = sys.argv[1:]; "
        program = [sys.executable, "-c", f"{code}runpy.run_path(sys.argv[0], run_name='__main__')", *script]
        return [start([*launch, "--launcher=horovod", "--processes=2", "--", *program])]
    workers = int(side[0]) if part == "workers" else 2
    return [start([*launch, f"--processes={workers}", "--servers=1", "--", sys.executable, *script])]


def _cpu_seconds(job: Sequence[subprocess.Popen]) -> float:
    """Returns the processor time of all processes of a job so far."""
    import psutil

    processes = [psutil.Process(process.pid) for process in job]
    processes += [child for process in processes for child in process.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


@contextlib.contextmanager
def _jobs(part: str, sides: Sequence[str], steps: int, epochs: int) -> Iterator[dict[str, Epoch]]:
    """Starts jobs, one after the other; yields functions that make an epoch."""
    processes: list[subprocess.Popen] = []
    directory = pathlib.Path(tempfile.mkdtemp())
    try:
        epoch: dict[str, Epoch] = {}
        for side in sides:
            job = _start(part, side, steps, epochs, directory)
            processes += job
            epoch[side] = functools.partial(_make_epoch, job, Turns(str(directory / part / side)))
            epoch[side]()  # imports and traces
        yield epoch
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _make_epoch(job: Sequence[subprocess.Popen], turns: Turns) -> tuple[float, float]:
    """Returns the seconds of an epoch, and of the processors in it."""
    started = _cpu_seconds(job)
    seconds = turns.run(job[0], 240.0)
    return seconds, _cpu_seconds(job) - started


def measure(part: str, sides: Sequence[str], steps: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Returns the seconds of each side's epochs and of the processors in them, one in each round."""
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    with _jobs(part, sides, steps, rounds + 2) as epoch:  # the last epoch never begins: no side ends early
        end = time.monotonic() + _PART_SECONDS
        for number in range(rounds):
            if number >= _MIN_ROUNDS and time.monotonic() > end:
                break
            for side in sides[:: 1 if number % 2 else -1]:  # so that no side always follows the same one
                seconds[side].append(epoch[side]())
    return seconds


def report(part: str, measured: dict[str, list[tuple[float, float]]], steps: int) -> None:
    """Prints the table of a part."""
    from paired import ratio_of_medians

    seconds = {side: [wall for wall, _ in pairs] for side, pairs in measured.items()}
    size, unit = {"exchange": (EXCHANGED_MB, "MB"), "workers": (BATCH[part], "examples")}.get(part, (1, "updates"))
    peers = [side for side in seconds if side in PEER_SIDES] or [next(iter(seconds))]
    print(
        _row([part, f"{unit} per second", "ms of processors per step", *(f"times as fast as {p} (95%)" for p in peers)])
    )
    print(_row(["---"] * (3 + len(peers))))
    for side, times in seconds.items():
        ratios = [str(ratio_of_medians(seconds[peer], times)) if peer != side else "1" for peer in peers]
        busy = 1e3 * statistics.median(cpu for _, cpu in measured[side]) / steps
        print(_row([side, f"{steps * size / statistics.median(times):.1f}", f"{busy:.1f}", *ratios]))
    print(flush=True)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(SIDES), help="which tables")
    parser.add_argument("--sides", default="", help="which sides, separated by semicolons; by default all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50, help="updates in an epoch")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument("--turns", default="", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        options.part = options.parts
        main_of_side(options)
        return
    for part in options.parts.split(","):
        sides = [side for side in SIDES[part] if not options.sides or side in options.sides.split(";")]
        if "tf_keras" in sides and not PEERS.exists():
            raise SystemExit("The side tf_keras needs tf_keras in .venv-peers. Run `make peers`.")
        report(part, measure(part, sides, options.steps, options.rounds), options.steps)


if __name__ == "__main__":
    main()
