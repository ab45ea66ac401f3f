"""What staleness costs in accuracy: delayed gradients of many workers, by bound, optimizer and rule for late gradients.

    python benchmarks/staleness_learning.py --task=images --output=images.jsonl
    python benchmarks/staleness_learning.py --task=clicks --output=clicks.jsonl
    python benchmarks/staleness_learning.py --report images.jsonl clicks.jsonl

One process computes what parameter servers with `--workers` workers compute, because `tfdist verify` shows that both are equal:
update k applies a gradient that was computed from the weights of an earlier version. The versions follow from the rule of
`--staleness` itself (`tfdist.parameter_server.update_order`) and from drawn times of computation: lognormal, with a standard
deviation of half of their mean, so that servers and network take no time. Every method makes the same number of updates, with
the same batches; the time is that of the drawn computations, in multiples of one.
"""

import argparse
import collections
import heapq
import json
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.parameter_server.update_order import Asynchronous

BATCH_SIZE = 128
BOUNDS = (0, 1, 2, 4, 8, 16, None)
LATE = ("apply", "scale(0.1)", "scale(1)", "reject(after=8)", "reject(after=16)")
DEVIATION = 0.5  # of the time of a computation, over its mean
KEYS, FIELDS, BUCKETS = 10_000_000, 8, 1 << 16
CLICKS, TEST_CLICKS = 400_000, 50_000


class Read(NamedTuple):
    """The gradient of one update.

    Attributes:
      version: version of the weights from which it is computed.
      ticket: number of its batch.
      factor: by which it is multiplied.
      time: when it is applied, in mean times of a computation.
    """

    version: int
    ticket: int
    factor: float
    time: float


def schedule(bound: int | None, late: str, workers: int, updates: int, seed: int) -> Iterator[Read]:
    """Yields updates in order, as workers with random times of computation make them."""
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(math.log(1 + DEVIATION**2))
    order, events = Asynchronous(bound), []
    waiting, tickets, time = collections.deque(range(workers)), iter(range(10**9)), 0.0
    abandoned: list[int] = []
    in_flight: dict[int, tuple[int, int]] = {}  # ticket and version, by worker
    kind, _, argument = late.partition("(")
    value = float(argument.rstrip(")").rpartition("=")[2] or 0)
    count = 0
    while count < updates:
        for worker in [*waiting]:
            if order.may_read(worker, 0):
                waiting.remove(worker)
                ticket = abandoned.pop() if abandoned else next(tickets)
                in_flight[worker] = ticket, order.read(worker, ticket)
                heapq.heappush(events, (time + rng.lognormal(-(sigma**2) / 2, sigma), worker))
        time, worker = heapq.heappop(events)
        ticket, version = in_flight[worker]
        if kind == "reject" and order.version - version > value:
            abandoned.append(ticket)
            order.withdraw(worker)
            waiting.append(worker)
            continue
        order.push(worker, ticket)
        while update := order.next_update():
            waiting.append(update.workers[0])
            count += 1
            factor = 1 / (1 + value * update.staleness) if kind == "scale" else 1.0
            yield Read(update.version - update.staleness, update.ticket, factor, time)


class Clicks(NamedTuple):
    """Click-through data with a known distribution.

    Attributes:
      keys: [examples, fields] keys, which follow Zipf's law, with 10 million of them in a field.
      labels: [examples] of 0 and 1.
      entropy: mean log loss of the true probabilities, which no model can improve on.
    """

    keys: np.ndarray
    labels: np.ndarray
    entropy: float


def draw_clicks(seed: int) -> Clicks:
    """Draws examples whose log odds are the sum of a hidden number for each key."""
    rng = np.random.default_rng(seed)
    examples = CLICKS + TEST_CLICKS
    uniform = rng.random([examples, FIELDS])
    ranks = np.floor(KEYS**uniform).astype(np.int64)  # density proportional to 1 / rank
    keys = ranks * FIELDS + np.arange(FIELDS)
    hidden = (keys * 2654435761 % (1 << 32) / 2**32 - 0.5) * 2
    probabilities = 1 / (1 + np.exp(-hidden.sum(-1) - 0.3))
    labels = (rng.random(examples) < probabilities).astype(np.float32)
    entropy = -np.mean(probabilities * np.log(probabilities) + (1 - probabilities) * np.log(1 - probabilities))
    return Clicks(keys, labels, float(entropy))


