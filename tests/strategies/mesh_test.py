"""Ordinary Keras objects on a mesh; tests/conformance tests that results equal those of one device."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.dtensor.python.api import _dtensor_device
from tensorflow.experimental import dtensor

import tfdist
from tfdist import keras_internals
from tfdist.config.layouts import Layout
from tfdist.errors import InputError, NotFiniteError
from tfdist.gradients import LossScale

RANDOM = np.random.default_rng(3)
TOKENS = RANDOM.integers(0, 12, (64, 6)).astype("int32")
NEXT = RANDOM.integers(0, 12, (64, 6))


def transformer(**arguments):
    return tfdist.models.transformer(input_shape=(6,), classes=12, layers=1, width=8, heads=2, **arguments)


def trainer_of(strategy, build=transformer, optimizer="adam", **options):
    keras.utils.set_random_seed(11)
    with strategy.scope():
        return tfdist.Trainer(
            build(),
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **options,
        )


def mesh(shape="data:4", **options):
    return tfdist.load_strategy("mesh", mesh_shape=shape, environment={}, **options)


def values(trainer):
    return {v.path: np.array(trainer.strategy.local(v.value)[0]) for v in trainer.model.variables}


def shard(variable):
    return dtensor.unpack(tf.convert_to_tensor(keras_internals.value_of(variable)))[0].shape


def test_variables_are_born_laid_out_with_the_values_of_one_device(single, mesh2x2):
    expected, trainer = values(trainer_of(single)), trainer_of(mesh2x2)
    found = values(trainer)
    assert set(found) == set(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    by_path = {v.path: v for v in trainer.model.variables}
    assert shard(by_path["block_0_attention/query/kernel"]) == (8, 1, 4)
    assert shard(by_path["block_0_ffn_in/kernel"]) == (8, 16)
    assert shard(by_path["block_0_ffn_out/kernel"]) == (16, 8)
    assert shard(by_path["final_norm/gamma"]) == (8,)


def test_weights_that_are_assigned_in_the_scope_are_the_first(mesh2x2):
    with mesh2x2.scope():
        dense = keras.layers.Dense(4, name="out")
        dense.build((None, 3))
        dense.set_weights([np.full((3, 4), 2.0), np.arange(4.0)])
    assert shard(dense.kernel) == (3, 2)
    np.testing.assert_array_equal(mesh2x2.local(dense.kernel.value)[0], np.full((3, 4), 2.0))
    np.testing.assert_array_equal(mesh2x2.local(dense.bias.value)[0], np.arange(4.0))


class Lazy(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(6), keras.layers.Dense(12)

    def call(self, inputs):
        return self.last(self.first(tf.cast(inputs, tf.float32)))


def test_a_model_that_is_built_by_the_trainer(single, mesh2x2):
    """Its layers have rows and columns that are divisible by two devices."""
    data = (TOKENS, NEXT[:, 0])
    expected, found = trainer_of(single, Lazy, "sgd"), trainer_of(mesh2x2, Lazy, "sgd")
    losses = [t.fit(data, batch_size=8, steps=3).last("train")["loss"] for t in (expected, found)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert shard(found.model.last.kernel) == (6, 6)
    names = [[v._value.name for v in t.model.weights] for t in (expected, found)]
    assert names[0] == names[1], "optimizers exclude variables by them"


def test_a_fit_inside_the_scope(mesh2x2):
    with mesh2x2.scope():
        trainer = tfdist.Trainer(transformer(), optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(True))
        trainer.fit((TOKENS, NEXT), batch_size=8, steps=1)


def test_a_step_that_is_not_finite_changes_nothing(mesh2x2):
    weights = np.ones([64, 6], "float32")
    weights[13] = np.inf
    trainer = trainer_of(mesh2x2)
    before = values(trainer)
    with pytest.raises(NotFiniteError, match="at step [0-7]"):
        trainer.fit((TOKENS, NEXT, weights), batch_size=8, steps=8)
    if trainer.step == 0:
        for path, value in values(trainer).items():
            np.testing.assert_array_equal(value, before[path], err_msg=path)
    assert all(np.isfinite(value).all() for value in values(trainer).values())


def test_steps_that_overflow_are_skipped(mesh2x2):
    trainer = trainer_of(mesh2x2, loss_scale=LossScale(initial=2.0**100, cap=2.0**120, growth_interval=1000))
    weights = np.full([64, 6], 2.0**30, "float32")
    before = values(trainer)
    history = trainer.fit((TOKENS, NEXT, weights), batch_size=8, steps=1, schedule=tfdist.Schedule(log_every=1))
    assert history.last("train")["skipped_steps"] == 1 and history.last("train")["loss_scale"] == 2.0**99
    assert "payload_bytes" not in history.last("train"), "the engine communicates, and does not say how much"
    for path, value in values(trainer).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    trainer.fit((TOKENS, NEXT), batch_size=8, steps=2)
    assert any(np.any(value != before[path]) for path, value in values(trainer).items())


def test_other_threads_run_while_a_step_is_waited_for(mesh2x2):
    """Otherwise, a process would not send heartbeats during a long step."""

    @tf.function(autograph=False)
    def slow(x):
        for _ in range(8):
            x = tf.matmul(x, x) * 1e-3
        return tf.reduce_sum(x)

    rows = mesh2x2.devices.place(np.ones([1500, 1500], "float32"), Layout((None, None)))
    mesh2x2.local(slow(rows))

    # Other programs of a loaded machine may delay that thread, too.
    assert any(longest_pause(lambda: mesh2x2.local(slow(rows))) < 0.5 for _ in range(10))


def longest_pause(work):
    """Returns the longest time without a turn of another thread, as a part of the time that some work takes."""
    ended, turns = threading.Event(), []

    def count():
        while not ended.wait(1e-3):
            turns.append(time.monotonic())

    thread = threading.Thread(target=count)
    thread.start()
    begun = time.monotonic()
    work()
    end = time.monotonic()
    ended.set()
    thread.join()
    return np.diff([begun, *turns, end]).max() / (end - begun)


def test_a_step_is_compiled_once(mesh2x2):
    """The engine recompiles when a small number from the host changes (tests/traps/dtensor_test.py)."""
    trainer = trainer_of(mesh2x2, lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(12)]))
    before = compiled_programs()
    trainer.fit((TOKENS, NEXT[:, 0]), batch_size=8, steps=3)
    assert len(compiled_programs() - before) == 1


def compiled_programs():
    return {
        name for name in _dtensor_device()._get_stats() if "__inference_record_graph_" in name and "__func_" in name
    }


def test_slots_lie_where_their_variables_do_and_a_saved_model_is_loaded_anywhere(mesh2x2, tmp_path):
    trainer = trainer_of(mesh2x2)
    trainer.fit((TOKENS, NEXT), batch_size=8, steps=2)
    slots = [v for v in trainer.model.optimizer.variables if "ffn_in_kernel" in v.path]
    assert [shard(v) for v in slots] == [(8, 16)] * 2
    trainer.save(str(tmp_path / "model.keras"))
    alone = keras.models.load_model(tmp_path / "model.keras")
    with mesh2x2.scope():
        under_the_scope = keras.models.load_model(tmp_path / "model.keras")
    for loaded in (alone, under_the_scope):
        for path, value in values(trainer).items():
            found = {v.path: v for v in loaded.variables}[path]
            np.testing.assert_array_equal(np.array(found), value, err_msg=path)
    assert int(alone.optimizer.iterations) == 2
    trainer.fit((TOKENS, NEXT), batch_size=8, steps=1)  # places the variables on the mesh again


def with_random_layers():
    inputs = keras.Input((4, 8))
    hidden = keras.layers.MultiHeadAttention(2, 4, dropout=0.3)(inputs, inputs)
    hidden = keras.layers.GaussianNoise(0.1)(keras.layers.SpatialDropout1D(0.2)(hidden))
    hidden = keras.layers.Dense(8)(keras.layers.AlphaDropout(0.2)(keras.layers.GaussianDropout(0.2)(hidden)))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(keras.layers.Dropout(0.5)(hidden))))


def test_random_layers_draw_the_numbers_of_one_device(single, mesh2x2, mesh4x1, float64):
    random = np.random.default_rng(2)
    data = random.standard_normal((16, 4, 8)), random.integers(0, 2, 16)
    found = []
    for strategy in (single, mesh2x2, mesh4x1):
        keras.utils.clear_session(free_memory=False)  # for equal names
        trainer = trainer_of(strategy, with_random_layers)
        trainer.fit(data, batch_size=8, steps=3)
        found.append(values(trainer))
    for path, value in found[0].items():
        for other in found[1:]:
            np.testing.assert_allclose(other[path], value, rtol=1e-9, atol=1e-12, err_msg=path)


def fit_one(strategy, build=transformer, data=(TOKENS, NEXT), batch_size=8, optimizer="adam"):
    trainer_of(strategy, build, optimizer).fit(data, batch_size=batch_size, steps=1)


class Calling(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def calling(function):
    return lambda: keras.Sequential([keras.Input((6,)), Calling(function), keras.layers.Dense(12)])


def table_and_dense():
    inputs = keras.Input((6,), dtype="int32")
    return keras.Model(inputs, keras.layers.Dense(12)(keras.layers.Embedding(12, 8)(inputs)))


def recurrent(unroll):
    def build():
        return keras.Sequential([keras.Input((6, 2)), keras.layers.SimpleRNN(4, unroll=unroll), keras.layers.Dense(12)])

    return build


def ensure_shape(strategy):
    x = strategy.devices.place(np.ones(4, "float32"), Layout(("data",)))
    strategy.compiled(lambda x: tf.ensure_shape(tf.boolean_mask(x, x > 0), [4]))(x)


def name_dims_of_what_is_laid_out(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="dense")])
    tfdist.name_dims(model, {".*kernel": "embed ffn"})


ROWS = TOKENS.astype("float32"), NEXT[:, 0]
SEQUENCES = RANDOM.standard_normal((16, 6, 2)).astype("float32"), NEXT[:16, 0]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (ensure_shape, "operations that DTensor supports. Received: tf.EnsureShape.*Compute it in"),
        (
            lambda _: fit_one(mesh("data:1;model:4", layout="vocab:model;in:model"), table_and_dense),
            "DTensor cannot compile .* Received: input and output layout",
        ),
        (lambda on: fit_one(on, batch_size=7), "^batch_size must be divisible by .*: batch_size=7 and 2"),
        # What ends the process inside the engine.
        (
            lambda on: fit_one(on, calling(lambda x: x[None][0]), ROWS),
            r"x\[None\] must name every dim.*Use tf.expand_dims",
        ),
        (
            lambda on: fit_one(on, calling(lambda x: tf.where(tf.reduce_sum(x) > 0, x, -x)), ROWS),
            "where must not have a scalar condition.*Broadcast the condition",
        ),
        (lambda on: fit_one(on, recurrent(unroll=False), SEQUENCES), "must not contain loops.*unroll=True"),
        # What the engine does itself.
        (lambda on: trainer_of(on, jit_compile=True), "On a mesh, DTensor compiles its programs itself"),
        (lambda on: trainer_of(on, compression="int8"), "On a mesh, DTensor reduces gradients itself"),
        (lambda _: mesh(shard="all"), "^shard=all is not known"),
        (lambda _: mesh(shard="optimizer", shard_axis="modell"), "no axis modell"),
        (name_dims_of_what_is_laid_out, "must be called before variables are laid out. Received: .*dense/kernel"),
    ],
)
def test_what_is_refused(mistake, message, mesh2x2):
    with pytest.raises(InputError, match=message):
        mistake(mesh2x2)


def bytes_on_a_device(variables):
    return sum(np.prod(shard(v), initial=1) * tf.as_dtype(v.dtype).size for v in variables)


@pytest.mark.parametrize(
    ("stage", "parameters", "slots"), [("none", 1, 1), ("optimizer", 1, 4), ("gradients", 1, 4), ("parameters", 4, 4)]
)
def test_state_shrinks_with_the_devices(stage, parameters, slots):
    """Every variable of this model has a dim that is divisible by 4."""

    def build():
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(12)])

    trainer = trainer_of(mesh(shard=stage, shard_min_elements=1), build)
    trainer.fit((RANDOM.standard_normal((16, 8)).astype("float32"), NEXT[:16, 0]), batch_size=8, steps=1)
    whole = trainer.model.count_params() * 4
    kept = [v for v in trainer.model.optimizer.variables if v.shape.rank]
    assert bytes_on_a_device(trainer.model.variables) == whole / parameters
    assert bytes_on_a_device(kept) == 2 * whole / slots


def test_small_variables_stay_whole():
    with mesh(shard="parameters", shard_min_elements=17).scope():
        dense = keras.layers.Dense(16)
        dense.build((None, 8))
    assert (shard(dense.kernel), shard(dense.bias)) == ((8, 4), (16,))


def test_callbacks_read_and_set_weights(mesh2x2):
    trainer = trainer_of(mesh2x2)
    first = values(trainer)
    best = keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True, mode="max", start_from_epoch=0)
    trainer.fit((TOKENS[:16], NEXT[:16]), batch_size=8, epochs=3, callbacks=[best])
    assert trainer.step < 6  # the loss decreased, which counts as worse here
    kept = trainer.model.get_weights()
    trainer.model.set_weights([weight + 1 for weight in kept])
    for variable, weight in zip(trainer.model.weights, kept, strict=True):
        np.testing.assert_allclose(np.array(variable), weight + 1, err_msg=variable.path)
    assert shard(trainer.model.get_layer("block_0_ffn_in").kernel) == (8, 16)
    assert any(np.any(first[v.path] != weight) for v, weight in zip(trainer.model.weights, kept, strict=True))


def test_a_scope_that_fails_leaves_nothing_behind(mesh2x2):
    with pytest.raises(InputError, match="shards out of .*odd/kernel"), mesh2x2.scope():
        layer = keras.layers.Dense(3, name="odd")
        layer.build((None, 2))
    with mesh2x2.scope():
        keras.layers.Dense(4).build((None, 2))


class Counting(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)

    def call(self, inputs):
        self.calls.assign(self.calls + 1.0)
        return inputs


def test_a_layer_s_own_state_moves_with_sharded_parameters():
    counting = []

    def build():
        counting.append(Counting())
        return keras.Sequential([keras.Input((4,)), counting[0], keras.layers.Dense(12)])

    trainer = trainer_of(mesh(shard="parameters", shard_min_elements=1), build, "sgd")
    trainer.fit((RANDOM.standard_normal((16, 4)).astype("float32"), NEXT[:16, 0]), batch_size=8, steps=3)
    assert float(np.array(counting[0].calls)) == 3
