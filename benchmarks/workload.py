"""The workloads: a model, how much each rank feeds it in a step, and random examples. NumPy alone."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and what it is fed.

    Attributes:
      model: as in `--model`.
      rows: examples of one rank in one step.
      shape: of one example's x.
      classes: how many labels there are; of a language model, tokens in its vocabulary.
      tokens: whether x is token numbers with a label for each, instead of float32 with one label.
    """

    model: str
    rows: int
    shape: tuple[int, ...]
    classes: int
    tokens: bool = False


LEARNING_RATE = 0.001  # of plain SGD, on every side; small, as the labels are random
# The perceptron's layers, for a side that cannot build tfdist's model.
WIDTHS = (1024, 2048, 2048, 1024)

WORKLOADS = {
    "mlp": Workload("mlp(hidden=(2048, 2048), classes=1024)", 64, (1024,), 1024),
    "cnn": Workload("cnn(filters=(64, 128, 256, 512), classes=10)", 24, (32, 32, 3), 10),
    "small": Workload(
        "mlp(hidden=(64,), classes=10)", 32, (32,), 10
    ),  # a step is mostly what surrounds the computation
    "transformer": Workload("transformer(layers=2, width=256, classes=256)", 12, (64,), 256, tokens=True),
}


def arrays(name: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random examples of a workload: the batch of a side by hand, and the whole dataset of tfdist's side.

    Args:
      name: of the workload.
      count: how many examples.
      seed: the same one gives the same examples in every process.

    Returns:
      x, float32 or int64 [count, *shape], and labels, int64 [count], or [count, *shape] for a language model.
    """
    workload, random = WORKLOADS[name], np.random.default_rng(seed)
    size = (count, *workload.shape)
    if workload.tokens:
        return random.integers(0, workload.classes, size), random.integers(0, workload.classes, size)
    return random.standard_normal(size, dtype="float32"), random.integers(0, workload.classes, count)
