"""Complete runs: bitwise equal to a plain loop with one replica, however the steps are divided into calls."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.selection import quick
from tfdist import models
from tfdist.data import ArraySource, source
from tfdist.errors import InputError, NotFiniteError

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((40, 6, 6, 1)).astype("float32")
LABELS = RANDOM.integers(0, 3, 40)
MODELS = {"mlp": "mlp(hidden=(8,))", "cnn": "cnn(filters=(4,))"}
OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "adamw": lambda: keras.optimizers.AdamW(0.01)}


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_trainer(strategy, model="mlp", optimizer="sgd", **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        made = models.build(MODELS[model], (6, 6, 1), 3) if isinstance(model, str) else model()
        options = {"loss": crossentropy(), "seed": 5} | options
        return tfdist.Trainer(made, optimizer=OPTIMIZERS[optimizer](), **options)


def trained(
    strategy, data=(IMAGES, LABELS), *, model="mlp", optimizer="sgd", steps=10, batch_size=8, fit=None, **options
):
    trainer = make_trainer(strategy, model, optimizer, **options)
    trainer.fit(data, batch_size=batch_size, steps=steps, **(fit or {}))
    return trainer


def values(trainer):
    """Returns weights, moving statistics and slots by path."""
    variables = [*trainer.model.variables, *trainer.model.optimizer.variables]
    return {v.path: np.asarray(trainer.strategy.local(v.value)[0]) for v in variables}


def assert_bitwise(a, b):
    assert list(a) == list(b)
    for path in a:
        assert a[path].tobytes() == b[path].tobytes(), path


def plain_loop(model, optimizer, batch_size, steps):
    """Trains with Keras in a hand-written loop; tfdist must be bitwise equal to it on one replica.

    Gradients and update are two functions: in a single one, TensorFlow's graph optimizer would reassociate the last
    product of a gradient with the learning rate, so that rounding would differ from what is written here.
    """
    variables = model.trainable_variables
    optimizer.build(variables)
    loss_fn = crossentropy()

    @tf.function(autograph=False)
    def gradients(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.math.divide_no_nan(tf.reduce_sum(loss_fn.call(y, logits)), float(batch_size))
        return loss, tape.gradient(loss, [v.value for v in variables])

    @tf.function(autograph=False)
    def update(given):
        optimizer.apply(given, variables)

    losses = []
    for k in range(steps):
        positions = tf.range(k * batch_size, (k + 1) * batch_size, dtype=tf.int64)
        rows = source.indices(positions, len(IMAGES), seed=5)
        loss, given = gradients(tf.gather(IMAGES, rows), tf.gather(LABELS.astype("float32"), rows))
        update(given)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_replica_is_bitwise_the_plain_loop(single, model, optimizer):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    expected_model, expected_optimizer = models.build(MODELS[model], (6, 6, 1), 3), OPTIMIZERS[optimizer]()
    start = [np.array(v) for v in expected_model.trainable_variables]
    losses = plain_loop(expected_model, expected_optimizer, 8, 10)
    trainer = make_trainer(single, model, optimizer)
    history = trainer.fit((IMAGES, LABELS), batch_size=8, steps=10, schedule=tfdist.Schedule(log_every=1))
    assert [record["loss"] for record in history.records] == losses
    expected = {v.path: v.numpy() for v in [*expected_model.variables, *expected_optimizer.variables]}
    assert_bitwise(values(trainer), expected)
    assert all(np.any(a != np.array(v)) for a, v in zip(start, expected_model.trainable_variables, strict=True))

    one_device = tfdist.load_strategy("mirrored", devices=1, environment={})
    assert_bitwise(values(trained(one_device, model=model, optimizer=optimizer)), expected)


@pytest.mark.parametrize("strategy", quick(["single", "mirrored2"], "mirrored2"))
def test_steps_per_call_and_records_change_no_bit(strategy, request):
    strategy = request.getfixturevalue(strategy)
    expected = values(trained(strategy, model="cnn", optimizer="adamw"))
    for schedule in (tfdist.Schedule(steps_per_call=1), tfdist.Schedule(steps_per_call=4, log_every=3)):
        found = trained(strategy, model="cnn", optimizer="adamw", fit={"schedule": schedule})
        assert_bitwise(values(found), expected)


@pytest.mark.parametrize("strategy", quick(["single", "mirrored2"], "mirrored2"))
def test_continuing_is_bitwise_one_run(strategy, request):
    """With dropout masks, which depend on the step."""
    strategy = request.getfixturevalue(strategy)

    def model():
        layers = [keras.layers.Flatten(), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((6, 6, 1)), *layers])

    whole = values(trained(strategy, model=model, optimizer="adamw", steps=10))
    trainer = make_trainer(strategy, model, "adamw")
    for _ in range(2):
        trainer.fit((IMAGES, LABELS), batch_size=8, steps=5)
    assert trainer.step == 10
    assert_bitwise(values(trainer), whole)


def test_runs_repeat_and_depend_on_the_seed(mirrored2):
    first = values(trained(mirrored2))
    assert_bitwise(values(trained(mirrored2)), first)
    other = values(trained(mirrored2, seed=6))
    assert any(np.any(first[path] != other[path]) for path in first)


def test_xla_gives_the_same_to_rounding(single, mirrored2):
    for strategy in (single, mirrored2):
        plain, compiled = (values(trained(strategy, jit_compile=jit)) for jit in (False, True))
        for path in plain:
            np.testing.assert_allclose(compiled[path], plain[path], rtol=1e-5, atol=1e-5)


def test_xla_with_communication_inside_is_refused(mirrored2):
    trainer = make_trainer(
        mirrored2, lambda: models.build("cnn(filters=(4,), batch_norm='synchronized')", (6, 6, 1), 3), jit_compile=True
    )
    with pytest.raises(InputError, match="^jit_compile requires .* does not communicate"):
        trainer.fit((IMAGES, LABELS), batch_size=8, steps=1)


def test_class_weights_are_sample_weights(mirrored2):
    by_class = {np.int64(0): 0.5, 2: 3.0}  # as scikit-learn makes them
    weights = np.array([by_class.get(int(label), 1.0) for label in LABELS], "float32")
    expected = values(trained(mirrored2, (IMAGES, LABELS, weights)))
    assert_bitwise(values(trained(mirrored2, fit={"class_weight": by_class})), expected)
    assert any(np.any(expected[path] != value) for path, value in values(trained(mirrored2)).items())


@pytest.mark.parametrize(
    ("loss", "made"),
    [
        ("categorical_crossentropy", lambda labels: keras.utils.to_categorical(labels, 3).astype("int32")),
        ("sparse_categorical_crossentropy", lambda labels: labels.astype("float32")),
    ],
    ids=["one-hot", "floats"],
)
def test_class_weights_of_labels_in_other_forms_are_those_of_keras(loss, made, mirrored2, float64):
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((36,)), keras.layers.Dense(3, "softmax")])

    x, y = np.reshape(IMAGES, [-1, 36]), made(LABELS)
    fit = {"class_weight": {0: 0.1, 2: 3.0}, "batch_size": 8, "shuffle": False, "steps_per_epoch": 2, "verbose": 0}
    plain = build()
    plain.compile("sgd", loss)
    expected = plain.fit(x, y, **fit).history["loss"]
    keras.utils.clear_session(free_memory=False)
    with mirrored2.scope():
        trainer = tfdist.Trainer(build(), optimizer="sgd", loss=loss)
    assert trainer.fit(x, y, **fit).history["loss"] == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(trainer.model.get_weights()[0], plain.get_weights()[0], rtol=1e-10)


class TestNotFinite:
    """One example is infinite; the step that uses it is computed from the order of examples."""

    BAD = 17
    images = IMAGES.copy()
    images[BAD, 0, 0] = np.inf

    def step_of_bad(self):
        positions = tf.range(40, dtype=tf.int64)
        return list(source.indices(positions, 40, seed=5).numpy()).index(self.BAD)

    @pytest.mark.parametrize("steps_per_call", [1, 10])
    def test_the_step_is_named_and_changes_nothing(self, single, steps_per_call):
        step = self.step_of_bad()
        assert step % 10 not in (0, 9), "it must fall into a call"
        trainer = make_trainer(single, optimizer="adamw")
        with pytest.raises(NotFiniteError, match=rf"at step {step}\. The first variable .*: hidden_0/kernel\."):
            trainer.fit(
                (self.images, LABELS),
                batch_size=1,
                steps=40,
                schedule=tfdist.Schedule(steps_per_call=steps_per_call, log_every=10),
            )
        assert trainer.step == step
        assert_bitwise(values(trainer), values(trained(single, optimizer="adamw", batch_size=1, steps=step)))

    def test_on_replicas(self, mirrored2):
        step = self.step_of_bad() // 2
        trainer = make_trainer(mirrored2, optimizer="sgd")
        with pytest.raises(NotFiniteError, match=rf"at step {step}\."):
            trainer.fit((self.images, LABELS), batch_size=2, steps=20)
        assert_bitwise(values(trainer), values(trained(mirrored2, batch_size=2, steps=step)))
        for variable in trainer.model.variables:
            a, b = mirrored2.local(variable.value)
            assert a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("strategy", ["single", "mirrored2"])
def test_a_variable_without_gradient_is_left_alone_and_named_once(strategy, request, caplog):
    strategy = request.getfixturevalue(strategy)

    def model():
        inputs = keras.Input((6, 6, 1))
        flat = keras.layers.Flatten()(inputs)
        unused = keras.layers.Dense(3, name="unused")(flat)
        return keras.Model(inputs, keras.layers.Dense(3, name="used")(flat) + keras.ops.stop_gradient(unused))

    trainer = make_trainer(strategy, model, "adamw")
    before = values(trainer)
    with caplog.at_level(logging.WARNING, "tfdist"):
        trainer.fit((IMAGES, LABELS), batch_size=8, steps=6, schedule=tfdist.Schedule(steps_per_call=2))
    after = values(trainer)
    assert_bitwise({p: after[p] for p in before if "unused" in p}, {p: before[p] for p in before if "unused" in p})
    assert np.any(before["used/kernel"] != after["used/kernel"])
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("tfdist")]
    assert len(warnings) == 1
    assert warnings[0].endswith("not updated: unused/kernel, unused/bias")


def test_a_batch_must_have_a_row_for_each_replica(mirrored4):
    with pytest.raises(InputError, match="at least the number of replicas"):
        make_trainer(mirrored4).fit((IMAGES, LABELS), batch_size=3, steps=1)


def test_records(mirrored2):
    trainer = make_trainer(mirrored2, metrics=["accuracy"])
    history = trainer.fit(
        ((IMAGES, LABELS), (IMAGES[:13], LABELS[:13])),
        batch_size=8,
        steps=10,
        schedule=tfdist.Schedule(log_every=4, eval_every=5),
    )
    assert [(r["kind"], r["step"]) for r in history.records] == [
        ("train", 4),
        ("eval", 5),
        ("train", 8),
        ("train", 10),
        ("eval", 10),
    ]
    assert history.last("train")["step"] == 10
    assert history.last("eval")["epoch"] == 2.0
    assert history.last("train")["learning_rate"] == pytest.approx(0.1)
    assert history.last("train")["gradient_norm"] > 0
    assert history.last("train")["payload_bytes"] > 0
    assert 0 <= history.last("eval")["accuracy"] <= 1
    assert trainer.evaluate((IMAGES[:13], LABELS[:13]), batch_size=4)["loss"] == pytest.approx(
        history.last("eval")["loss"], rel=1e-6
    )


def test_the_gradient_norm_is_that_of_the_whole_gradient(mirrored4):
    trainer = make_trainer(mirrored4)
    batch = source.indices(tf.range(8, dtype=tf.int64), 40, seed=5)
    trainer.build(ArraySource((IMAGES, LABELS)))
    with tf.GradientTape() as tape:
        loss = crossentropy()(LABELS[batch], trainer.model(IMAGES[batch], training=True))
    expected = tf.linalg.global_norm(tape.gradient(loss, [v.value for v in trainer.model.trainable_variables]))
    history = trainer.fit((IMAGES, LABELS), batch_size=8, steps=1)
    assert history.last("train")["gradient_norm"] == pytest.approx(float(expected), rel=1e-5)


def test_a_gradient_that_is_not_finite_behind_a_finite_loss_stops_the_run(single):
    images = IMAGES.copy()
    images[3] = np.inf  # ReLU makes 0 of the NaN, so the loss does not show it
    trainer = make_trainer(single, lambda: models.build("mlp(hidden=(8,))", IMAGES.shape[1:], 3))
    with pytest.raises(NotFiniteError, match="finite: hidden_0/kernel.* The data has NaN or inf in x: "):
        trainer.fit((images, LABELS), batch_size=8, steps=40)
    assert all(np.isfinite(weights).all() for weights in trainer.model.get_weights())
