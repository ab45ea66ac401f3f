"""What `sync_learning.py` trains: tasks, and the methods of `--sync` that each of them compares."""

import dataclasses
import re
from collections.abc import Callable

import keras
from learning import data

import tfdist
from tfdist.optimizers import make_learning_rate

OUTER = 'outer="sgd(momentum=0.9, nesterov=True, learning_rate=0.7)"'
PERIODS = (1, 4, 16, 50, 100)
CLIENTS = 100


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of a table.

    Attributes:
      sync: as in `--sync`.
      compression: as in `--compression`.
    """

    sync: str
    compression: str = "none"

    def __str__(self) -> str:
        """The flags."""
        shown = f"--sync={self.sync.replace(f', {OUTER}', '')}"
        shown += f" --compression={self.compression}" if self.compression != "none" else ""
        return shown

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
    load: Callable[[], tuple[str, tfdist.data.DatasetSplits]]
    batch_size: int
    steps: int
    optimizer: Callable[[int], keras.Optimizer]
    metric: str
    margin: float
    methods: tuple[Method, ...]


def text() -> tuple[str, tfdist.data.DatasetSplits]:
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
            Method("easgd(period=16)"),
        ),
    ),
    "images_adamw": Task(
        "cnn(filters=(16, 32))",
        data,
        128,
        2400,
        adamw,
        "accuracy",
        0.5,
        (
            EVERY_STEP,
            Method("local_sgd(period=16)"),
            *(Method(f"diloco(period={period}, {OUTER})") for period in PERIODS[2:]),
            Method(f"diloco(period=50, {OUTER}, fragments=4, overlap=True)", "int8"),
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
            *(Method(f"post_local_sgd(warmup_steps=600, period={period})") for period in PERIODS[1:3]),
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
            Method(f"fedavg(clients={CLIENTS}, fraction=0.1, local_epochs=1, shards_per_client=2)"),
        ),
    ),
}
