"""What a step costs that needs all rows of a batch, and is partitioned by rows: against a step of a mean, in Keras's fit.

    python -m benchmarks.partitioned --rounds=15

Two mirrored replicas on CPUs. For each model, two losses: a mean over rows, and one that needs all rows. Both are
trained in turns, a round of steps each; the table shows the medians of their steps, their ratio with a 95% interval, and the
seconds of the first step, which traces and compiles. What replicas communicate is in the log.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.paired import ratio_of_medians

RANDOM = np.random.default_rng(0)
STEPS = 8  # of a round
WORDS, LENGTH = 32_000, 32


class Case(NamedTuple):
    """A model, its data, and two losses."""

    model: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    batch_size: int
    mean: Callable[..., tf.Tensor]
    of_all_rows: Callable[..., tf.Tensor]


def encoder() -> keras.Model:
    inputs = keras.Input((1024,))
    hidden = keras.layers.Dense(2048, "relu")(keras.layers.Dense(2048, "relu")(inputs))
    return keras.Model(inputs, keras.layers.Dense(512)(hidden))


def language_model() -> keras.Model:
    words = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.GRU(128, return_sequences=True)(keras.layers.Embedding(WORDS, 128)(words))
    return keras.Model(words, keras.layers.Dense(WORDS)(hidden))


def squares(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(y - outputs))


def masked_squares(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    known = tf.cast(y > 0, outputs.dtype)
    return tf.reduce_sum(known * tf.square(y - outputs)) / tf.reduce_sum(known)


def contrastive(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Cross-entropy of the similarities of all outputs with all labels (Oord et al., 2018)."""
    similarities = tf.matmul(tf.math.l2_normalize(outputs, 1), tf.math.l2_normalize(y, 1), transpose_b=True)
    pairs = tf.range(tf.shape(similarities)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=pairs, logits=10.0 * similarities))


def cross_entropy(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.cast(y, tf.int32), logits=outputs))


def masked_cross_entropy(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """As in TensorFlow's tutorials of translation: the mean over the words that are no padding, word 0."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.cast(y, tf.int32), logits=outputs)
    mask = tf.cast(tf.not_equal(y, 0), losses.dtype)
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype("float32")


def sentences(rows: int) -> np.ndarray:
    return RANDOM.integers(0, WORDS, (rows, LENGTH)).astype("int32") * (RANDOM.random((rows, LENGTH)) < 0.7)


CASES = {
    "ratio": Case(encoder, numbers(2048, 1024), numbers(2048, 512), 256, squares, masked_squares),
    "contrastive": Case(encoder, numbers(2048, 1024), numbers(2048, 512), 256, squares, contrastive),
    "language model": Case(language_model, sentences(64), sentences(64), 8, cross_entropy, masked_cross_entropy),
}


def prepared(strategy: tfdist.Strategy, case: Case, loss: Callable[..., tf.Tensor]) -> tuple[keras.Model, float]:
    """Returns a model that has been trained for a round, and the seconds of its first step."""
    with strategy.scope():
        model = case.model()
        model.compile(keras.optimizers.SGD(0.01), loss)
    model = tfdist.distribute(model)
    begin = time.perf_counter()
    model.fit(case.x[: case.batch_size], case.y[: case.batch_size], batch_size=case.batch_size, verbose=0)
    first = time.perf_counter() - begin
    seconds(case, model)
    return model, first


def seconds(case: Case, model: keras.Model) -> float:
    """Returns the seconds of a step, from a round of steps."""
    rows = STEPS * case.batch_size
    begin = time.perf_counter()
    model.fit(case.x[:rows], case.y[:rows], batch_size=case.batch_size, shuffle=False, verbose=0)
    return (time.perf_counter() - begin) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tfdist").setLevel(logging.INFO)
    strategy = tfdist.load_strategy("mirrored", devices=2)
    print("| loss | mean, ms | of all rows, ms | ratio | first step: mean, s | of all rows, s |\n" + "| --- " * 6 + "|")
    for name in arguments.cases:
        case = CASES[name]
        (mean, first_of_mean), (of_all_rows, first_of_all_rows) = [prepared(strategy, case, loss) for loss in case[-2:]]
        times: list[list[float]] = [[], []]
        for number in range(arguments.rounds):
            order = ((0, mean), (1, of_all_rows)) if number % 2 else ((1, of_all_rows), (0, mean))
            for side, model in order:
                times[side].append(seconds(case, model))
        means, wholes = times
        a, b = 1000 * statistics.median(means), 1000 * statistics.median(wholes)
        ratio = ratio_of_medians(wholes, means)
        print(f"| {name} | {a:.4g} | {b:.4g} | {ratio} | {first_of_mean:.3g} | {first_of_all_rows:.3g} |", flush=True)


if __name__ == "__main__":
    main()