class Task(NamedTuple):
    """Something to learn.

    Attributes:
      model: creates the model.
      x: [examples, ...] inputs for training.
      y: [examples] labels.
      test_x: inputs for testing.
      test_y: labels for testing.
      loss: the loss.
      rates: learning rates of SGD, SGD with momentum, and Adam.
      metric: what is measured: "accuracy" or "log loss".
    """

    model: Any
    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    loss: keras.losses.Loss
    rates: tuple[float, float, float]
    metric: str


def images() -> Task:
    """Fashion-MNIST and a network with one hidden layer."""
    data = tfdist.data.load("fashion_mnist")
    (x, y), (test_x, test_y) = (
        [np.array(part) for part in examples.fetch(tf.range(examples.size, dtype=tf.int64))]
        for examples in (data.train, data.test)
    )

    def model() -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [keras.Input(x.shape[1:]), layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)]
        )

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Task(model, x, y, test_x, test_y, loss, (0.1, 0.01, 1e-3), "accuracy")


def clicks() -> Task:
    """Wide and deep: a number for each key, and a network over an embedding."""
    data = draw_clicks(0)
    buckets = (data.keys * 40503 % (1 << 31) % BUCKETS).astype(np.int32)

    def model() -> keras.Model:
        layers = keras.layers
        keys = keras.Input([FIELDS], dtype="int32")
        wide = layers.Flatten()(layers.Embedding(BUCKETS, 1, embeddings_initializer="zeros")(keys))
        deep = layers.Flatten()(layers.Embedding(BUCKETS, 8)(keys))
        deep = layers.Dense(1)(layers.Dense(32, activation="relu")(deep))
        return keras.Model(keys, layers.Dense(1, kernel_initializer="ones")(wide) + deep)

    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    parts = buckets[:CLICKS], data.labels[:CLICKS], buckets[CLICKS:], data.labels[CLICKS:]
    return Task(model, *parts, loss, (0.3, 0.05, 2e-3), "log loss")


TASKS = {"images": images, "clicks": clicks}
OPTIMIZERS = ("sgd", "momentum", "adam")


def make_optimizer(name: str, rates: tuple[float, float, float]) -> keras.Optimizer:
    """Returns an optimizer by its name in the table."""
    rate = rates[OPTIMIZERS.index(name)]
    if name == "adam":
        return keras.optimizers.Adam(rate)
    return keras.optimizers.SGD(rate, momentum=0.9 if name == "momentum" else 0.0)


