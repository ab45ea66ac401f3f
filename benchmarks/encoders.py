"""What encoders cost on one core, compared with a copy of the bytes, and what a whole reduction costs without communication.

    taskset -c 0 python benchmarks/encoders.py --methods="onebit; int8; bf16; powersgd(rank=4)"

One gradient [2048, 4096] of float32, 8.39 million elements, on one thread. A method that makes codes is timed as an encoder
alone; every method as the reduction of one replica: encoding, decoding what would arrive from one replica, and error
feedback where it has it. The sides take turns; each round measures all of them once, and medians are over rounds.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from tfdist.collectives import OneReplica
from tfdist.config.rules import parse_rules
from tfdist.gradients.compression.catalog import create
from tfdist.gradients.compression.reducers import CodecCompiler, CodecReducer
from tfdist.gradients.reducer import ErrorFeedback

SHAPE = (2048, 4096)
Work = Callable[[tf.Tensor], list[tf.Tensor]]


def copy(x: tf.Tensor) -> list[tf.Tensor]:
    """Reads and writes every byte once."""
    return [tf.raw_ops.DeepCopy(x=x)]


def encoder(method: str) -> Work | None:
    """Makes the code that travels; None for a method that makes none."""
    reducer = create(parse_rules(method)[0].methods)
    inner = reducer.inner if isinstance(reducer, ErrorFeedback) else reducer
    if not isinstance(inner, CodecReducer):
        return None
    coder = CodecCompiler(inner._codec)
    return lambda x: [coder.encode(x, tf.constant([1, 2], tf.int32), OneReplica().dtypes)]


def reduction(method: str) -> Work:
    """The whole reduction of one replica; its state stays where it is, as a step's does."""
    reducer = create(parse_rules(method)[0].methods)
    specs = [tf.TensorSpec(SHAPE, tf.float32, "x")]
    state = [
        tf.Variable(tf.broadcast_to(tf.cast(part.initial, part.dtype), part.shape)) for part in reducer.state(specs)
    ]

    def reduce(x: tf.Tensor) -> list[tf.Tensor]:
        reduced = reducer.reduce([x], [tf.convert_to_tensor(part) for part in state], OneReplica(), name="x")
        for variable, value in zip(state, reduced.state, strict=True):
            variable.assign(value)
        return reduced.totals

    return reduce


def seconds(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """Median seconds of each side over the rounds, of which the first, which compiles, does not count."""
    x = tf.random.stateless_normal(SHAPE, (1, 2))
    functions = {name: tf.function(work, autograph=False) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function(x)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", required=True, help="with ; between")
    parser.add_argument("--rounds", type=int, default=21)
    given = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    methods = [method.strip() for method in given.methods.split(";") if method.strip()]
    works: dict[str, Work] = {"copy": copy}
    for method in methods:
        encode = encoder(method)
        works |= {f"encode {method}": encode} if encode else {}
        works[f"reduce {method}"] = reduction(method)
    found = seconds(works, given.rounds)
    print(f"A copy takes {1e3 * found['copy']:.1f} ms.\n")
    print("| method | encode, ms | copies | encode, decode and error feedback, ms | copies |")
    print("| --- | --- | --- | --- | --- |")
    for method in methods:
        cells = []
        for kind in ("encode", "reduce"):
            took = found.get(f"{kind} {method}")
            cells += [f"{1e3 * took:.1f}", f"{took / found['copy']:.1f}"] if took else ["-", "-"]
        print(f"| `{method}` | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
