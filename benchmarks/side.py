"""One side of a comparison: trains the workload in its own way and prints its median step time.

    python benchmarks/side.py SIDE STEPS

Sides: `tfdist` (the strategy that the environment selects), `bare` (a Keras model in a `tf.function`, called in a loop),
`horovod_by_hand` (Horovod's operations), `multiworker_by_hand` (MultiWorkerMirroredStrategy), `floor` (every rank of a
Horovod job computes at once and nobody communicates).
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
import workload

CALL = 10


def bare(steps: int) -> list[float]:
    """One device, no library."""
    return _loop(steps, _step(lambda gradients: gradients))


def floor(steps: int) -> list[float]:
    """Every rank computes, nobody speaks."""
    _horovod()
    return bare(steps)


def horovod_by_hand(steps: int) -> list[float]:
    """An all-reduce for each gradient, as Horovod's tape makes them."""
    hvd = _horovod()
    return _loop(
        steps,
        _step(lambda gradients: [hvd.allreduce(g, op=hvd.Average, name=f"g{i}") for i, g in enumerate(gradients)]),
    )


def multiworker_by_hand(steps: int) -> list[float]:
    """`strategy.run` of forward, tape and `optimizer.apply`; Keras's optimizer sums the gradients."""
    _threads()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        step = _step(lambda gradients: gradients, in_function=False)

    @tf.function
    def whole() -> tf.Tensor:
        return strategy.reduce("MEAN", strategy.run(step), axis=None)

    return _loop(steps, whole)


def tfdist(steps: int) -> list[float]:
    """This library, its data pipeline included."""
    import tfdist

    strategy = tfdist.load_strategy()
    with strategy.scope():
        trainer = tfdist.Trainer(
            workload.model(),
            optimizer=keras.optimizers.SGD(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    ends = [time.perf_counter()]
    stamp = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    trainer.fit(
        workload.examples(), batch_size=workload.BATCH * strategy.replicas, steps=steps + CALL, steps_per_call=CALL,
        log_every=10**6, callbacks=[stamp],
    )  # fmt: skip
    strategy.group.barrier("end")
    strategy.group.leave()
    strategy.close()
    # An epoch's end cuts a call short; only whole calls are counted. The first call is the tracing.
    return [(b - a) / CALL for a, b in zip(ends[1:], ends[2:], strict=False)]


def _step(reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]], in_function: bool = True) -> Callable[[], tf.Tensor]:
    model = workload.model()
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    x, y = (tf.constant(array) for array in workload.examples(workload.BATCH))
    variables = [variable.value for variable in model.trainable_variables]

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_mean(losses)
        optimizer.apply(reduce(tape.gradient(loss, variables)), model.trainable_variables)
        return loss

    return tf.function(step) if in_function else step


def _loop(steps: int, step: Callable[[], tf.Tensor]) -> list[float]:
    for _ in range(3):
        step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step().numpy()
        times.append(time.perf_counter() - began)
    return times


def _horovod():  # noqa: ANN202 - a module
    import horovod.tensorflow as hvd

    _threads()
    hvd.init()
    return hvd


def _threads() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)


if __name__ == "__main__":
    name, count = sys.argv[1], int(sys.argv[2])
    times = {f.__name__: f for f in (bare, floor, horovod_by_hand, multiworker_by_hand, tfdist)}[name](count)
    print(f"\nRESULT {statistics.median(times) * 1e3:.3f}", flush=True)
