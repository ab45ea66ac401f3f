"""The transformer of the benchmark of pipelines: equal blocks, so that all stages take equally long. NumPy alone."""

import numpy as np

BLOCKS = 12
WIDTH = 256
HEADS = 4
TOKENS = 128
ROWS = 12  # of a micro-batch
LEARNING_RATE = 0.001  # of plain SGD


def arrays(micro_batches: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns random inputs and targets of a step, float32 [rows, tokens, width]."""
    random = np.random.default_rng(seed)
    size = (micro_batches * ROWS, TOKENS, WIDTH)
    return random.standard_normal(size, dtype="float32"), random.standard_normal(size, dtype="float32")
