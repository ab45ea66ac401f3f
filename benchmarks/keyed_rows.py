"""A row per key beside fewer rows than keys: log loss on the clicks of `staleness_learning.py`.

    python benchmarks/keyed_rows.py --seeds=2

One device trains a wide and deep model for one pass over the clicks with Adagrad, for which lazy and exact updates are the
same. The tables have a row for each key, for each key from its second step on, or, with keys hashed to a tenth of their number,
one for several keys.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from staleness_learning import CLICKS, FIELDS, draw_clicks

import tfdist

BATCH_SIZE, RATE, WIDTH = 256, 0.3, 8


def model(embedding: Callable[[int, Any], keras.Layer]) -> keras.Model:
    """Returns wide and deep; `embedding` makes a table of a width with an initializer."""
    keys, layers = keras.Input([FIELDS], dtype="int64"), keras.layers
    wide, deep = (layers.Flatten()(table(keys)) for table in (embedding(1, "zeros"), embedding(WIDTH, "uniform")))
    return keras.Model(keys, layers.Dense(1)(wide) + layers.Dense(1)(layers.Dense(32, activation="relu")(deep)))


def main() -> None:
    """Trains with each kind of table and prints the table of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    seeds = parser.parse_args().seeds
    data = draw_clicks(0)
    keys, count = data.keys, len(np.unique(data.keys[:CLICKS]))
    hashed = (keys * 40503 % (1 << 31)) % (count // 10)
    dynamic = tfdist.layers.DynamicEmbedding
    methods: dict[str, tuple[np.ndarray, Callable[[int, Any], keras.Layer]]] = {
        "hashed to a tenth": (hashed, lambda width, initial: keras.layers.Embedding(count // 10, width, initial)),
        "a row for each key": (keys, dynamic),
        "admit_after=2": (keys, lambda width, initial: dynamic(width, initial, admit_after=2)),
    }
    print(f"{count:,} keys; log loss of the true probabilities {data.entropy:.4f}")
    strategy = tfdist.load_strategy("single", environment={})
    for name, (x, embedding) in methods.items():
        losses = []
        for seed in range(seeds):
            keras.utils.clear_session(free_memory=False)
            keras.utils.set_random_seed(seed)
            with strategy.scope():
                loss = keras.losses.BinaryCrossentropy(from_logits=True)
                trainer = tfdist.Trainer(
                    model(embedding), optimizer=keras.optimizers.Adagrad(RATE), loss=loss, metrics=[], seed=seed
                )
            trainer.fit(x[:CLICKS], data.labels[:CLICKS], batch_size=BATCH_SIZE, epochs=1, verbose=0)
            losses.append(trainer.evaluate((x[CLICKS:], data.labels[CLICKS:]), batch_size=1024)["loss"])
        tables = [x for x in trainer.model.layers if isinstance(x, dynamic)]
        rows = len(tables[0].table.export()["keys"]) if tables else count // 10
        spread = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
        print(f"| {name} | {rows:,} | {statistics.mean(losses):.4f} \u00b1 {spread:.4f} |", flush=True)


if __name__ == "__main__":
    main()
