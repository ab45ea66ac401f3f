"""What `sync_learning.py` trains: tasks, and the methods of `--sync` that each of them compares."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from learning import data

import tfdist
from tfdist.optimizers import make_learning_rate

OUTER = 'outer="sgd(momentum=0.9, nesterov=True, learning_rate=0.7)"'
PERIODS = (1, 4, 16, 50, 100)
CLIENTS = 100
SHARDS = 2  # of one class each, per client, on the pathological split


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of a table.

    Attributes:
      sync: as in `--sync`.
      compression: as in `--compression`.
      pathological: whether consecutive examples, of which clients are made, have the same label.
    """

    sync: str
    compression: str = "none"
    pathological: bool = False

    def __str__(self) -> str:
        """The flags."""
        shown = f"--sync={self.sync.replace(f', {OUTER}', '')}"
        shown += f" --compression={self.compression}" if self.compression != "none" else ""
        return shown + (" (pathological)" if self.pathological else "")

    @property
    def overlaps(self) -> bool:
        """Whether exchanges are hidden behind the next steps."""
        return "overlap=True" in self.sync

    @property
    def family(self) -> str:
        """Name of the method without its parameters."""
        return self.sync.partition("(")[0]

    @property
    def period(self) -> int | None:
        """Steps between exchanges, if the method has one such number."""
        found = re.search(r"\bperiod=(\d+)", self.sync)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
      model: as in `--model`.
      load: loads the data.
      batch_size: global batch size.
      steps: number of updates.
      optimizer: creates the optimizer for a number of steps.
      metric: what is compared: `accuracy`, in points of a hundred, or `loss`, in nats.
      margin: largest difference from every step that counts as none, beside two standard errors.
      methods: what is compared; first every step.
    """

    model: str
    load: Callable[[], tuple[str, tfdist.data.DataSet]]
    batch_size: int
    steps: int
    optimizer: Callable[[int], keras.Optimizer]
    metric: str
    margin: float
    methods: tuple[Method, ...]


class Reordered(tfdist.data.Source):
    """The examples of a source in another order."""

    def __init__(self, source: Any, order: np.ndarray):
        """Keeps the order, which has the number of each example in `source`."""
        self.size = len(order)
        self._source, self._order = source, tf.constant(order, tf.int64)

    def fetch(self, indices: tf.Tensor) -> Any:
        """See base class."""
        return self._source.fetch(tf.gather(self._order, indices))


def pathological(source: Any, clients: int, seed: int) -> Reordered:
    """Orders examples so that each of `clients` equal consecutive parts has `SHARDS` shards of examples sorted by label.

    With two shards, most clients have two classes (McMahan et al., arXiv:1602.05629, section 3). Examples that are left are
    not used.
    """
    _, labels = source.fetch(tf.range(source.size, dtype=tf.int64))
    by_label = np.argsort(np.asarray(labels), kind="stable")
    size = len(by_label) // (clients * SHARDS)
    shards = by_label[: size * clients * SHARDS].reshape(clients * SHARDS, size)
    return Reordered(source, np.random.default_rng(seed).permutation(shards).reshape(-1))


def text() -> tuple[str, tfdist.data.DataSet]:
    """Bytes of Python's standard library."""
    return "text", tfdist.data.load("text(length=128, max_bytes=2_000_000)")


def momentum(steps: int) -> keras.Optimizer:
    """SGD with momentum; the rate falls to 0."""
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.02, steps), momentum=0.9)


def plain(steps: int) -> keras.Optimizer:
    """SGD as clients use it: their number of updates is not known in advance, so the rate is constant."""
    return keras.optimizers.SGD(0.05)


def adamw(steps: int) -> keras.Optimizer:
    """AdamW with a warmup; the rate falls to 0."""
    rate = make_learning_rate(0.003, warmup_steps=steps // 12, decay="cosine", total_steps=steps)
    return keras.optimizers.AdamW(rate, weight_decay=0.01)


EVERY_STEP = Method("every_step")
TASKS = {
    "images": Task(
        "cnn(filters=(16, 32))",
        data,
        128,
        2400,
        momentum,
        "accuracy",
        0.5,
        (
            EVERY_STEP,
            Method("every_step", "powersgd(rank=4)"),
            *(Method(f"local_sgd(period={period})") for period in PERIODS),
            *(Method(f"diloco(period={period}, {OUTER})") for period in PERIODS),
            Method("local_sgd(period=16)", "int8"),
            Method(f"diloco(period=50, {OUTER}, fragments=4, overlap=True)", "int8"),
            Method("post_local_sgd(warmup_steps=1200, period=16)"),
            Method("hierarchical_local_sgd(periods=(4, 16))"),
            Method("slowmo(period=16)"),
            Method("easgd(period=16)"),
            Method("adaptive(rule=adacomm)"),
            Method("adaptive(rule=qsr)"),
            Method("adaptive(rule=divergence)"),
        ),
    ),
    "text": Task(
        "transformer(layers=2, width=128, heads=4)",
        text,
        32,
        1200,
        adamw,
        "loss",
        0.02,
        (
            EVERY_STEP,
            *(Method(f"local_sgd(period={period})") for period in PERIODS[1:]),
            *(Method(f"diloco(period={period}, {OUTER})") for period in PERIODS[1:]),
        ),
    ),
    "clients": Task(
        "cnn(filters=(16, 32))",
        data,
        40,
        4500,
        plain,
        "accuracy",
        0.5,
        (
            EVERY_STEP,
            Method(f"fedavg(clients={CLIENTS}, fraction=0.1, local_epochs=1)"),
            Method(f"fedavg(clients={CLIENTS}, fraction=0.1, local_epochs=1)", pathological=True),
        ),
    ),
}
