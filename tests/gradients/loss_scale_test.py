"""The loss scale: tables of its rule, its effect, and all replicas skipping the same steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import NotFiniteError
from tfdist.gradients import LossScale, LossScaler, parse_loss_scale
from tfdist.gradients.loss_scale import ScaleState


def moved(rule, outcomes):
    state = ScaleState(*(tf.constant(s.initial, s.dtype) for s in rule.state()))
    scales = []
    for finite in outcomes:
        state = rule.next_state(state, finite)
        scales.append(float(state.scale))
    return scales, state


@pytest.mark.parametrize(
    ("rule", "outcomes", "scales"),
    [
        (LossScale(initial=8, growth_interval=2), "gggg", [8, 16, 16, 32]),
        (LossScale(initial=8, growth_interval=2), "gbgg", [8, 4, 4, 8]),
        (LossScale(initial=8, growth_interval=1, cap=16), "ggg", [16, 16, 16]),
        (LossScale(initial=1, growth_interval=9, floor=0.25), "bbbb", [0.5, 0.25, 0.25, 0.25]),
        (LossScale(initial=8, growth_interval=2, hysteresis=2), "bbb", [8, 4, 2]),
        (LossScale(initial=8, growth_interval=2, hysteresis=2), "bggbb", [8, 8, 16, 16, 8]),
        (LossScale(initial=8, growth_interval=0), "ggbb", [8, 8, 8, 8]),
    ],
    ids=str,
)
def test_how_the_scale_moves(rule, outcomes, scales):
    found, state = moved(rule, [outcome == "g" for outcome in outcomes])
    assert found == scales
    assert int(state.skipped_in_a_row) == len(outcomes) - len(outcomes.rstrip("b"))


def test_flag():
    assert parse_loss_scale("") is None
    assert parse_loss_scale("128") == LossScale(initial=128, growth_interval=0, floor=128, cap=128)
    assert parse_loss_scale("dynamic") == LossScale()
    assert parse_loss_scale("dynamic(initial_power=4, hysteresis=3)") == LossScale(initial=16, hysteresis=3)


def half_precision_trainer(strategy, loss=None, **options):
    """Returns a trainer of a float16 model with one weight, w = 0, and a loss of mean((w x - y)^2) times a factor."""
    keras.utils.clear_session(free_memory=False)
    with strategy.scope():
        inputs = keras.Input((1,))
        outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")(inputs)
        model = keras.Model(inputs, outputs)
        return tfdist.Trainer(
            model, optimizer=keras.optimizers.SGD(1e6, momentum=0.9), loss=loss or "mean_squared_error", **options
        )


def small(y_true, y_pred):
    """A loss whose gradient with respect to an output, 1e-8, underflows in float16."""
    return tf.cast(y_pred - y_true, tf.float32)[:, 0] * 1e-8


def test_a_gradient_that_float16_cannot_hold_trains_with_scaling_only(mirrored2):
    data = (np.ones((8, 1), "float32"), np.ones((8, 1), "float32"))
    weights = []
    for scale in (1.0, 2.0**15):
        rule = LossScale(initial=scale, growth_interval=0, floor=scale, cap=scale)
        trainer = half_precision_trainer(mirrored2, small, loss_scale=rule)
        trainer.fit(data, batch_size=8, steps=2)
        weights.append(float(trainer.model.get_weights()[0][0, 0]))
    assert weights[0] == 0.0
    assert weights[1] == pytest.approx(-1e6 * 1e-8 * (1 + 1.9), rel=1e-2)


def overflowing(rows):
    """Returns eight rows, of which those in `rows` overflow float16 in the forward pass."""
    x = np.ones((8, 1), "float32")
    x[list(rows)] = 1e6
    return x, np.ones((8, 1), "float32")


@pytest.mark.parametrize("compression", ["none", "topk(ratio=0.5)"])
def test_what_overflows_on_one_replica_is_skipped_by_all(mirrored2, compression):
    """Weights, slots, error feedback and moving statistics are unchanged, bit for bit; the scale is halved."""
    keras.utils.clear_session(free_memory=False)
    with mirrored2.scope():
        inputs = keras.Input((1,))
        hidden = keras.layers.Dense(4, dtype="mixed_float16")(inputs)
        hidden = keras.layers.BatchNormalization(dtype="mixed_float16")(hidden)
        model = keras.Model(inputs, keras.layers.Dense(1, dtype="mixed_float16")(hidden))
        trainer = tfdist.Trainer(
            model,
            optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
            loss="mse",
            compression=compression,
            compression_min_bytes=0,
            loss_scale=LossScale(initial=2.0**10),
        )
    good = (np.random.default_rng(0).standard_normal((8, 1)).astype("float32"), np.ones((8, 1), "float32"))
    trainer.fit(good, batch_size=8, steps=3)

    def everything():
        values = [v for v in [*model.variables, *model.optimizer.variables] if "seed" not in v.path]
        arrays = [np.asarray(value) for v in values for value in mirrored2.local(v.value)]
        kept = {name: array.values for name, array in trainer.state.items() if not name.startswith("loss_scale")}
        return [*arrays, *kept.values()]

    before = everything()
    assert trainer.loss_scale == 1024
    history = trainer.fit(overflowing([5]), batch_size=8, steps=1)
    assert trainer.loss_scale == 512
    assert history.last("train")["skipped_steps"] == 1
    assert history.last("train")["loss_scale"] == 512
    for a, b in zip(before, everything(), strict=True):
        np.testing.assert_array_equal(a, b)
    history = trainer.fit(good, batch_size=8, steps=1)
    assert history.last("train")["skipped_steps"] == 0
    assert any(np.any(a != b) for a, b in zip(before, everything(), strict=True))


def test_too_many_in_a_row_end_the_run(mirrored2):
    trainer = half_precision_trainer(mirrored2, max_skipped_steps=3)
    assert trainer.loss_scale == 2.0**15, "float16 has a dynamic scale by default"
    with pytest.raises(NotFiniteError, match=r"\(max_skipped_steps.* The last is step 2,.*scale of 4096") as caught:
        trainer.fit(overflowing(range(8)), batch_size=8, steps=10)
    assert caught.value.exit_code == 3
    assert trainer.step == 2


def test_other_precisions_have_no_scale(single):
    with single.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, dtype="mixed_bfloat16")])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    assert trainer.loss_scale is None
    assert not trainer.state


def test_keras_loss_scale_optimizer_is_taken_over(single, caplog):
    with single.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, dtype="mixed_float16")])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0)
        with caplog.at_level("INFO", "tfdist"):
            trainer = tfdist.Trainer(model, optimizer=optimizer, loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    assert trainer.loss_scale == 64.0
    assert "LossScaleOptimizer" in caplog.text


def test_in_a_loop_of_ones_own(mirrored2):
    """If one replica overflows, all skip the step and halve the scale; then a finite step follows."""
    scaler = LossScaler(mirrored2, LossScale(initial=4.0, growth_interval=1))
    with mirrored2.scope():
        weight = tf.Variable(1.0, trainable=False)

    @tf.function(autograph=False)
    def step(bad):
        def compute():
            own = tf.where(tf.equal(mirrored2.collectives.rank, 1), bad, 1.0)
            with tf.GradientTape() as tape:
                tape.watch(weight)
                loss = scaler.scale(weight * own)
            gradients = scaler.unscale(tape.gradient(loss, [weight]))
            return gradients, scaler.all_finite(gradients)

        gradients, finite = mirrored2.run(compute)
        finite = mirrored2.local(finite)[0]
        summed = sum(mirrored2.local(gradients[0]))
        tf.cond(
            finite, lambda: mirrored2.run(lambda: weight.assign_sub(summed)), lambda: mirrored2.run(weight.read_value)
        )
        scaler.update(finite)

    step(tf.constant(np.inf, tf.float32))
    assert [float(v) for v in mirrored2.local(weight)] == [1.0, 1.0]
    assert float(mirrored2.local(scaler.variables[0])[0]) == 2.0
    step(tf.constant(2.0))
    assert [float(v) for v in mirrored2.local(weight)] == [-2.0, -2.0]
    assert float(mirrored2.local(scaler.variables[0])[0]) == 4.0
