"""Defects and traps of TensorFlow and Keras on which the design depends: a version that fixes one fails here."""

import subprocess
import sys
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.processes

TWO_SIZES = """
import sys
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)
operations = tf.distribute.ReductionToOneDevice() if sys.argv[1] == "one_device" else None
for devices in (2, 4, 2):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)], operations)
    total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones(3)))
    assert strategy.experimental_local_results(total)[0].numpy().tolist() == [devices] * 3
print("equal")
"""


@pytest.fixture(scope="module")
def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def rank() -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)


def all_reduce(x: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce("sum", x)


def everywhere(strategy: tf.distribute.Strategy, function: Callable[[], tf.Tensor]) -> list[np.ndarray]:
    """Returns each replica's result of a replica function, which runs inside a compiled function."""
    compiled = tf.function(lambda: strategy.run(function), autograph=False)
    return [value.numpy() for value in strategy.experimental_local_results(compiled())]


def test_dropout_has_one_mask_for_all_replicas(mirrored: tf.distribute.Strategy) -> None:
    """Guards: Keras's Dropout drops the same elements on each replica.

    What depends on it: `tfdist.step.randomness`, which gives each replica its own seeds.
    """
    with mirrored.scope():
        layer = keras.layers.Dropout(0.5, seed=1)
    first, second = everywhere(mirrored, lambda: layer(tf.ones((1, 64)), training=True))
    assert 0 < np.count_nonzero(first) < 64
    np.testing.assert_array_equal(first, second)


def test_batch_norm_s_statistics_differ_between_replicas(mirrored: tf.distribute.Strategy) -> None:
    """Guards: moving statistics of Keras's BatchNormalization differ between replicas, and reading them gives replica 0's.

    What depends on it: `averaged_statistics`, before evaluation and saving.
    """
    with mirrored.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        layer.build((None, 1))
    everywhere(mirrored, lambda: layer(tf.fill((4, 1), 1.0 + rank()), training=True))
    each = mirrored.experimental_local_results(layer.moving_mean.value)
    assert [float(value.numpy()[0]) for value in each] == [1.0, 2.0]
    assert float(layer.moving_mean.numpy()[0]) == 1.0


def test_the_default_variable_drifts(mirrored: tf.distribute.Strategy) -> None:
    """Guards: a `tf.Variable` of a mirrored scope that is assigned in `run` silently has a different value on each replica.

    What depends on it: `strategy.State.per_replica`, which requests ON_READ and NONE.
    """
    with mirrored.scope():
        variable = tf.Variable(0.0)
    everywhere(mirrored, lambda: variable.assign(rank()))
    assert [float(value.numpy()) for value in mirrored.experimental_local_results(variable)] == [0.0, 1.0]


def collective_in_cond(apply: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.cond(tf.constant(2.0) > tf.random.uniform([]), apply, lambda: tf.zeros([]))


def collective_in_while_loop(apply: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x + apply()), (0, tf.zeros([])))[1]


@pytest.mark.parametrize("around", [collective_in_cond, collective_in_while_loop])
@pytest.mark.parametrize("what", ["all_reduce", "optimizer"])
def test_no_collective_in_control_flow_inside_run(
    around: Callable[[Callable[[], tf.Tensor]], tf.Tensor], what: str, mirrored: tf.distribute.Strategy
) -> None:
    """Guards: a collective or `optimizer.apply` within a condition or a loop within `run` fails; around `run` it works.

    What depends on it: a step is two replica functions, and the loop of `tfdist.step.compiled_loop` is outside of `run`.
    """
    with mirrored.scope():
        variable = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def apply() -> tf.Tensor:
        if what == "all_reduce":
            return all_reduce(tf.ones([]))
        optimizer.apply([tf.ones([])], [variable])
        return tf.zeros([])

    def outside() -> tf.Tensor:
        return mirrored.experimental_local_results(mirrored.run(apply))[0]

    with pytest.raises(RuntimeError):
        everywhere(mirrored, lambda: around(apply))
    tf.function(lambda: around(outside), autograph=False)()


@pytest.mark.parametrize(("operations", "works"), [("default", False), ("one_device", True)])
def test_a_second_mirrored_strategy_of_another_size(operations: str, works: bool) -> None:
    """Guards: by default a second MirroredStrategy of another size on logical CPUs breaks the process's collectives.

    What depends on it: strategies/mirrored.py requests ReductionToOneDevice if there is no GPU.
    """
    command = [sys.executable, "-c", TWO_SIZES, operations]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120 if works else 25, stdin=subprocess.DEVNULL
        )
        ended_well = done.returncode == 0 and "equal" in done.stdout
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        ended_well, output = False, "it hangs"
    assert ended_well == works, output