def learn(task: Task, optimizer_name: str, reads: list[Read], seed: int) -> list[float]:
    """Trains with delayed gradients; returns the metric after each fifth of the updates."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    model, optimizer = task.model(), make_optimizer(optimizer_name, task.rates)
    variables = model.trainable_variables
    optimizer.build(variables)
    weights = [variable.value for variable in variables]
    size = 1 + max(number - read.version for number, read in enumerate(reads))
    history = [tf.Variable(tf.repeat(weight[tf.newaxis], size, 0), trainable=False) for weight in weights]

    @tf.function(jit_compile=False)
    def update(x: tf.Tensor, y: tf.Tensor, version: tf.Tensor, number: tf.Tensor, factor: tf.Tensor) -> None:
        """Makes update `number` with a gradient of the weights of `version`."""
        for weight, values in zip(weights, history, strict=True):
            weight.assign(values[version % size])
        with tf.GradientTape() as tape:
            loss = task.loss(y, model(x, training=True))
        gradients = [factor * tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, weights)]
        for weight, values in zip(weights, history, strict=True):
            weight.assign(values[number % size])
        optimizer.apply(gradients, variables)
        for weight, values in zip(weights, history, strict=True):
            values.scatter_update(tf.IndexedSlices(weight[tf.newaxis], [(number + 1) % size]))

    batches_per_epoch = len(task.x) // BATCH_SIZE
    orders: dict[int, np.ndarray] = {}
    results = []
    for number, read in enumerate(reads):
        epoch, batch = divmod(read.ticket, batches_per_epoch)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(len(task.x))
        rows = orders[epoch][batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE]
        arguments = (tf.constant(value) for value in (read.version, number))
        update(tf.constant(task.x[rows]), tf.constant(task.y[rows]), *arguments, tf.constant(read.factor))
        if (number + 1) % (len(reads) // 5) == 0:
            results.append(measure(task, model))
    return results


def measure(task: Task, model: keras.Model) -> float:
    """Returns the metric on the test examples."""
    outputs = np.concatenate([np.array(model(part)) for part in np.array_split(task.test_x, 10)])
    if task.metric == "accuracy":
        return 100 * float(np.mean(outputs.argmax(-1) == task.test_y))
    return float(task.loss(task.test_y, outputs[:, 0]))


def run(options: argparse.Namespace) -> None:
    """Appends results to the file; those that it has are not repeated."""
    path = pathlib.Path(options.output)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    completed = {tuple(json.loads(line)[key] for key in ("bound", "late", "optimizer", "seed")) for line in lines}
    task = TASKS[options.task]()
    rules = [(bound, LATE[0]) for bound in BOUNDS] + [(None, late) for late in LATE[1:]]
    for seed in range(options.seeds):
        for optimizer in OPTIMIZERS:
            for bound, late in rules:
                if (bound, late, optimizer, seed) in completed:
                    continue
                reads = list(schedule(bound, late, options.workers, options.updates, seed))[: options.updates]
                staleness = [number - read.version for number, read in enumerate(reads)]
                entry = {
                    "task": options.task,
                    "workers": options.workers,
                    "bound": bound,
                    "late": late,
                    "optimizer": optimizer,
                    "seed": seed,
                    "staleness": float(np.mean(staleness)),
                    "max_staleness": max(staleness),
                    "time": reads[-1].time,
                    "results": learn(task, optimizer, reads, seed),
                    "metric": task.metric,
                }
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
                print(json.dumps(entry), flush=True)


def report(paths: list[str]) -> None:
    """Prints a table for each file."""
    for path in paths:
        entries = [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]
        groups: dict[tuple[Any, str], dict[str, list[Any]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        for entry in entries:
            groups[entry["bound"], entry["late"]][entry["optimizer"]].append(entry)
        print(f"\n{entries[0]['task']}, {entries[0]['metric']}, {entries[0]['workers']} workers\n")
        print(f"| `--staleness` | mean staleness | largest | speed | {' | '.join(OPTIMIZERS)} |")
        print("| --- | --- | --- | --- | " + " | ".join("---" for _ in OPTIMIZERS) + " |")
        serial_time = groups[0, "apply"]["sgd"][0]["time"]
        for (bound, late), by_optimizer in groups.items():
            first = by_optimizer["sgd"][0]
            name = "async" if bound is None else f"bounded({bound})"
            name += "" if late == "apply" else f", {late}"
            cells = [
                _cell([entry["results"][-1] for entry in by_optimizer[key]], first["metric"]) for key in OPTIMIZERS
            ]
            speed = serial_time / first["time"]
            print(
                f"| {name} | {first['staleness']:.1f} | {first['max_staleness']} | {speed:.1f} | {' | '.join(cells)} |"
            )


def _cell(values: list[float], metric: str) -> str:
    digits = 2 if metric == "accuracy" else 4
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def main() -> None:
    """Trains, or prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="images")
    parser.add_argument("--output", default="staleness_learning.jsonl", help="file of JSON lines")
    parser.add_argument("--workers", type=int, default=17)
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", nargs="+", help="files of which to print tables")
    options = parser.parse_args()
    report(options.report) if options.report else run(options)


if __name__ == "__main__":
    main()
