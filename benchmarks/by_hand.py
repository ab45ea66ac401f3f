"""Sides without this library: Keras models in loops as their users write them.

    python benchmarks/by_hand.py SIDE [--compression=none|fp16|powersgd] [--rank=4] [--communication=gloo|mpi] ...

SIDE: `bare` (a `tf.function`, called in a loop), `floor` (every rank of a Horovod job computes at once, nobody speaks),
`horovod` (Horovod's operations, one all-reduce a gradient), `multiworker` (MultiWorkerMirroredStrategy).
"""

import argparse
import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import stopwatch
import tensorflow as tf
from power_sgd import PowerSGD
from workload import LEARNING_RATE, WORKLOADS, arrays

from tfdist import models

Reduce = Callable[[list[tf.Tensor]], list[tf.Tensor]]
Step = Callable[[], tf.Tensor]


def bare(arguments: argparse.Namespace) -> tuple[int, Step]:
    """One process with the whole machine."""
    return 0, tf.function(_step(arguments.workload, 0))


def floor(arguments: argparse.Namespace) -> tuple[int, Step]:
    """Every rank computes."""
    rank = _horovod(arguments.ranks).rank()
    return rank, tf.function(_step(arguments.workload, rank))


def horovod(arguments: argparse.Namespace) -> tuple[int, Step]:
    """Gradients are averaged by Horovod's operations, at its defaults."""
    hvd = _horovod(arguments.ranks)

    def reducer(variables: Sequence[tf.Variable]) -> Reduce:
        if arguments.compression == "powersgd":
            return PowerSGD(variables, arguments.rank, functools.partial(hvd.grouped_allreduce, op=hvd.Average))
        compression = getattr(hvd.Compression, arguments.compression)
        return lambda gradients: [
            hvd.allreduce(gradient, op=hvd.Average, compression=compression, name=f"gradient{i}")
            for i, gradient in enumerate(gradients)
        ]

    return hvd.rank(), tf.function(_step(arguments.workload, hvd.rank(), reducer))


def multiworker(arguments: argparse.Namespace) -> tuple[int, Step]:
    """`strategy.run` of forward, tape and `optimizer.apply`; Keras's optimizer sums the gradients."""
    _share_cores(arguments.ranks)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        step = _step(arguments.workload, rank)
    return rank, tf.function(lambda: strategy.reduce("MEAN", strategy.run(step), axis=None))


def _step(name: str, rank: int, reducer: Callable[[Sequence[tf.Variable]], Reduce] | None = None) -> Step:
    """One update of a workload's model, with the same batch every time."""
    workload = WORKLOADS[name]
    keras.utils.set_random_seed(0)
    model = models.build(workload.model, workload.shape, workload.classes)
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    x, y = (tf.constant(array) for array in arrays(name, workload.rows, 100 + rank))
    variables = [variable.value for variable in model.trainable_variables]
    reduce = reducer(variables) if reducer else list

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        # An embedding's gradient is smaller dense: a batch has more tokens than these vocabularies.
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
        optimizer.apply(reduce(gradients), model.trainable_variables)
        return loss

    return step


def _horovod(ranks: int) -> Any:
    """The module, up."""
    import horovod.tensorflow as hvd

    _share_cores(ranks)
    hvd.init()
    return hvd


def _share_cores(ranks: int) -> None:
    """All ranks share the machine, as tfdist's strategies do."""
    tf.config.threading.set_intra_op_parallelism_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


if __name__ == "__main__":
    sides = {side.__name__: side for side in (bare, floor, horovod, multiworker)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=sides)
    parser.add_argument("--compression", choices=("none", "fp16", "powersgd"), default="none")
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD")
    parser.add_argument("--ranks", type=int, default=2, help="processes of this job, which share the cores")
    parser.add_argument("--communication", choices=("gloo", "mpi"), default="gloo", help="of horovod; mpi needs mpirun")
    stopwatch.add_arguments(parser)
    given = parser.parse_args()
    own_rank, one_step = sides[given.side](given)
    measured = stopwatch.from_arguments(given).measure(one_step, float)
    if own_rank == 0:
        stopwatch.report(*measured)
